"""Requests that the server's own OpenAPI document leads to, made by schemathesis from fixed seeds, and what it says of answers.

Bodies as a whole, and, because few of those get past their first mistake, each field by itself in a body that is right. Both fit
the schema or break it. Knows nothing of the server but its document. Used by `test_schemathesis`.
"""

from __future__ import annotations

import json
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any
from urllib.parse import urlencode

import httpx
import jsonschema
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

with warnings.catch_warnings():
    # what it imports warns of what its next release will drop
    warnings.simplefilter("ignore", DeprecationWarning)
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

Schema = dict[str, Any]
JSON_TYPE, EVENTS = "application/json", "text/event-stream"
CHECKS = [status_code_conformance, content_type_conformance, response_headers_conformance, response_schema_conformance]
# The document's numbers are 64 bits wide, and most limits are near zero.
NEAR = {"minimum": -2, "maximum": 20}
# Choices (n) that a request gets at most here, and that a server grants: thousands of answers would take minutes.
MAX_CHOICES, GRANTED_CHOICES = 20, 16384
# What the demo model has no tokens for, and the fields that may ask it to write that: it finds out in the midst of its answer.
UNWRITABLE = re.compile("[\x04\x06\x13\x14\x16\x1d\U00040000-\U000bffff]")
ASKING = ("response_format", "structured_outputs", "output_config", "output_format", "text", "tools")
# How many values are drawn: for a whole body, for a field, and more for a field with a long schema. Each costs the more, the
# longer the schema is: hence at most so many that they come to MOST_CHARS together, or LEAST.
PER_BODY, PER_FIELD, CHARS_PER_VALUE = 20, 6, 160
MOST_CHARS, LEAST = 20_000, 5


@dataclass(frozen=True, slots=True)
class Sent:
    """One request. path: as the document has it. field: the one that was varied, "" for the whole body. body: None for none."""

    method: str
    path: str
    field: str
    body: bytes | None
    query: str = ""

    @property
    def streams(self) -> bool:
        try:
            body = json.loads(self.body or b"")
        except ValueError:
            return False
        return isinstance(body, dict) and body.get("stream") is True


def requests_of(document: Schema, right: Mapping[str, Schema], beside: Mapping[str, Mapping[str, Schema]]) -> Iterator[Sent]:
    """All requests for a document, without repetitions. Each is made when it is asked for: that takes longer than to send it.

    right: for each path that takes a body, one that is right. beside: path -> field -> other fields without which it is refused.
    """
    made: set[Sent] = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody")
            bodies = (
                [("", None)] if body is None else _bodies(body["content"][JSON_TYPE]["schema"], right[path], beside.get(path, {}))
            )
            of_bodies = (Sent(method.upper(), path, field, content) for field, content in bodies)
            of_queries = (Sent(method.upper(), path, name, None, query) for name, query in _queries(operation))
            for sent in chain(of_bodies, of_queries):
                if sent not in made:
                    made.add(sent)
                    yield sent


class Answers:
    """What a document says of answers, held against real ones by schemathesis.

    Objects whose fields the document lists may have no others here: a client may be told more one day, a test must hear of it.
    """

    def __init__(self, document: Schema) -> None:
        self._document = _closed(document)
        self._operations = schemathesis.openapi.from_dict(self._document)
        self._of_events: dict[str, jsonschema.Draft202012Validator] = {}

    def fault(self, sent: Sent, answer: httpx.Response) -> str | None:
        """What the document does not say of this answer, None if it says all of it."""
        try:
            named = {name: f"{{{name}}}" for name in re.findall(r"{(\w+)}", sent.path)}  # as they were sent
            is_stream = answer.headers.get("content-type", "").startswith(EVENTS)
            # schemathesis holds an event's fields against the schema, which tells of the JSON in one of them
            checks = [check for check in CHECKS if not (is_stream and check is response_schema_conformance)]
            self._operations[sent.path][sent.method].Case(path_parameters=named).validate_response(answer, checks=checks)
            if is_stream:
                for event in answer.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
                    self._events(sent).validate(json.loads(event.partition("data: ")[2]))
        except (AssertionError, BaseExceptionGroup, jsonschema.ValidationError) as error:
            return str(error)
        return None

    def _events(self, sent: Sent) -> jsonschema.Draft202012Validator:
        if sent.path not in self._of_events:
            content = self._document["paths"][sent.path][sent.method.lower()]["responses"]["200"]["content"]
            schema = content[EVENTS]["schema"] | {"components": self._document["components"]}
            self._of_events[sent.path] = jsonschema.Draft202012Validator(schema)
        return self._of_events[sent.path]


def _closed(node: Any) -> Any:
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    shut = {"additionalProperties": False} if "title" in node and "properties" in node else {}
    return shut | {key: _closed(value) for key, value in node.items()}


def _bodies(schema: Schema, right: Schema, beside: Mapping[str, Schema]) -> Iterator[tuple[str, bytes | None]]:
    """(the field that is varied or "", content) for one route."""
    for value in _values(json.dumps(schema), PER_BODY):
        if isinstance(value, bytes):
            yield "", value
        else:
            yield "", _encode(value)
            yield "", _encode(value | right if isinstance(value, dict) else right)
    for field, described in schema["properties"].items():
        # what says more has more ways to be wrong
        text = json.dumps(described)
        for value in _values(text, PER_FIELD + len(text) // CHARS_PER_VALUE):
            if not isinstance(value, bytes):
                yield field, _encode({**right, **beside.get(field, {}), field: value})


def _queries(operation: Schema) -> Iterator[tuple[str, str]]:
    """(the parameter that is varied, the query): each by itself."""
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "query":
            for value in _values(json.dumps(parameter["schema"]), PER_FIELD):
                told = [item if isinstance(item, str) else json.dumps(item) for item in _items(value)]
                yield parameter["name"], urlencode([(parameter["name"], text) for text in told], errors="replace")


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None or isinstance(value, bytes) else [value]


def _encode(body: Any) -> bytes:
    if isinstance(body, dict):
        body = {name: _writable(value) if name in ASKING else value for name, value in body.items()}
        if isinstance(body.get("n"), int) and MAX_CHOICES < body["n"] <= GRANTED_CHOICES:
            body["n"] = MAX_CHOICES
    return json.dumps(body).encode()


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return UNWRITABLE.sub("?", value)
    if isinstance(value, dict):
        return {_writable(name): _writable(item) for name, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, list) else value


@cache
def _values(described: str, most: int) -> list[Any]:
    """Values that fit a schema (JSON text) and its likely form, and values that break it. Bytes are no JSON at all."""
    schema, most = json.loads(described), max(LEAST, min(most, MOST_CHARS // len(described)))
    wrong = _generate(schema, GenerationMode.NEGATIVE, most)
    if all(isinstance(value, bytes) for value in wrong):  # no JSON, by chance
        wrong = _generate(schema, GenerationMode.NEGATIVE, 4 * most)
    return [
        *_generate(_likely(schema), GenerationMode.POSITIVE, most),
        *_generate(schema, GenerationMode.POSITIVE, most // 2),
        *wrong,
    ]


def _generate(schema: Schema, mode: GenerationMode, most: int) -> list[Any]:
    """At most `most` bodies of an operation whose body has this schema."""
    request = {"content": {JSON_TYPE: {"schema": schema}}, "required": True}
    document = {
        "openapi": "3.1.0",
        "info": {"title": "one body", "version": "1"},
        "paths": {"/": {"post": {"requestBody": request, "responses": {"200": {"description": "any"}}}}},
    }
    strategy = schemathesis.openapi.from_dict(document)["/"]["POST"].as_strategy(generation_mode=mode)
    found: list[Any] = []

    @seed(zlib.crc32(json.dumps(schema).encode()))
    @settings(max_examples=most, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(case: Any) -> None:
        if case.media_type == JSON_TYPE:
            found.append(case.body)

    with suppress(Unsatisfiable):  # nothing breaks a schema that takes anything
        collect()
    return found


def _likely(node: Any) -> Any:
    """The schema with each number near zero, and without properties that it does not name."""
    if isinstance(node, list):
        return [_likely(item) for item in node]
    if not isinstance(node, dict):
        return node
    within = NEAR if node.get("type") in ("integer", "number") else {}
    closed = {"additionalProperties": False} if isinstance(node.get("properties"), dict) and "type" in node else {}
    return {key: _likely(value) for key, value in node.items()} | within | closed
