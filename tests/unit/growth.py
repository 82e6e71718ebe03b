"""Whether work grows no faster than its size: held against itself, so that a slow or busy machine changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_S = 0.002  # of what takes less, a clock tells nothing


def is_linear(work: Callable[[int], object], size: int) -> bool:
    """Whether sixteen times the size takes about as many times as long, and not, as quadratic work does, 256 times."""
    part_s, whole_s = (min(_time_s(work, part) for _ in range(2)) for part in (size // 16, size))
    return whole_s < 64 * max(part_s, LEAST_S)


def _time_s(work: Callable[[int], object], size: int) -> float:
    """Of this thread alone: others of the process may be at work, too."""
    started_s = time.thread_time()
    work(size)
    return time.thread_time() - started_s
