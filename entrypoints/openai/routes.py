"""The table of routes: path, method, request model, handler and answer, in one place.

`answer` is what all POST routes share: open a call, read the body, run the handler while the client is there, close the call
with one log line. Nothing else registers a route but `page.files`, which sends files to browsers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from typing import TypeVar

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from halfbyte.entrypoints.decisions.results import Decision
from halfbyte.entrypoints.openai import chat, completions, decisions, status, systemone, tokenize
from halfbyte.entrypoints.openai.body import parse_body
from halfbyte.entrypoints.openai.decision_protocol import DecisionsRequest, SystemOneRequest
from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.openapi import Answers, Operation, build_document
from halfbyte.entrypoints.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from halfbyte.entrypoints.openai.responses import ChatChunk, ChatCompletion, Completion, CompletionChunk
from halfbyte.entrypoints.openai.streaming import ClientWatch, EventStream

RequestModel = TypeVar("RequestModel", bound=BaseModel)
Handler = Callable[[Frontend, Call, RequestModel], Awaitable[Response]]

# What routes answer beside what all do: they name a model, ask the engine, or ask what not every model can.
NAMING, GENERATING, DECIDING = (404,), (404, 503), (404, 501, 503)
CLIENT_CLOSED = 499  # never delivered: the client has gone


def add_routes(app: FastAPI, frontend: Frontend) -> None:
    """Every route of the server, bound to one engine. Each says what it answers: the OpenAPI document is made of that."""
    operations: list[Operation] = []
    app.openapi = cache(lambda: build_document(operations, keyed=bool(frontend.config.api_keys)))  # type: ignore[method-assign]

    def post(path: str, prefix: str, model: type[RequestModel], handler: Handler[RequestModel], answers: Answers) -> None:
        async def endpoint(request: Request) -> Response:
            return await answer(frontend, request, prefix, model, handler)

        operations.append(Operation("POST", path, model, answers))
        app.add_api_route(path, endpoint, methods=["POST"], name=path)

    def say(path: str, respond: Callable[[], Response], answers: Answers, *methods: str) -> None:
        async def endpoint() -> Response:
            return respond()

        for method in methods:
            operations.append(Operation(method, path, None, answers))
            app.add_api_route(path, endpoint, methods=[method], name=path)

    chats = Answers("Answer a conversation", ChatCompletion, ChatChunk, GENERATING)
    post("/v1/chat/completions", "chatcmpl-", ChatRequest, chat.create, chats)
    texts = Answers("Continue a text", Completion, CompletionChunk, GENERATING)
    post("/v1/completions", "cmpl-", CompletionRequest, completions.create, texts)
    judgements = Answers("Answer typed questions about a state with probabilities", Decision, errors=DECIDING)
    post("/v1/systemone", "decision-", SystemOneRequest, systemone.create, judgements)
    values = Answers("Answer typed questions in OpenAI's shape", decisions.Decisions, errors=DECIDING)
    post("/v1/decisions", "decision-", DecisionsRequest, decisions.create, values)
    tokens = Answers("Token ids of a text or a conversation", tokenize.Tokens, errors=NAMING)
    post("/tokenize", "tokenize-", TokenizeRequest, tokenize.tokenize, tokens)
    text = Answers("The text of token ids", tokenize.Text, errors=NAMING)
    post("/detokenize", "tokenize-", DetokenizeRequest, tokenize.detokenize, text)
    say("/v1/models", lambda: status.models(frontend), Answers("The served names", status.ModelList), "GET")
    say("/status", lambda: status.status(frontend), Answers("Model, load and KV cache", status.Status), "GET")
    health = Answers("Whether requests are taken", None, errors=(503,))
    say("/health", lambda: status.health(frontend), health, "GET")
    say("/ping", lambda: status.health(frontend), health, "GET", "POST")
    say("/version", status.version, Answers("The server's version", status.Version), "GET")
    say("/metrics", lambda: status.metrics(frontend), Answers("Counters and histograms for Prometheus", str), "GET")


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
