"""The parts of an engine's start, named and timed; together they make up its whole time. Used by what builds engines."""

from __future__ import annotations

import time
from collections.abc import Callable

PhaseReport = Callable[[str, float], None]


class Phases:
    """done: (name, seconds) of each part that has ended."""

    def __init__(self, report: PhaseReport) -> None:
        self._report = report
        self._since_s = time.monotonic()
        self.done: list[tuple[str, float]] = []

    def end(self, name: str) -> None:
        now_s = time.monotonic()
        self.done.append((name, now_s - self._since_s))
        self._report(name, now_s - self._since_s)
        self._since_s = now_s
