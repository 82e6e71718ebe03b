"""The routes of operators, which exist with --enable-admin only and have a key of their own (`middleware.ApiKeys`).

Parameters stand in the query, as vLLM's clients send them, and are checked strictly; a body is refused, so that none is
overlooked. Registered by `routes`. A new route is a line in ROUTES.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, get_origin

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from halfbyte.engine.messages import ResetPrefixCache
from halfbyte.entrypoints.openai.errors import HttpError, bad_request, unavailable, validation_error
from halfbyte.entrypoints.openai.frontend import Frontend
from halfbyte.entrypoints.openai.openapi import Answers
from halfbyte.entrypoints.openai.streaming import CLIENT_CLOSED, ClientWatch
from halfbyte.entrypoints.openai.wire import to_json
from halfbyte.errors import EngineDeadError

log = logging.getLogger(__name__)


class Query(BaseModel):
    """The parameters of a route. Lists are given by repeating the parameter."""

    model_config = ConfigDict(extra="forbid")


class ResetPrefixCacheQuery(Query):
    reset_running_requests: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """handler: gets an instance of `query` and returns one of `whole`."""

    method: str
    path: str
    query: type[Query]
    handler: Callable[[Frontend, Any], Awaitable[msgspec.Struct]]
    summary: str
    whole: type[msgspec.Struct]

    @property
    def answers(self) -> Answers:
        schemas = self.query.model_json_schema().get("properties", {})
        parameters = tuple({"name": name, "in": "query", "schema": schema} for name, schema in schemas.items())
        return Answers(self.summary, self.whole, errors=(503,), parameters=parameters)


class CacheReset(msgspec.Struct):
    """success: false while requests hold blocks; then nothing was forgotten."""

    success: bool


async def reset_prefix_cache(frontend: Frontend, query: ResetPrefixCacheQuery) -> CacheReset:
    done = await frontend.engine.control(ResetPrefixCache(query.reset_running_requests))
    return CacheReset(done.success)


ROUTES = (Route("POST", "/reset_prefix_cache", ResetPrefixCacheQuery, reset_prefix_cache, "Forget cached prefixes", CacheReset),)
PATHS = frozenset(route.path for route in ROUTES)


async def answer(frontend: Frontend, request: Request, route: Route) -> Response:
    """Run one call while its client is there. Raises what is wrong with it."""
    frontend.require_serving()
    query = _read_query(request, route.query)
    try:
        if await request.body():
            raise bad_request(f"{route.path} takes its parameters in the query, and no body", "body")
        async with ClientWatch(request.receive) as client:
            found = await route.handler(frontend, query)
    except EngineDeadError as error:
        raise unavailable(f"the engine is gone: {error}", retry_after_s=5) from None
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED)
    if client.gone:
        log.info("%s %s: the client left before it was done", route.path, query)
        return Response(status_code=CLIENT_CLOSED)
    if route.method != "GET":
        log.info("%s %s: %s", route.path, query, found)
    return to_json(found)


def _read_query(request: Request, model: type[Query]) -> Query:
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
