"""The table of routes: path, method, request model and handler, in one place.

`answer` is what all POST routes share: open a call, read the body, run the handler while the client is there, close the call
with one log line. Nothing else registers a route.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from halfbyte.entrypoints.openai import admin, chat, completions, decisions, status, systemone, tokenize
from halfbyte.entrypoints.openai.body import parse_body
from halfbyte.entrypoints.openai.decision_protocol import DecisionsRequest, SystemOneRequest
from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from halfbyte.entrypoints.openai.streaming import CLIENT_CLOSED, ClientWatch, EventStream

RequestModel = TypeVar("RequestModel", bound=BaseModel)
Handler = Callable[[Frontend, Call, RequestModel], Awaitable[Response]]


def add_routes(app: FastAPI, frontend: Frontend) -> None:
    """The routes of every server, bound to one engine."""

    def post(path: str, prefix: str, model: type[RequestModel], handler: Handler[RequestModel]) -> None:
        async def endpoint(request: Request) -> Response:
            return await answer(frontend, request, prefix, model, handler)

        body = {"content": {"application/json": {"schema": _schema(model)}}, "required": True}
        app.add_api_route(path, endpoint, methods=["POST"], name=path, summary=path, openapi_extra={"requestBody": body})

    def say(path: str, respond: Callable[[], Response], *methods: str) -> None:
        async def endpoint() -> Response:
            return respond()

        for method in methods:
            app.add_api_route(path, endpoint, methods=[method], name=path, summary=path)

    post("/v1/chat/completions", "chatcmpl-", ChatRequest, chat.create)
    post("/v1/completions", "cmpl-", CompletionRequest, completions.create)
    post("/v1/systemone", "decision-", SystemOneRequest, systemone.create)
    post("/v1/decisions", "decision-", DecisionsRequest, decisions.create)
    post("/tokenize", "tokenize-", TokenizeRequest, tokenize.tokenize)
    post("/detokenize", "tokenize-", DetokenizeRequest, tokenize.detokenize)
    say("/v1/models", lambda: status.models(frontend), "GET")
    say("/health", lambda: status.health(frontend), "GET")
    say("/ping", lambda: status.health(frontend), "GET", "POST")
    say("/version", status.version, "GET")
    say("/metrics", lambda: status.metrics(frontend), "GET")


def add_admin_routes(app: FastAPI, frontend: Frontend) -> None:
    """The routes of operators."""

    def add(route: admin.Route) -> None:
        async def endpoint(request: Request) -> Response:
            return await admin.answer(frontend, request, route)

        extra = {"parameters": route.parameters()}
        app.add_api_route(route.path, endpoint, methods=[route.method], name=route.path, summary=route.path, openapi_extra=extra)

    for route in admin.ROUTES:
        add(route)


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    """The model's JSON schema with its definitions in place: a fragment of a larger document cannot refer to its own root."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, dict):
            name = str(node.get("$ref", "")).removeprefix("#/$defs/")
            return inline(definitions[name]) if name else {key: inline(value) for key, value in node.items()}
        return [inline(item) for item in node] if isinstance(node, list) else node

    resolved: dict[str, Any] = inline(schema)
    return resolved


async def answer(
    frontend: Frontend, request: Request, prefix: str, model: type[RequestModel], handler: Handler[RequestModel]
) -> Response:
    """Run one call to its answer, its error, or its client's departure."""
    call = frontend.open_call(request.scope, prefix)
    try:
        body = await parse_body(request, model, frontend.beside)
        async with ClientWatch(request.receive) as client:
            response = await handler(frontend, call, body)
    except ClientDisconnect:
        call.end(gone=True)
        return Response(status_code=CLIENT_CLOSED)
    except Exception as error:
        problem = call.end(error)
        assert problem is not None
        return problem.response()
    except BaseException:
        call.end(gone=True)
        raise
    if client.gone:
        call.end(gone=True)
        return Response(status_code=CLIENT_CLOSED)
    if not isinstance(response, EventStream):
        call.end()
    return response
