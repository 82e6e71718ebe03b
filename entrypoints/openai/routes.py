"""The table of routes: path, method, request model, handler and answer, in one place.

`answer` is what all POST routes share: open a call, read the body, run the handler while the client is there, close the call
with one log line. Nothing else registers a route but `page.files`, which sends files to browsers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from typing import TypeVar, get_args

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from halfbyte.entrypoints.anthropic import messages
from halfbyte.entrypoints.anthropic.errors import MessagesError
from halfbyte.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from halfbyte.entrypoints.anthropic.wire import Message, StreamEvent, TokenCount
from halfbyte.entrypoints.decisions.results import Decision
from halfbyte.entrypoints.openai import (
    adapters,
    admin,
    chat,
    chat_batch,
    completions,
    decisions,
    embeddings,
    scores,
    status,
    systemone,
    tokenize,
)
from halfbyte.entrypoints.openai.body import parse_body
from halfbyte.entrypoints.openai.decision_protocol import DecisionsRequest, SystemOneRequest
from halfbyte.entrypoints.openai.errors import ErrorBody, ErrorForm
from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.openapi import Answers, Operation, build_document
from halfbyte.entrypoints.openai.pooling_protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from halfbyte.entrypoints.openai.protocol import (
    BatchChatRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from halfbyte.entrypoints.openai.streaming import CLIENT_CLOSED, ClientWatch, EventStream
from halfbyte.entrypoints.openai.wire import ChatChunk, ChatCompletion, Completion, CompletionChunk
from halfbyte.entrypoints.pooling.prompts import ANY, GENERATION
from halfbyte.entrypoints.responses import handlers as responses
from halfbyte.entrypoints.responses import kept
from halfbyte.entrypoints.responses import wire as responses_wire
from halfbyte.entrypoints.responses.protocol import ResponsesRequest
from halfbyte.errors import UnsupportedError

RequestModel = TypeVar("RequestModel", bound=BaseModel)
Handler = Callable[[Frontend, Call, RequestModel], Awaitable[Response]]

# What routes answer beside what all do: they name a model, ask the engine, or ask what not every model can.
NAMING, GENERATING, DECIDING = (404,), (404, 503), (404, 501, 503)


def add_routes(app: FastAPI, frontend: Frontend) -> dict[str, type[ErrorForm]]:
    """Every route of the server, bound to one engine. Those that its model cannot serve answer 501, and stand in no document.

    Returns, by path, the forms of errors that are not the standard one.
    """
    routes = RouteTable(app, frontend)
    _add_inference(routes)
    _add_responses(routes)
    _add_pooling(routes)
    _add_status(routes, frontend)
    if frontend.config.enable_admin:
        _add_adapters(routes)
        for route in admin.ROUTES:
            routes.admin(route)
    return routes.error_forms


def _add_inference(routes: RouteTable) -> None:
    post = routes.post
    chats = Answers("Answer a conversation", ChatCompletion, (ChatChunk, ErrorBody), GENERATING)
    post("/v1/chat/completions", "chatcmpl-", ChatRequest, chat.create, chats)
    batches = Answers("Answer several conversations, one choice each", ChatCompletion, errors=GENERATING)
    post("/v1/chat/completions/batch", "chatcmpl-", BatchChatRequest, chat_batch.create, batches)
    texts = Answers("Continue a text", Completion, (CompletionChunk, ErrorBody), GENERATING)
    post("/v1/completions", "cmpl-", CompletionRequest, completions.create, texts)
    turns = Answers(
        "Answer a conversation in Anthropic's shape",
        Message,
        (*get_args(StreamEvent), MessagesError),
        GENERATING,
        error=MessagesError,
    )
    post("/v1/messages", "msg_", MessagesRequest, messages.create, turns)
    count = Answers("How many tokens a conversation's prompt has", TokenCount, errors=NAMING, error=MessagesError)
    post("/v1/messages/count_tokens", "msg_", CountTokensRequest, messages.count_tokens, count)
    judgements = Answers("Answer typed questions about a state with probabilities", Decision, errors=DECIDING)
    post("/v1/systemone", "decision-", SystemOneRequest, systemone.create, judgements)
    values = Answers("Answer typed questions in OpenAI's shape", decisions.Decisions, errors=DECIDING)
    post("/v1/decisions", "decision-", DecisionsRequest, decisions.create, values)
    tokens = Answers("Token ids of a text or a conversation", tokenize.Tokens, errors=NAMING)
    post("/tokenize", "tokenize-", TokenizeRequest, tokenize.tokenize, tokens, ANY)
    text = Answers("The text of token ids", tokenize.Text, errors=NAMING)
    post("/detokenize", "tokenize-", DetokenizeRequest, tokenize.detokenize, text, ANY)


def _add_pooling(routes: RouteTable) -> None:
    post = routes.post
    vectors = Answers("Embeddings of texts", embeddings.Embeddings, errors=DECIDING)
    post("/v1/embeddings", "embd-", EmbeddingRequest, embeddings.embed, vectors, "embed")
    pooled = Answers("What the model makes of texts, as numbers", embeddings.PooledTexts, errors=DECIDING)
    post("/pooling", "pool-", PoolingRequest, embeddings.encode, pooled, "embed", "classify")
    classes = Answers("Probabilities of the labels of a classifier", embeddings.Classes, errors=DECIDING)
    post("/classify", "classify-", ClassifyRequest, embeddings.classify, classes, "classify")
    for path in ("/score", "/v1/score"):
        answers = Answers("How well texts answer others", scores.Scores, errors=DECIDING)
        post(path, "score-", ScoreRequest, scores.score, answers, "score")
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answers = Answers("Documents in the order in which they answer a query", scores.Ranking, errors=DECIDING)
        post(path, "rerank-", RerankRequest, scores.rerank, answers, "score")


def _add_responses(routes: RouteTable) -> None:
    made = Answers("Answer items with items", responses_wire.Response, responses_wire.EVENTS, GENERATING)
    routes.post(kept.PATH, "resp_", ResponsesRequest, responses.create, made)
    for route in kept.ROUTES:
        routes.kept(route)


def _add_adapters(routes: RouteTable) -> None:
    """Routes of operators that take a body."""
    load, unload = (
        Answers(summary, str, errors=DECIDING) for summary in ("Serve a LoRA adapter", "Serve a LoRA adapter no more")
    )
    routes.post("/v1/load_lora_adapter", "adapter-", adapters.LoadAdapterRequest, adapters.load, load, is_admin=True)
    routes.post("/v1/unload_lora_adapter", "adapter-", adapters.UnloadAdapterRequest, adapters.unload, unload, is_admin=True)


def _add_status(routes: RouteTable, frontend: Frontend) -> None:
    say = routes.say
    say("/v1/models", lambda: status.models(frontend), Answers("The served names", status.ModelList), "GET")
    say("/status", lambda: status.status(frontend), Answers("Model, load and KV cache", status.Status), "GET")
    health = Answers("Whether requests are taken", None, errors=(503,))
    say("/health", lambda: status.health(frontend), health, "GET")
    say("/ping", lambda: status.health(frontend), health, "GET", "POST")
    say("/version", status.version, Answers("The server's version", status.Version), "GET")
    say("/metrics", lambda: status.metrics(frontend), Answers("Counters and histograms for Prometheus", str), "GET")


class RouteTable:
    """Registers routes, each in the application and in the OpenAPI document, which is made of what they say they answer."""

    def __init__(self, app: FastAPI, frontend: Frontend) -> None:
        self._app = app
        self._frontend = frontend
        self._operations: list[Operation] = []
        keyed = bool(frontend.config.api_keys)
        app.openapi = cache(lambda: build_document(self._operations, keyed=keyed))  # type: ignore[method-assign]

    def post(
        self,
        path: str,
        prefix: str,
        model: type[RequestModel],
        handler: Handler[RequestModel],
        answers: Answers,
        *uses: str,
        is_admin: bool = False,
    ) -> None:
        """A call with a body, a public id that begins with `prefix`, and a line in the log.

        uses: what a model must be for, one of these at least; GENERATION where none is named.
        """
        if self._refused("POST", path, *(uses or (GENERATION,))):
            return

        async def endpoint(request: Request) -> Response:
            return await answer(self._frontend, request, prefix, model, handler)

        self._add(endpoint, Operation("POST", path, model, answers, is_admin))

    def say(self, path: str, respond: Callable[[], Response], answers: Answers, *methods: str) -> None:
        """What the server knows of itself."""

        async def endpoint() -> Response:
            return respond()

        for method in methods:
            self._add(endpoint, Operation(method, path, None, answers))

    def kept(self, route: kept.Route) -> None:
        """A route about what is kept of earlier calls: nothing is generated."""
        if self._refused(route.method, route.path, GENERATION):
            return

        async def endpoint(request: Request) -> Response:
            return await route.handler(self._frontend, request)

        self._add(endpoint, Operation(route.method, route.path, None, route.answers))

    def admin(self, route: admin.Route) -> None:
        """A route of operators."""

        async def endpoint(request: Request) -> Response:
            return await admin.answer(self._frontend, request, route)

        self._add(endpoint, Operation(route.method, route.path, None, route.answers, is_admin=True))

    @property
    def error_forms(self) -> dict[str, type[ErrorForm]]:
        return {operation.path: form for operation in self._operations if (form := operation.answers.error) is not ErrorBody}

    def _refused(self, method: str, path: str, *uses: str) -> bool:
        """Whether the model is for none of these uses: then the route says so."""
        refusal = self._frontend.refuse_route(*uses)
        if refusal is None:
            return False

        async def endpoint() -> Response:
            return self._frontend.explain(UnsupportedError(refusal)).response()

        self._app.add_api_route(path, endpoint, methods=[method], name=path)
        return True

    def _add(self, endpoint: Callable[..., Awaitable[Response]], operation: Operation) -> None:
        self._operations.append(operation)
        self._app.add_api_route(operation.path, endpoint, methods=[operation.method], name=operation.path)


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
        return problem.response(request.scope)
    except BaseException:
        call.end(gone=True)
        raise
    if call.detached:
        return response
    if client.gone:
        call.end(gone=True)
        return Response(status_code=CLIENT_CLOSED)
    if not isinstance(response, EventStream):
        call.end()
    return response
