"""A call's questions to answers, over the engine: plan, admit, read, answer. Shared by the routes of structured decisions."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial

import msgspec

from halfbyte.adapters import LoadedAdapter
from halfbyte.entrypoints.decisions.decider import Asking
from halfbyte.entrypoints.decisions.questions import Question
from halfbyte.entrypoints.decisions.reading import Read, Readout
from halfbyte.entrypoints.decisions.results import Decided, decided
from halfbyte.entrypoints.openai.errors import GenerationError
from halfbyte.entrypoints.openai.frontend import Call, Frontend

READS_AT_ONCE = 64


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
    readouts = await _read_all(frontend, plan.reads, frontend.adapters.of(model), priority, cache_salt)
    call.num_completion_tokens = len(readouts)
    call.finish_reasons.add("read")
    return decided(decider, engine.info, plan.answers(readouts), plan.reads, readouts)


def salt_of(key: str | None) -> str | None:
    """A cache salt that stands for any text."""
    return None if key is None else hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


async def _read_all(
    frontend: Frontend, reads: Sequence[Read], adapter: LoadedAdapter | None, priority: int, cache_salt: str | None
) -> list[Readout]:
    """Some at a time, so that many questions of one call leave room for other calls."""
    turns = asyncio.Semaphore(READS_AT_ONCE)

    async def make(read: Read) -> Readout:
        async with turns, aclosing(frontend.read(read, adapter, priority=priority, cache_salt=cache_salt)) as generation:
            delta = await anext(aiter(generation))
            if delta.finish_reason == "error" or not delta.logprobs:
                raise GenerationError(delta.error or "the engine could not read this question")
            return Readout.of(delta.logprobs[0], delta.num_cached_tokens)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(make(read)) for read in reads]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
