"""POST /v1/chat/completions: a conversation through the model's template, n choices, whole or streamed.

`create` checks everything and starts the generation before an answer exists; then one of two writers turns deltas into the
answer. Order of a stream: a role chunk per choice, deltas, an empty chunk that ends each choice, usage if asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from starlette.responses import Response

from halfbyte.engine.output_processor import SequenceDelta
from halfbyte.entrypoints.openai import templates
from halfbyte.entrypoints.openai.choices import GrowingChoice, Tally, collect
from halfbyte.entrypoints.openai.chunks import chunk_events
from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from halfbyte.entrypoints.openai.prompts import Prompt, encode_prompts
from halfbyte.entrypoints.openai.protocol import ChatRequest
from halfbyte.entrypoints.openai.refused import refuse_unsupported
from halfbyte.entrypoints.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    to_json,
)
from halfbyte.entrypoints.openai.sampling import (
    check_stream_fields,
    effective_max_tokens,
    operator_cap,
    sampling_params,
)
from halfbyte.entrypoints.openai.streaming import Closeable, EventStream
from halfbyte.errors import UserError
from halfbyte.types import SamplingParams


async def create(frontend: Frontend, call: Call, request: ChatRequest) -> Response:
    """Answer one chat request. Every refusal comes before the answer starts."""
    call.use_body_label(request.request_id)
    model = frontend.served_model(request.model)
    frontend.require_serving()
    refuse_unsupported(request.model_extra)
    check_stream_fields(request)
    if request.top_logprobs and not request.logprobs:
        raise UserError("top_logprobs needs logprobs=true", param="top_logprobs")
    text = await templates.render(frontend, request, request.messages, request.reasoning_effort)
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    special = bool(request.add_special_tokens)
    prompt = (await encode_prompts(frontend.engine, [text], request, special=special, budget=asked, seams=True))[0]
    params = _params(frontend, request, asked, len(prompt.token_ids))
    tally = Tally(call, [len(prompt.token_ids)])
    writer = _Writer(frontend, call, request, model, prompt)
    generations = await frontend.generate(
        [(prompt.token_ids, params)], priority=request.priority or 0, cache_salt=request.cache_salt
    )
    if request.stream:
        return EventStream(writer.events(generations, tally), call.end, frontend.config.sse_keep_alive_interval_s)
    choices = await collect(generations, writer.n, tally)
    if request.logprobs or request.prompt_logprobs is not None:  # thousands of small objects
        return to_json(await asyncio.to_thread(writer.whole, choices, tally))
    return to_json(writer.whole(choices, tally))


def _params(frontend: Frontend, request: ChatRequest, asked: int | None, num_prompt_tokens: int) -> SamplingParams:
    limits, defaults = frontend.engine.limits, frontend.sampling_defaults
    max_tokens = effective_max_tokens(
        limits,
        asked,
        num_prompt_tokens,
        param="max_tokens" if request.max_completion_tokens is None else "max_completion_tokens",
        default=defaults.get("max_tokens"),
        cap=operator_cap(frontend.config, defaults),
    )
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return sampling_params(
        request, limits, defaults, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=request.prompt_logprobs
    )


class _Writer:
    """Turns deltas into the answer to one request."""

    def __init__(self, frontend: Frontend, call: Call, request: ChatRequest, model: str, prompt: Prompt) -> None:
        self.n = request.n or 1
        self._frontend = frontend
        self._call = call
        self._request = request
        self._model = model
        self._prompt = prompt
        self._role = frontend.config.response_role if templates.adds_generation_prompt(request) else _last_role(request)
        self._echo = _echoed_content(request, self._role) if request.echo else ""
        self._names = TokenNames(frontend.engine.tokenizer, bool(request.return_tokens_as_token_ids))
        self._started = False

    def whole(self, choices: Sequence[GrowingChoice], tally: Tally) -> ChatCompletion:
        request, tokenizer = self._request, self._frontend.engine.tokenizer
        of_prompt = choices[0].prompt_logprobs if request.prompt_logprobs is not None else None
        return ChatCompletion(
            id=self._call.public_id,
            created=self._call.created,
            model=self._model,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            system_fingerprint=self._frontend.fingerprint,
            usage=tally.usage(),
            prompt_logprobs=None if request.prompt_logprobs is None else prompt_logprobs(tokenizer, of_prompt or ()),
            prompt_token_ids=self._prompt.token_ids if request.return_token_ids else None,
            prompt_text=self._prompt.text if request.return_prompt_text else None,
        )

    def _choice(self, index: int, choice: GrowingChoice) -> ChatChoice:
        logprobs = None
        if self._request.logprobs:
            logprobs = chat_logprobs(self._names, choice.token_ids, choice.token_texts, choice.logprobs)
        return ChatChoice(
            index=index,
            message=ChatMessage(role=self._role, content=self._echo + choice.text),
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._request.return_token_ids else None,
        )

    def events(self, generations: Sequence[Closeable], tally: Tally) -> AsyncGenerator[bytes, None]:
        """The stream's events up to, not including, [DONE]."""
        return chunk_events(self._frontend, self._request, generations, tally, self._news, self._chunk)

    def _news(self, prompt_index: int, delta: SequenceDelta) -> list[ChatChunk]:
        first = [] if self._started else self._first()
        self._started = True
        return first + self._next(delta)

    def _first(self) -> list[ChatChunk]:
        """A role chunk per choice, and the echo where it was asked for."""
        chunks = [self._chunk(ChatChunkChoice(index=i, delta=ChatDelta(role=self._role, content=""))) for i in range(self.n)]
        for chunk in chunks:
            if self._request.return_token_ids:
                chunk.prompt_token_ids = self._prompt.token_ids
            if self._request.return_prompt_text and self._prompt.text is not None:
                chunk.prompt_text = self._prompt.text
        if self._echo:
            chunks += [self._chunk(ChatChunkChoice(index=i, delta=ChatDelta(content=self._echo))) for i in range(self.n)]
        return chunks

    def _next(self, delta: SequenceDelta) -> list[ChatChunk]:
        request, chunks = self._request, []
        if delta.text or (delta.token_ids and (request.logprobs or request.return_token_ids)):
            choice = ChatChunkChoice(index=delta.index, delta=ChatDelta(content=delta.text))
            if request.logprobs and delta.logprobs is not None:
                choice.logprobs = chat_logprobs(self._names, delta.token_ids, delta.token_texts, delta.logprobs)
            if request.return_token_ids:
                choice.token_ids = delta.token_ids
            chunks.append(self._chunk(choice))
        if delta.finish_reason is not None:
            last = ChatChunkChoice(index=delta.index, delta=ChatDelta(), finish_reason=delta.finish_reason)
            last.stop_reason = delta.stop_reason
            chunks.append(self._chunk(last))
        return chunks

    def _chunk(self, *choices: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(id=self._call.public_id, created=self._call.created, model=self._model, choices=list(choices))


def _last_role(request: ChatRequest) -> str:
    return str(request.messages[-1]["role"])


def _echoed_content(request: ChatRequest, role: str) -> str:
    """The last message's text, if it is the answering role's: the answer continues it."""
    content = request.messages[-1].get("content")
    if _last_role(request) != role:
        return ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""
