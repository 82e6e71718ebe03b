"""The routes as an OpenAPI 3.1 document, from the very types that are read and sent.

Request bodies are pydantic's schemas, answers are msgspec's, corrected for one thing: msgspec tells what it would accept, here it
counts what is sent. So a field of an answer is required unless it may be UNSET. Knows no route: `routes` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import msgspec
from pydantic import BaseModel

from halfbyte import __version__
from halfbyte.entrypoints.middleware import PUBLIC_PATHS
from halfbyte.entrypoints.openai.errors import ErrorBody, ErrorForm

Schema = dict[str, Any]

# Either will do.
KEYS: Schema = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}

REF = "#/components/schemas/{name}"
# What is decided before a route is reached (the Host header, the size of the body), and what no route has planned.
EVERYWHERE = (400, 413, 500)
MEANINGS = {
    400: "The request is wrong; the message says what is possible.",
    401: "No valid API key.",
    404: "What the request names is not there.",
    413: "The body is too large.",
    500: "The engine gave this request up, or a fault of the server.",
    501: "The model cannot do this.",
    503: "The server is full, asleep or stopping, or its engine is gone.",
}


@dataclass(frozen=True, slots=True)
class Answers:
    """What a route is for and what it answers. whole: of a 200: a msgspec Struct, str for plain text, None for nothing.

    events: the data of each event, where it can stream, errors among them; types with tags are named after these.
    errors: statuses beside those of every route; where a 200 has no body, they have none either. error: their form.
    parameters: of path and query, as OpenAPI writes them.
    """

    summary: str
    whole: type | None
    events: tuple[type[msgspec.Struct], ...] = ()
    errors: tuple[int, ...] = ()
    parameters: tuple[Schema, ...] = ()
    error: type[ErrorForm] = ErrorBody

    @property
    def types(self) -> Iterator[type]:
        return (kind for kind in (self.whole, *self.events, self.error) if kind is not None and kind is not str)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. request: what its body holds, None where it takes none."""

    method: str
    path: str
    request: type[BaseModel] | None
    answers: Answers
    is_admin: bool = False

    def is_closed(self, *, keyed: bool) -> bool:
        """Whether it takes a key, on a server that wants one of everybody or not."""
        return self.is_admin or (keyed and self.path not in PUBLIC_PATHS)

    @property
    def name(self) -> str:
        """Follows from method and path alone, so that generated clients keep their names."""
        return re.sub(r"\W+", "_", f"{self.method.lower()}{self.path}").strip("_")


def build_document(operations: Sequence[Operation], *, keyed: bool) -> Schema:
    """keyed: whether the server wants an API key."""
    answers = [operation.answers for operation in operations]
    names, schemas = _schemas(kind for answer in answers for kind in answer.types)
    has_keys = any(operation.is_closed(keyed=keyed) for operation in operations)
    statuses = {*EVERYWHERE, *((401,) if has_keys else ()), *(status for answer in answers for status in answer.errors)}
    components: Schema = {
        "schemas": schemas,
        "responses": {
            _error_name(form, status): _error(status, names[form])
            for form in dict.fromkeys(answer.error for answer in answers)
            for status in sorted(statuses)
        },
    }
    if has_keys:
        components["securitySchemes"] = KEYS
    document: Schema = {"openapi": "3.1.0", "info": {"title": "Halfbyte", "version": __version__}, "paths": {}}
    for operation in operations:
        methods = document["paths"].setdefault(operation.path, {})
        methods[operation.method.lower()] = _operation(operation, names, closed=operation.is_closed(keyed=keyed))
    return document | {"components": components}


def _operation(operation: Operation, names: dict[type, str], *, closed: bool) -> Schema:
    answers = operation.answers
    told: Schema = {"operationId": operation.name, "summary": answers.summary}
    if answers.parameters:
        told["parameters"] = list(answers.parameters)
    if operation.request is not None:
        told["requestBody"] = {"content": {"application/json": {"schema": _inlined(operation.request)}}, "required": True}
    if closed:
        told["security"] = [{name: []} for name in KEYS]
    responses: dict[int, Schema] = {200: {"description": "Done.", **_content(answers, names)}}
    for status in (*EVERYWHERE, *((401,) if closed else ()), *answers.errors):
        bare = answers.whole is None and status in answers.errors
        named = {"$ref": f"#/components/responses/{_error_name(answers.error, status)}"}
        responses[status] = {"description": MEANINGS[status]} if bare else named
    return told | {"responses": {str(status): responses[status] for status in sorted(responses)}}


def _content(answers: Answers, names: dict[type, str]) -> Schema:
    if answers.whole is None:
        return {}
    if answers.whole is str:
        return {"content": {"text/plain": {"schema": {"type": "string"}}}}
    content: Schema = {"application/json": {"schema": _ref(names[answers.whole])}}
    if answers.events:
        events = {"anyOf": [_ref(names[kind]) for kind in answers.events]}
        is_named = answers.events[0].__struct_config__.tag is not None
        last = "each is named after its type" if is_named else "the last event is [DONE]"
        content["text/event-stream"] = {"schema": events | {"description": f"Of each event's data; {last}."}}
    return {"content": content}


def _error_name(form: type[ErrorForm], status: int) -> str:
    return f"Error{status}" if form is ErrorBody else f"{form.__name__}{status}"


def _error(status: int, name: str) -> Schema:
    told: Schema = {"description": MEANINGS[status], "content": {"application/json": {"schema": _ref(name)}}}
    if status == 503:
        told["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    return told


def _ref(name: str) -> Schema:
    return {"$ref": REF.format(name=name)}


def _schemas(types: Iterable[type]) -> tuple[dict[type, str], dict[str, Schema]]:
    """The name of each type and of all that it holds, and the schemas by name."""
    classes = list(dict.fromkeys(cls for kind in types for cls in _classes(msgspec.inspect.type_info(kind))))
    refs, schemas = msgspec.json.schema_components(classes, ref_template=REF)
    names = {cls: ref["$ref"].removeprefix(REF.format(name="")) for cls, ref in zip(classes, refs, strict=True)}
    for cls, name in names.items():
        hints = get_type_hints(cls)
        schemas[name]["required"] = [field for field in schemas[name]["properties"] if not _may_be_absent(hints.get(field))]
        for described in schemas[name]["properties"].values():
            described.pop("default", None)
    return names, schemas


def _may_be_absent(hint: Any) -> bool:
    return msgspec.UnsetType in get_args(hint)


def _classes(node: Any) -> Iterator[type]:
    """The structs and dataclasses of a type that msgspec has looked at."""
    if isinstance(node, msgspec.inspect.StructType | msgspec.inspect.DataclassType):
        yield node.cls
        node = [field.type for field in node.fields]
    elif isinstance(node, msgspec.inspect.Type):
        node = list(msgspec.structs.asdict(node).values())
    if isinstance(node, list | tuple):
        for part in node:
            yield from _classes(part)


def _inlined(model: type[BaseModel]) -> Schema:
    """The model's JSON schema with its definitions in place, so that it can be read by itself."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, dict):
            name = str(node.get("$ref", "")).removeprefix("#/$defs/")
            return inline(definitions[name]) if name else {key: inline(value) for key, value in node.items()}
        return [inline(item) for item in node] if isinstance(node, list) else node

    resolved: Schema = inline(schema)
    return resolved
