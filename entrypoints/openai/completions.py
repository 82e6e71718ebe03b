"""POST /v1/completions: prompts in any of four forms, n choices each, whole or streamed.

`create` checks everything and starts the generations before an answer exists; then one of two writers turns deltas into the
answer. Choice i of prompt p has the index p * n + i.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.responses import Response

from halfbyte.engine.grammar.compile import lark_of
from halfbyte.engine.output_processor import SequenceDelta
from halfbyte.entrypoints.openai.beams import find_beams
from halfbyte.entrypoints.openai.choices import GrowingChoice, Tally, collect, size_with_logprobs
from halfbyte.entrypoints.openai.chunks import chunk_events
from halfbyte.entrypoints.openai.frontend import Asked, Call, Frontend
from halfbyte.entrypoints.openai.logprobs import (
    CompletionLogprobsWriter,
    TokenNames,
    join_logprobs,
    prompt_logprobs,
    prompt_pieces,
)
from halfbyte.entrypoints.openai.prompts import Prompt, encode_prompts, parse_prompts
from halfbyte.entrypoints.openai.protocol import CompletionRequest
from halfbyte.entrypoints.openai.refused import refuse_unsupported
from halfbyte.entrypoints.openai.sampling import (
    check_stream_fields,
    effective_max_tokens,
    operator_cap,
    sampling_params,
)
from halfbyte.entrypoints.openai.streaming import Closeable, EventStream
from halfbyte.entrypoints.openai.structure import asked_structure
from halfbyte.entrypoints.openai.wire import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    to_json,
)
from halfbyte.types import SamplingParams, TokenLogprobs

DEFAULT_MAX_TOKENS = 16


async def create(frontend: Frontend, call: Call, request: CompletionRequest) -> Response:
    """Answer one completion request. Every refusal comes before the answer starts."""
    call.use_body_label(request.request_id)
    model = frontend.served_model(request.model)
    frontend.require_serving()
    refuse_unsupported(request.model_extra)
    check_stream_fields(request)
    engine = frontend.engine
    prompts = await encode_prompts(
        engine,
        parse_prompts(request.prompt, request.n, engine.limits),
        request,
        special=request.add_special_tokens is not False,
        budget=request.max_tokens,
    )
    params = [_params(frontend, request, len(prompt.token_ids)) for prompt in prompts]
    asked, param = asked_structure(request)
    grammar = None
    if asked is not None:
        grammar = await engine.compile_grammar(partial(lark_of, asked, frontend.structure.options, param), param)
    tally = Tally(call, [len(prompt.token_ids) for prompt in prompts])
    writer = _Writer(frontend, call, request, model, prompts)
    if request.echo:
        await writer.prepare_echo()
    wanted = [Asked(prompt.token_ids, p, grammar) for prompt, p in zip(prompts, params, strict=True)]
    adapter = frontend.adapters.of(model)
    if request.use_beam_search:
        choices = await find_beams(frontend, wanted, adapter, request, tally)
    else:
        generations = await frontend.generate(wanted, adapter, priority=request.priority or 0, cache_salt=request.cache_salt)
        if request.stream:
            return EventStream(writer.events(generations, tally), call.end, frontend.config.sse_keep_alive_interval_s)
        choices = await collect(generations, writer.n, tally)
    if request.logprobs is not None or request.prompt_logprobs is not None:  # thousands of small objects
        return to_json(await frontend.beside.run(partial(writer.whole, choices, tally), size_with_logprobs(choices)))
    return to_json(writer.whole(choices, tally))


def _params(frontend: Frontend, request: CompletionRequest, num_prompt_tokens: int) -> SamplingParams:
    limits, defaults = frontend.engine.limits, frontend.sampling_defaults
    max_tokens = effective_max_tokens(
        limits,
        1 if _prompt_only(request) else request.max_tokens,
        num_prompt_tokens,
        param="max_tokens",
        default=DEFAULT_MAX_TOKENS,
        cap=operator_cap(frontend.config, defaults),
    )
    of_prompt = request.prompt_logprobs
    if of_prompt is None and request.echo:
        of_prompt = request.logprobs
    return sampling_params(request, limits, defaults, max_tokens=max_tokens, logprobs=request.logprobs, prompt_logprobs=of_prompt)


def _prompt_only(request: CompletionRequest) -> bool:
    """echo with max_tokens=0 asks for the prompt and its logprobs; the engine makes one token that is not shown."""
    return bool(request.echo) and request.max_tokens == 0


@dataclass(slots=True)
class _Echo:
    """A prompt as it is echoed: `pieces` join to `text`."""

    text: str
    pieces: list[str]


class _Writer:
    """Turns deltas into the answer to one request."""

    def __init__(self, frontend: Frontend, call: Call, request: CompletionRequest, model: str, prompts: Sequence[Prompt]) -> None:
        self.n = request.n or 1
        self._frontend = frontend
        self._call = call
        self._request = request
        self._model = model
        self._prompts = prompts
        self._echoes: list[_Echo | None] = [None] * len(prompts)
        self._seen: set[int] = set()
        self._tokenizer = frontend.engine.tokenizer
        names = TokenNames(self._tokenizer, bool(request.return_tokens_as_token_ids))
        self._logprobs = [CompletionLogprobsWriter(names) for _ in range(len(prompts) * self.n)]

    async def prepare_echo(self) -> None:
        num_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        self._echoes = await self._frontend.beside.run(lambda: [self._echo(prompt) for prompt in self._prompts], 4 * num_tokens)

    def _echo(self, prompt: Prompt) -> _Echo:
        whole = self._request.truncate_prompt_tokens is None
        if prompt.text is not None and whole and self._request.logprobs is None:
            return _Echo(prompt.text, [])
        pieces = prompt_pieces(self._tokenizer, prompt.token_ids, prompt.text if whole else None)
        return _Echo("".join(pieces), pieces)

    def whole(self, choices: Sequence[GrowingChoice], tally: Tally) -> Completion:
        return Completion(
            id=self._call.public_id,
            created=self._call.created,
            model=self._model,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            system_fingerprint=self._frontend.fingerprint,
            usage=tally.usage(),
        )

    def _choice(self, index: int, choice: GrowingChoice) -> CompletionChoice:
        request, prompt, echo = self._request, self._prompts[index // self.n], self._echoes[index // self.n]
        shown = 0 if _prompt_only(request) else len(choice.token_ids)
        text = "" if _prompt_only(request) else choice.text
        logprobs = self._echo_logprobs(index, choice.prompt_logprobs)
        if request.logprobs is not None:
            writer = self._logprobs[index]
            own = writer.write(choice.token_ids[:shown], choice.token_texts[:shown], choice.logprobs[:shown])
            logprobs = own if logprobs is None else join_logprobs(logprobs, own)
        asked_of_prompt = request.prompt_logprobs is not None
        return CompletionChoice(
            index=index,
            text=(echo.text if echo else "") + text,
            logprobs=logprobs,
            finish_reason="length" if _prompt_only(request) else choice.finish_reason,
            stop_reason=None if _prompt_only(request) else choice.stop_reason,
            token_ids=choice.token_ids[:shown] if request.return_token_ids else None,
            prompt_token_ids=prompt.token_ids if request.return_token_ids else None,
            prompt_logprobs=prompt_logprobs(self._tokenizer, choice.prompt_logprobs or ()) if asked_of_prompt else None,
        )

    def _echo_logprobs(self, index: int, entries: Sequence[TokenLogprobs] | None) -> CompletionLogprobs | None:
        echo = self._echoes[index // self.n]
        if echo is None or self._request.logprobs is None:
            return None
        return self._logprobs[index].write(self._prompts[index // self.n].token_ids, echo.pieces, [None, *(entries or ())])

    def events(self, generations: Sequence[Closeable], tally: Tally) -> AsyncGenerator[bytes, None]:
        """The stream's events before [DONE]: per choice an echo if asked, its text, and an empty chunk that ends it."""
        return chunk_events(self._frontend, self._request, generations, tally, self._news, self._chunk)

    def _news(self, prompt_index: int, delta: SequenceDelta) -> list[CompletionChunk]:
        index = prompt_index * self.n + delta.index
        first = self._first(index, delta) if index not in self._seen else []
        self._seen.add(index)
        return [self._chunk(choice) for choice in first + self._next(index, delta)]

    def _first(self, index: int, delta: SequenceDelta) -> list[CompletionChunkChoice]:
        """What precedes a choice's own text: the echoed prompt, the prompt's token ids."""
        request, echo = self._request, self._echoes[index // self.n]
        if echo is None and not request.return_token_ids:
            return []
        choice = CompletionChunkChoice(index=index, text=echo.text if echo else "")
        choice.logprobs = self._echo_logprobs(index, delta.prompt_logprobs)
        if request.return_token_ids:
            choice.prompt_token_ids = self._prompts[index // self.n].token_ids
        return [choice]

    def _next(self, index: int, delta: SequenceDelta) -> list[CompletionChunkChoice]:
        request = self._request
        chunks = []
        shown = not _prompt_only(request)
        if shown and (delta.text or (delta.token_ids and (request.logprobs is not None or request.return_token_ids))):
            choice = CompletionChunkChoice(index=index, text=delta.text)
            if delta.logprobs is not None:
                choice.logprobs = self._logprobs[index].write(delta.token_ids, delta.token_texts, delta.logprobs)
            if request.return_token_ids:
                choice.token_ids = delta.token_ids
            chunks.append(choice)
        if delta.finish_reason is not None:
            last = CompletionChunkChoice(index=index, text="")
            last.finish_reason = delta.finish_reason if shown else "length"
            last.stop_reason = delta.stop_reason if shown else None
            chunks.append(last)
        return chunks

    def _chunk(self, *choices: CompletionChunkChoice) -> CompletionChunk:
        return CompletionChunk(id=self._call.public_id, created=self._call.created, model=self._model, choices=list(choices))
