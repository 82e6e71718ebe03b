"""What a call reads of the engine: many small requests, each with one delta. And structured decisions, which are made of such.

`read_each` is shared with the routes of models that pool, `decide` by the routes of decisions: plan, admit, read, answer.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import msgspec

from halfbyte.engine.output_processor import SequenceDelta
from halfbyte.entrypoints.decisions.decider import Asking
from halfbyte.entrypoints.decisions.questions import Question
from halfbyte.entrypoints.decisions.reading import Readout
from halfbyte.entrypoints.decisions.results import Decided, decided
from halfbyte.entrypoints.openai.errors import GenerationError
from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.streaming import Closeable

READS_AT_ONCE = 64

Item = TypeVar("Item")


async def decide(
    frontend: Frontend,
    call: Call,
    questions: Sequence[Question],
    asking: Asking,
    model: str,
    *,
    priority: int = 0,
    cache_salt: str | None = None,
) -> Decided:
    """Answer all questions, or raise the first error; then nothing of the call goes on. Errors of the plan come first.

    model: a served name.
    """
    decider, engine = frontend.decider, frontend.engine
    size = len(questions) * (1000 + len(msgspec.json.encode(asking.state)))
    plan = await frontend.beside.run(partial(decider.plan, questions, asking), size)
    call.num_prompt_tokens = sum(map(len, plan.reads))
    engine.admit(min(READS_AT_ONCE, len(plan.reads)), max(map(len, plan.reads)))
    start = partial(frontend.read, adapter=frontend.adapters.of(model), priority=priority, cache_salt=cache_salt)
    readouts = [_readout(delta) for delta in await read_each(start, plan.reads)]
    call.num_completion_tokens = len(readouts)
    call.finish_reasons.add("read")
    return decided(decider, engine.info, plan.answers(readouts), plan.reads, readouts)


def salt_of(key: str | None) -> str | None:
    """A cache salt that stands for any text."""
    return None if key is None else hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


async def read_each(start: Callable[[Item], Closeable], items: Sequence[Item]) -> list[SequenceDelta]:
    """The one delta of what is started for each item, in their order. The first error ends all.

    Some at a time, so that one call with many of them leaves room for other calls.
    """
    turns = asyncio.Semaphore(READS_AT_ONCE)

    async def read(item: Item) -> SequenceDelta:
        async with turns, aclosing(start(item)) as generation:
            delta = await anext(aiter(generation))
            if delta.finish_reason == "error":
                raise GenerationError(delta.error or "the engine could not finish this request")
            return delta

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(read(item)) for item in items]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _readout(delta: SequenceDelta) -> Readout:
    if not delta.logprobs:
        raise GenerationError("the engine could not read this question")
    return Readout.of(delta.logprobs[0], delta.num_cached_tokens)
