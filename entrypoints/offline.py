"""Requests of one token without a server, and what is made of batches of them. Called by decisions and beam search of `LLM`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from halfbyte.engine.client import EngineClient
from halfbyte.engine.requests import RequestMaker
from halfbyte.entrypoints.beam_search import BeamSearch
from halfbyte.errors import HalfbyteError
from halfbyte.types import EngineOutput, EngineRequest, SamplingParams


def first_outputs(client: EngineClient, requests: Sequence[EngineRequest]) -> list[EngineOutput]:
    """The only output of each request. HalfbyteError when the engine could not compute one; none goes on then."""
    order = {request.request_id: None for request in requests}
    found: dict[str, EngineOutput] = {}
    client.add(list(requests))
    try:
        while len(found) < len(order):
            step = client.receive()
            for output in step.outputs if step is not None else ():
                if output.request_id not in order:
                    continue
                if output.error is not None or not output.logprobs:
                    raise HalfbyteError(output.error or "the engine gave no log probabilities")
                found[output.request_id] = output
    finally:
        if open_ids := [request_id for request_id in order if request_id not in found]:
            client.abort(open_ids)
    return [found[request_id] for request_id in order]


class BeamJob(NamedTuple):
    """A prompt's search, whose cached blocks it may use, and its adapter."""

    search: BeamSearch
    cache_salt: str | None
    adapter_id: int


def find_beams(
    maker: RequestMaker,
    client: EngineClient,
    jobs: Sequence[BeamJob],
    step: SamplingParams,
    num_at_once: int,
    is_found: Callable[[], object],
) -> None:
    """Drive all searches to their end, `num_at_once` at a time: one batch for a step of all that are open."""
    waiting = iter(jobs)
    open_jobs = list(islice(waiting, num_at_once))
    while open_jobs:
        requests = [
            maker.make(prompt, step, cache_salt=job.cache_salt, adapter_id=job.adapter_id)[0]
            for job in open_jobs
            for prompt in job.search.prompts
        ]
        found = iter(first_outputs(client, requests))
        for job in open_jobs:
            job.search.advance([output.logprobs[0] for output in islice(found, len(job.search.prompts)) if output.logprobs])
        still_open = [job for job in open_jobs if job.search.is_open]
        for _ in range(len(open_jobs) - len(still_open)):
            is_found()
        open_jobs = [*still_open, *islice(waiting, num_at_once - len(still_open))]
