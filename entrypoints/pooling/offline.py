"""Vectors without a server: jobs that an engine client does, all of them in one batch. Called by `LLM`."""

from __future__ import annotations

from collections.abc import Sequence

from tqdm import tqdm

from halfbyte.engine.client import EngineClient
from halfbyte.engine.requests import RequestMaker
from halfbyte.entrypoints.pooling.prompts import PoolingJob
from halfbyte.errors import HalfbyteError
from halfbyte.types import EngineOutput


def pool_all(
    maker: RequestMaker,
    client: EngineClient,
    jobs: Sequence[PoolingJob],
    *,
    salts: Sequence[str | None] | None = None,
    use_tqdm: bool = False,
) -> list[EngineOutput]:
    """The outputs of the jobs, in their order. HalfbyteError when the engine could not compute one."""
    each = salts or [None] * len(jobs)
    requests = [maker.make_pooling(job.token_ids, job.pooling, cache_salt=s) for job, s in zip(jobs, each, strict=True)]
    found: dict[str, EngineOutput | None] = {request.request_id: None for request in requests}
    num_open = len(found)
    client.add(requests)
    try:
        with tqdm(total=len(jobs), desc="Pooling", unit="prompt", disable=not use_tqdm) as progress:
            while num_open:
                step = client.receive()
                for output in step.outputs if step is not None else ():
                    if output.request_id not in found:
                        continue
                    if output.pooled is None:
                        raise HalfbyteError(output.error or "the engine could not compute this prompt")
                    found[output.request_id] = output
                    num_open -= 1
                    progress.update()
    finally:
        if num_open:
            client.abort([request_id for request_id, output in found.items() if output is None])
    return [output for output in found.values() if output is not None]
