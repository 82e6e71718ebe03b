"""POST /v1/responses: a response is made, and told whole, in a stream, or in the background.

Generation is the chat's: a request is put into its words (`asking`), its events are told as items (`writer`). What is kept, and
for whom, is the store's to say; what can be done with it later is `kept`'s.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from starlette.responses import Response as HttpResponse

from halfbyte.entrypoints.decisions.results import InputTokensDetails, OutputTokensDetails
from halfbyte.entrypoints.openai.choices import Tally
from halfbyte.entrypoints.openai.conversation import Conversation, begin, read_answer
from halfbyte.entrypoints.openai.errors import ApiError
from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.logprobs import TokenNames
from halfbyte.entrypoints.openai.streaming import Closeable, EventStream
from halfbyte.entrypoints.openai.wire import to_json
from halfbyte.entrypoints.responses.asking import chat_request, fit, own_words, refuse_foreign
from halfbyte.entrypoints.responses.items import ItemIds, read_input, to_messages
from halfbyte.entrypoints.responses.kept import stream_of
from halfbyte.entrypoints.responses.protocol import LOGPROBS, ResponsesRequest
from halfbyte.entrypoints.responses.store import Entry, ResponseStore
from halfbyte.entrypoints.responses.token_trail import TokenTrail
from halfbyte.entrypoints.responses.tools import RequestTools
from halfbyte.entrypoints.responses.wire import (
    Response,
    ResponseUsage,
    StreamEvent,
    encode,
)
from halfbyte.entrypoints.responses.writer import ResponseWriter
from halfbyte.errors import UserError


async def create(frontend: Frontend, call: Call, request: ResponsesRequest) -> HttpResponse:
    """Answer one request. Every refusal comes before the answer starts."""
    call.use_body_label(request.request_id)
    frontend.served_model(request.model)
    frontend.require_serving()
    refuse_foreign(request)
    store = frontend.responses
    keeps = _keeps(request, store)
    ids = ItemIds(response_id := f"resp_{uuid.uuid4().hex}")
    earlier = [] if request.previous_response_id is None else store.conversation(call.owner, request.previous_response_id)
    tools = RequestTools(request.tools or ())
    items = read_input(request.input, ids, lambda item_id: store.item(call.owner, item_id))
    messages = to_messages(request.instructions, [*earlier, *items])
    entry = None
    if keeps:
        entry = Entry(response_id, call.owner, request.previous_response_id, msgspec.json.encode(items), bool(request.background))
        store.check_room(entry)
    with own_words():
        conversation = await fit(
            frontend, lambda kept: chat_request(request, tools, kept), messages, truncate=request.truncation == "auto"
        )
        tally, generations = await begin(frontend, call, conversation)
    response = _response(response_id, call, request, tools, conversation)
    writer = ResponseWriter(response, ids, tools, _trail(frontend, request))
    answering = Answering(frontend, call, conversation, tally, generations, writer, entry)
    if request.background:
        return answering.in_background(streams=bool(request.stream))
    return answering.streamed() if request.stream else await answering.whole()


def _keeps(request: ResponsesRequest, store: ResponseStore) -> bool:
    """Whether the response is kept; UserError for what needs that and cannot have it."""
    if store.max_bytes == 0 and request.store:
        raise UserError("store: this server keeps no responses; start it with --responses-store BYTES", param="store")
    keeps = request.store is not False and store.max_bytes > 0
    if request.background and not keeps:
        raise UserError(
            "background needs a response that is kept: store must not be false, nor --responses-store 0", "background"
        )
    return keeps


def _trail(frontend: Frontend, request: ResponsesRequest) -> TokenTrail | None:
    """Hidden thoughts are not told token by token either, and what stands behind them could not be told from them."""
    if LOGPROBS not in (request.include or ()) or request.include_reasoning is False:
        return None
    return TokenTrail(TokenNames(frontend.engine.tokenizer))


def _response(
    response_id: str, call: Call, request: ResponsesRequest, tools: RequestTools, conversation: Conversation
) -> Response:
    text, reasoning = request.text, request.reasoning
    return Response(
        id=response_id,
        created_at=call.created,
        status="in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=conversation.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={"effort": None if reasoning is None else reasoning.effort, "summary": None},
        safety_identifier=request.safety_identifier,
        temperature=conversation.params.temperature,
        text={"format": (text and text.format) or {"type": "text"}, "verbosity": (text and text.verbosity) or "medium"},
        tool_choice=request.tool_choice if request.tool_choice is not None else "auto",
        tools=tools.given,
        top_logprobs=request.top_logprobs or 0,
        top_p=conversation.params.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
    )


class Answering:
    """One response on its way, in each of the ways in which it may be told. entry: None where it is not kept."""

    def __init__(
        self,
        frontend: Frontend,
        call: Call,
        conversation: Conversation,
        tally: Tally,
        generations: Sequence[Closeable],
        writer: ResponseWriter,
        entry: Entry | None,
    ) -> None:
        self._frontend = frontend
        self._call = call
        self._conversation = conversation
        self._tally = tally
        self._generations = generations
        self._writer = writer
        self._entry = entry
        self._last = b""

    async def _events(self) -> AsyncGenerator[list[StreamEvent], None]:
        """What each step tells. Leaving early aborts the generation."""
        async with aclosing(read_answer(self._conversation, self._tally, self._generations)) as answer:
            async for events, delta in answer:
                told = self._writer.read(events, delta)
                if delta.finish_reason is not None:
                    told += self._writer.finish(delta.finish_reason, self._usage())
                yield told

    def _usage(self) -> ResponseUsage:
        call, cached = self._call, self._tally.num_cached_tokens
        info = self._frontend.engine.info
        full = call.num_prompt_tokens // info.block_size * info.block_size if info.enable_prefix_caching else 0
        return ResponseUsage(
            input_tokens=call.num_prompt_tokens,
            input_tokens_details=InputTokensDetails(cached, max(0, full - cached)),
            output_tokens=call.num_completion_tokens,
            output_tokens_details=OutputTokensDetails(self._tally.num_reasoning_tokens or 0),
            total_tokens=call.num_prompt_tokens + call.num_completion_tokens,
        )

    def _keep(self) -> None:
        if self._entry is not None:
            self._entry.finish(self._writer.response)
            self._frontend.responses.keep(self._entry)

    async def whole(self) -> HttpResponse:
        async for _ in self._events():
            pass
        self._keep()
        return to_json(self._writer.response)

    def streamed(self) -> EventStream:
        """A failure before the first token is a status; a later one is told by events, and kept."""
        return EventStream(
            self._encoded(), self._end_stream, self._frontend.config.sse_keep_alive_interval_s, lambda _: self._last
        )

    async def _encoded(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._events()) as steps:
            async for told in steps:
                if self._writer.has_ended:  # clients leave as soon as they have read that
                    self._keep()
                if told:
                    yield b"".join(map(encode, told))

    def _end_stream(self, error: Exception | None, gone: bool) -> ApiError | None:
        problem = self._call.end(error, gone)
        if problem is not None and (told := self._writer.fail(problem, self._usage())):
            self._last = b"".join(map(encode, told))
            self._keep()
        return problem

    def in_background(self, *, streams: bool) -> HttpResponse:
        """Start it, whether the client stays or not. The call stays open until it is done."""
        entry, frontend = self._entry, self._frontend
        assert entry is not None, "checked before"
        entry.live = self._writer.response
        frontend.responses.open(entry)
        self._call.detached = True
        self._record(self._writer.queue())
        answer = stream_of(frontend, entry, 0) if streams else to_json(self._writer.response)
        entry.task = asyncio.create_task(self._run())
        return answer

    def _record(self, told: Sequence[StreamEvent]) -> None:
        assert self._entry is not None
        for event in told:
            self._entry.tell(encode(event))

    async def _run(self) -> None:
        try:
            async with aclosing(self._events()) as steps:
                async for told in steps:
                    self._record(told)
        except asyncio.CancelledError:
            self._record(self._writer.cancel(self._usage()))
            self._call.end(gone=True)
        except Exception as error:
            problem = self._call.end(error)
            assert problem is not None
            self._record(self._writer.fail(problem, self._usage()))
        else:
            self._call.end()
        self._keep()
