"""One log line every ten seconds of work: what runs, what waits, and how fast. An idle engine is silent.

Fed by the dispatcher of `AsyncEngine`; `--disable-log-stats` leaves it out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from halfbyte.engine.totals import Totals
from halfbyte.types import StepOutput

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
        self._sum = Totals()

    def record(self, step: StepOutput) -> None:
        if self._since_s is None:
            self._since_s = self._clock()
            self._call_later(INTERVAL_S, self._report)
        self._sum.add(step)

    def _report(self) -> None:
        assert self._since_s is not None
        seconds = max(self._clock() - self._since_s, 1e-3)
        total, last = self._sum, self._sum.last
        found = f", {100 * total.cache_hits / total.cache_queries:.0f}% of prompt tokens cached" if total.cache_queries else ""
        preempted = f", {total.num_preemptions} preemptions" if total.num_preemptions else ""
        log.info(
            "%.1f tokens/s generated, %.1f tokens/s computed; %d running, %d waiting, %.1f%% of KV blocks used%s%s",
            total.generated / seconds,
            total.computed / seconds,
            last.num_running,
            last.num_waiting,
            100 * last.kv_cache_usage,
            found,
            preempted,
        )
        self._since_s = None
        self._sum = Totals()
