"""What a GPU's memory is needed for beside the KV cache: measured before the cache is allocated, and added up in whole bytes.

The largest steps are run through the code of real ones, over a cache of a few bytes; of each kind of graph the two largest are
captured, since the others share the memory of the largest. Knows the runner; knows no requests. Called by the engine's build.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from halfbyte.errors import CapacityError
from halfbyte.model_runner.device import Accelerator
from halfbyte.model_runner.runner import ModelRunner
from halfbyte.types import SamplingParams

# What costs a step the most memory: sorted candidates, counted tokens and log probabilities.
_COSTLY = SamplingParams(seed=0, top_p=0.9, repetition_penalty=1.1, logprobs=1)


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes. outside: of others, the driver and libraries. kept: weights, rows and tables. step: what the largest one needs on
    top. graphs: an estimate for all `num_graphs`, from the largest two of each kind."""

    total: int
    outside: int
    kept: int
    step: int
    graphs: int
    num_graphs: int

    def cache_bytes(self, utilization: float) -> int:
        """What is left for the KV cache. CapacityError when nothing is."""
        left = int(self.total * utilization) - self.outside - self.kept - self.step - self.graphs
        if left <= 0:
            raise CapacityError(
                f"{self._words(utilization, left)}; raise --gpu-memory-utilization, or lower --max-num-batched-tokens "
                f"{'or --max-num-seqs, or use --enforce-eager' if self.graphs else 'or --max-num-seqs'}"
            )
        return left

    def line(self, utilization: float) -> str:
        """For the start-up log; the equation holds exactly."""
        return self._words(utilization, self.cache_bytes(utilization))

    def _words(self, utilization: float, left: int) -> str:
        return (
            f"GPU memory: {utilization:g} x {self.total:,} bytes = {int(self.total * utilization):,} bytes"
            f" - {self.outside:,} outside torch - {self.kept:,} weights and rows - {self.step:,} largest step"
            f" - {self.graphs:,} graphs ({self.num_graphs}, estimated) = {left:,} bytes of KV cache"
        )


def profile_memory(runner: ModelRunner, max_model_len: int) -> MemoryProfile:
    """For requests of up to `max_model_len` tokens. Leaves the runner without a cache."""
    device, scheduler = runner.device, runner.config.scheduler
    assert isinstance(device, Accelerator), "memory of the host is not measured"
    device.trim()
    runner.allocate_cache(2, max_model_len)
    before = device.memory()
    device.reset_peak()
    num_tokens, num_seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    longest = min(num_tokens, max_model_len)
    shortest = min(num_tokens // num_seqs, max_model_len)
    for lengths in ([longest] * min(num_tokens // longest, num_seqs), [shortest] * num_seqs):
        runner.run_dummies(lengths, _COSTLY)
    after = device.memory()
    graphs, num_graphs = _graph_bytes(runner, device)
    cache_bytes = runner.cache_bytes
    runner.release_cache()
    device.trim()
    return MemoryProfile(
        total=after.total,
        outside=after.total - after.free - after.reserved,
        kept=before.allocated - cache_bytes,
        step=after.peak - before.allocated,
        graphs=graphs,
        num_graphs=num_graphs,
    )


@torch.inference_mode()
def _graph_bytes(runner: ModelRunner, device: Accelerator) -> tuple[int, int]:
    """Memory of all graphs, and how many there are: of each kind the largest, and as often as there are others the second."""
    graphs = runner.make_graphs()
    if graphs is None:
        return 0, 0
    total, count = 0, 0
    for jobs in graphs.jobs():
        grown = [_grown(device, job) for job in jobs[:2]]
        total += grown[0] + sum(grown[1:]) * (len(jobs) - 1)
        count += len(jobs)
    return total, count


def _grown(device: Accelerator, job: Callable[[], None]) -> int:
    free = device.memory().free
    job()
    return max(0, free - device.memory().free)
