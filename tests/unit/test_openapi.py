"""The OpenAPI document: valid, with names that stay, and exact about what answers hold.

`tests/e2e/test_schemathesis.py` holds it against answers.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import openapi_spec_validator
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from halfbyte.config import ServerConfig
from halfbyte.entrypoints.middleware import PUBLIC_PATHS
from halfbyte.entrypoints.openai import adapters, admin
from halfbyte.entrypoints.openai.frontend import Frontend
from halfbyte.entrypoints.openai.routes import add_routes


def document_of(*keys: str, enable_admin: bool = False) -> tuple[FastAPI, dict[str, Any]]:
    app, config = FastAPI(), ServerConfig(api_keys=keys, enable_admin=enable_admin)
    add_routes(app, cast(Frontend, SimpleNamespace(config=config, refuse_route=lambda *uses: None)))
    return app, app.openapi()


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(method, path, told) for path, methods in document["paths"].items() for method, told in methods.items()]


@pytest.mark.parametrize("enable_admin", [False, True])
@pytest.mark.parametrize("keys", [(), ("k",)])
def test_it_is_valid_and_has_every_route(keys: tuple[str, ...], enable_admin: bool) -> None:
    app, document = document_of(*keys, enable_admin=enable_admin)
    openapi_spec_validator.OpenAPIV31SpecValidator(document).validate()
    routes = {(method.lower(), route.path) for route in app.routes if isinstance(route, APIRoute) for method in route.methods}
    assert {(method, path) for method, path, _ in operations(document)} == routes
    assert json.loads(json.dumps(document)) == document


def test_generated_clients_get_names_that_can_be_read_and_stay() -> None:
    _, document = document_of()
    names = [told["operationId"] for _, _, told in operations(document)]
    assert len(set(names)) == len(names) and {"post_v1_chat_completions", "get_v1_models", "post_ping"} <= set(names)
    assert all(name.isidentifier() for name in document["components"]["schemas"]), "two answer types have one name"
    assert all(told["summary"] for _, _, told in operations(document))


def test_fields_of_answers_are_required_and_those_of_chunks_may_be_absent() -> None:
    schemas = document_of()[1]["components"]["schemas"]
    for whole in (
        "ChatCompletion",
        "ChatChoice",
        "Completion",
        "CompletionChoice",
        "Usage",
        "ErrorObject",
        "Tokens",
        "ModelCard",
    ):
        assert schemas[whole]["required"] == list(schemas[whole]["properties"]), whole
    assert schemas["ChatDelta"]["required"] == []
    assert schemas["CompletionChunkChoice"]["required"] == ["index", "text", "logprobs", "finish_reason"]
    assert "tool_calls" not in schemas["ChatMessage"]["required"]
    assert not any("default" in field for schema in schemas.values() for field in schema["properties"].values())


def test_streams_probes_and_texts_are_told_apart() -> None:
    paths = document_of()[1]["paths"]
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert list(paths[path]["post"]["responses"]["200"]["content"]) == ["application/json", "text/event-stream"]
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    health = paths["/health"]["get"]["responses"]
    assert "content" not in health["200"] and list(health["503"]) == ["description"]


def test_keys_are_asked_for_where_they_are_needed() -> None:
    _, without = document_of()
    assert not any("security" in told or "401" in told["responses"] for _, _, told in operations(without))
    assert "securitySchemes" not in without["components"]
    for keys, enable_admin in ((("k",), False), ((), True), (("k",), True)):
        _, document = document_of(*keys, enable_admin=enable_admin)
        either = [{name: []} for name in document["components"]["securitySchemes"]]
        assert len(either) == 2
        for _, path, told in operations(document):
            closed = path in admin.PATHS | adapters.PATHS or (bool(keys) and path not in PUBLIC_PATHS)
            assert told.get("security") == (either if closed else None), path
            assert ("401" in told["responses"]) == closed
