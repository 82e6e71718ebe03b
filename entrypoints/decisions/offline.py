"""Decisions without a server: plans whose reads an engine client makes, all of them in one batch. Called by `LLM`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from halfbyte.engine.client import EngineClient
from halfbyte.engine.requests import RequestMaker
from halfbyte.entrypoints.decisions.decider import Asking, Decider
from halfbyte.entrypoints.decisions.questions import Question
from halfbyte.entrypoints.decisions.reading import Read, Readout
from halfbyte.entrypoints.decisions.results import Decided, decided
from halfbyte.entrypoints.offline import first_outputs


def decide_all(
    decider: Decider,
    maker: RequestMaker,
    client: EngineClient,
    calls: Iterable[tuple[Sequence[Question], Asking]],
    *,
    priority: int = 0,
    cache_salt: str | None = None,
) -> list[Decided]:
    """One result per call, in their order. Errors as `Decider.plan`; HalfbyteError when the engine could not compute a read."""
    plans = [decider.plan(questions, asking) for questions, asking in calls]
    reads = [read for plan in plans for read in plan.reads]
    found = iter(_read_all(maker, client, reads, priority, cache_salt))
    results = []
    for plan in plans:
        readouts = list(islice(found, len(plan.reads)))
        results.append(decided(decider, client.info, plan.answers(readouts), plan.reads, readouts))
    return results


def _read_all(
    maker: RequestMaker, client: EngineClient, reads: Sequence[Read], priority: int, cache_salt: str | None
) -> list[Readout]:
    requests = [maker.make_read(r.prompt_token_ids, r.token_ids, priority=priority, cache_salt=cache_salt) for r in reads]
    outputs = first_outputs(client, requests)
    return [Readout.of(output.logprobs[0], output.num_cached_tokens) for output in outputs if output.logprobs]
