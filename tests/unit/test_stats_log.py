"""A line per interval of work, none when idle, and rates over the time that really passed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from halfbyte.engine.stats_log import INTERVAL_S, StatsLog
from halfbyte.types import EngineOutput, SchedulerStats, StepOutput


class Loop:
    """A clock and a timer that move by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        self.due.append((self.now_s + seconds, function))

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        ready, self.due = [d for d in self.due if d[0] <= self.now_s], [d for d in self.due if d[0] > self.now_s]
        for _, function in ready:
            function()


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The log's messages, whatever another test did to the package's logger."""
    taken: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: taken.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("halfbyte.engine.stats_log")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield taken
    logger.removeHandler(handler)
    logger.setLevel(before)


def step(num_tokens: int, **stats: int) -> StepOutput:
    return StepOutput([EngineOutput("a", [1] * num_tokens)], SchedulerStats(num_running=2, kv_cache_usage=0.5, **stats))


def test_rates_over_the_interval(lines: list[str]) -> None:
    loop = Loop()
    stats = StatsLog(loop.call_later, lambda: loop.now_s)
    for _ in range(3):
        stats.record(step(10, num_scheduled_tokens=40, prefix_cache_queries_tokens=100, prefix_cache_hits_tokens=25))
    loop.advance(INTERVAL_S)
    assert len(lines) == 1
    assert "3.0 tokens/s generated, 12.0 tokens/s computed; 2 running, 0 waiting, 50.0% of KV" in lines[0]
    assert "25% of prompt tokens cached" in lines[0] and "preemptions" not in lines[0]


def test_silence_when_idle_and_a_fresh_start_after(lines: list[str]) -> None:
    loop = Loop()
    stats = StatsLog(loop.call_later, lambda: loop.now_s)
    stats.record(step(5))
    loop.advance(INTERVAL_S)
    loop.advance(1000)
    assert len(lines) == 1
    stats.record(step(20, num_preemptions=2))
    loop.advance(INTERVAL_S)
    assert "2.0 tokens/s generated" in lines[1] and "2 preemptions" in lines[1]
