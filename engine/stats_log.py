"""One log line every ten seconds of work: what runs, what waits, and how fast. An idle engine is silent.

Fed by the dispatcher of `AsyncEngine`; `--disable-log-stats` leaves it out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from halfbyte.types import SchedulerStats, StepOutput

INTERVAL_S = 10.0

log = logging.getLogger(__name__)


class StatsLog:
    """Adds up steps; the first one after a line arms the timer of the next. call_later(seconds, function): the loop's."""

    def __init__(
        self, call_later: Callable[[float, Callable[[], None]], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._call_later = call_later
        self._clock = clock
        self._since_s: float | None = None
        self._last = SchedulerStats()
        self._clear()

    def _clear(self) -> None:
        self._computed = self._generated = self._queries = self._hits = self._preemptions = 0

    def record(self, step: StepOutput) -> None:
        if self._since_s is None:
            self._since_s = self._clock()
            self._call_later(INTERVAL_S, self._report)
        stats = self._last = step.stats
        self._computed += stats.num_scheduled_tokens
        self._generated += sum(len(output.new_token_ids) for output in step.outputs)
        self._queries += stats.prefix_cache_queries_tokens
        self._hits += stats.prefix_cache_hits_tokens
        self._preemptions += stats.num_preemptions

    def _report(self) -> None:
        assert self._since_s is not None
        seconds = max(self._clock() - self._since_s, 1e-3)
        found = f", {100 * self._hits / self._queries:.0f}% of prompt tokens cached" if self._queries else ""
        preempted = f", {self._preemptions} preemptions" if self._preemptions else ""
        log.info(
            "%.1f tokens/s generated, %.1f tokens/s computed; %d running, %d waiting, %.1f%% of KV blocks used%s%s",
            self._generated / seconds,
            self._computed / seconds,
            self._last.num_running,
            self._last.num_waiting,
            100 * self._last.kv_cache_usage,
            found,
            preempted,
        )
        self._since_s = None
        self._clear()
