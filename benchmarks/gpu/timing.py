"""Times of things that run on a device, interleaved, and what they are compared with: a copy and a matrix product.

On a GPU each thing is captured in a graph, so that launches cost nothing, and timed by the device's own events. On a CPU (dry
runs) it is called and timed by the clock: the numbers then mean nothing. Called by the other modules here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each repetition."""

    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def spread(self) -> float:
        """(greatest - least) / median."""
        return (max(self.samples_s) - min(self.samples_s)) / self.median_s


@dataclass(frozen=True, slots=True)
class Bench:
    """Where things run. rounds: how often all of them take turns; a round runs each `inner` times."""

    device: torch.device
    rounds: int
    inner: int

    def times(self, runs: Mapping[str, Callable[[], object]]) -> dict[str, Times]:
        """Of each run, its times. They take turns, so that what disturbs one disturbs all."""
        ready = {name: self._ready(run) for name, run in runs.items()}
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.rounds):
            for name, run in ready.items():
                samples[name].append(self._timed(run) / self.inner)
        return {name: Times(tuple(found)) for name, found in samples.items()}

    def _ready(self, run: Callable[[], object]) -> Callable[[], object]:
        run()  # compiles
        if self.device.type == "cpu":
            return run
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        return graph.replay

    def _timed(self, run: Callable[[], object]) -> float:
        if self.device.type == "cpu":
            begin_s = time.perf_counter()
            for _ in range(self.inner):
                run()
            return time.perf_counter() - begin_s
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(self.inner):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def copy_bytes_per_s(bench: Bench, num_bytes: int) -> float:
    """Bytes read and written per second by a copy of so many bytes: the limit of what is bound by memory."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    found = bench.times({"copy": lambda: target.copy_(source)})
    return 2 * num_bytes / found["copy"].median_s


def product_flops_per_s(bench: Bench, size: int) -> float:
    """Of a bfloat16 product of random square matrices: the limit of what is bound by arithmetic."""
    a, b = (torch.randn(size, size, device=bench.device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty(size, size, device=bench.device, dtype=torch.bfloat16)
    found = bench.times({"product": lambda: torch.matmul(a, b, out=out)})
    return 2 * size**3 / found["product"].median_s
