"""Beams over the engine: the steps of the searches of one call, made as ordinary requests, and the choices that come of them.

What is kept is `beam_search`'s to say; whether a request may ask for beams `sampling` checks. Called by both generation routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from itertools import islice
from typing import Any

from halfbyte.adapters import LoadedAdapter
from halfbyte.engine.output_processor import OutputProcessor, SequenceDelta
from halfbyte.entrypoints.beam_search import Beam, BeamSearch, check_length_penalty, step_params
from halfbyte.entrypoints.openai.choices import GrowingChoice, Tally
from halfbyte.entrypoints.openai.errors import GenerationError
from halfbyte.entrypoints.openai.frontend import Asked, Engine, Frontend
from halfbyte.entrypoints.openai.protocol import GenerationFields
from halfbyte.entrypoints.openai.streaming import merge
from halfbyte.errors import UserError
from halfbyte.types import EngineOutput, SamplingParams, TokenLogprobs


async def find_beams(
    frontend: Frontend, asked: Sequence[Asked], adapter: LoadedAdapter | None, request: GenerationFields, tally: Tally
) -> list[GrowingChoice]:
    """The n best beams of each prompt as complete choices: beam i of prompt p at p * n + i. Leaving early aborts all of them.

    All beams are admitted before the first step, or none: OverloadedError.
    """
    engine, width = frontend.engine, request.n or 1
    if any(one.grammar is not None for one in asked):
        raise UserError("use_beam_search cannot keep to a structure; leave one of them out", param="use_beam_search")
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    check_length_penalty(penalty)
    step = _step(engine, asked[0].params, width)
    searches = [
        BeamSearch(one.prompt_token_ids, width, one.params.max_tokens or 1, penalty, _ends(engine, one.params)) for one in asked
    ]
    engine.admit(width * len(asked), sum(len(one.prompt_token_ids) for one in asked))
    num_cached = [0] * len(asked)
    while running := [index for index, search in enumerate(searches) if search.is_open]:
        prompts = [prompt for index in running for prompt in searches[index].prompts]
        deltas = iter(await _ask(frontend, prompts, step, adapter, request))
        for index in running:
            found = list(islice(deltas, len(searches[index].prompts)))
            num_cached[index] = num_cached[index] or found[0].num_cached_tokens
            searches[index].advance([delta.logprobs[0] for delta in found if delta.logprobs])
    choices = []
    for index, (one, search) in enumerate(zip(asked, searches, strict=True)):
        for place, beam in enumerate(search.best()):
            delta = _told(engine, one, place, beam, num_cached[index])
            tally.count(index, delta)
            choices.append(GrowingChoice())
            choices[-1].grow(delta)
    return choices


def _step(engine: Engine, params: SamplingParams, width: int) -> SamplingParams:
    """One step of one beam; it tells the alternatives that the answer reports, where these are more than the search needs."""
    step = step_params(engine.info, width, "n")
    told, needed = params.logprobs or 0, step.logprobs or 0
    return step.clone(logprobs=-1 if told == -1 else max(told, needed))


def _ends(engine: Engine, params: SamplingParams) -> set[int]:
    return {*(params.stop_token_ids or ()), *(() if params.ignore_eos else engine.info.eos_token_ids)}


async def _ask(
    frontend: Frontend,
    prompts: Sequence[list[int]],
    step: SamplingParams,
    adapter: LoadedAdapter | None,
    request: GenerationFields,
) -> list[SequenceDelta]:
    """What follows each prompt. GenerationError if the engine gave one up."""
    asked = [Asked(prompt, step) for prompt in prompts]
    of_call: dict[str, Any] = {"priority": request.priority or 0, "cache_salt": request.cache_salt, "is_admitted": True}
    generations = await frontend.generate(asked, adapter, **of_call)
    found: dict[int, SequenceDelta] = {}
    async with aclosing(merge(generations)) as deltas:
        async for index, delta in deltas:
            if delta.finish_reason == "error" or not delta.logprobs:
                raise GenerationError(delta.error or "the engine could not finish this request")
            found[index] = delta
    return [found[index] for index in range(len(prompts))]


def _told(engine: Engine, asked: Asked, place: int, beam: Beam, num_cached_tokens: int) -> SequenceDelta:
    """A beam as if one request had written it."""
    params = asked.params
    last = beam.token_ids[-1]
    output = EngineOutput(
        request_id="beam",
        new_token_ids=beam.token_ids,
        logprobs=None if params.logprobs is None else [_cut(entry, params.logprobs) for entry in beam.logprobs],
        finish_reason="stop" if beam.has_ended else "length",
        stop_token_id=last if beam.has_ended and last not in engine.info.eos_token_ids else None,
        num_cached_tokens=num_cached_tokens,
    )
    processor = OutputProcessor(engine.tokenizer)
    processor.add(output.request_id, place, asked.prompt_token_ids, params, marks=asked.marks)
    delta, _ = processor.process(output)
    assert delta is not None, "it has a finish"
    return delta


def _cut(entry: TokenLogprobs, num_told: int) -> TokenLogprobs:
    """With as many alternatives as were asked for; -1 for all."""
    end = len(entry.top_token_ids) if num_told == -1 else num_told
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top_token_ids[:end], entry.top_logprobs[:end])
