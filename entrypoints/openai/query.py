"""Query parameters, read as strictly as bodies are: each is what its route says, or a 400 that names it."""

from __future__ import annotations

from typing import Any, TypeVar, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from halfbyte.entrypoints.openai.errors import HttpError, bad_request, validation_error

QueryModel = TypeVar("QueryModel", bound="Query")


class Query(BaseModel):
    """The parameters of a route. Lists are given by repeating the parameter."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def parameters(cls) -> tuple[dict[str, Any], ...]:
        """As OpenAPI writes them."""
        schemas = cls.model_json_schema().get("properties", {})
        return tuple({"name": name, "in": "query", "schema": schema} for name, schema in schemas.items())


def read_query(request: Request, model: type[QueryModel]) -> QueryModel:
    """HttpError 400 says what is wrong."""
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        given.setdefault(name, []).append(value)
    for name, values in given.items():
        field = model.model_fields.get(name)
        if field is not None and get_origin(field.annotation) is not list and len(values) > 1:
            raise bad_request(f"{name} is given {len(values)} times", f"query.{name}")
        if field is None or get_origin(field.annotation) is not list:
            given[name] = values[0]
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise HttpError(validation_error(error, "query")) from None
