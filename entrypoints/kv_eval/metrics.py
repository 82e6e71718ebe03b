"""The statistics: shares with their Wilson intervals, and what the positions of scored texts amount to.

Knows numbers only; numpy is imported when there are some. Called by `evaluate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_Z95 = 1.959964
_NUM_RESAMPLES = 1000
# Neighbouring positions err together, so that they are drawn together.
_BOOTSTRAP_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Share:
    """How many of the questions were answered right."""

    num_right: int
    num_asked: int

    @classmethod
    def of(cls, answers: Sequence[bool]) -> Share:
        return cls(sum(answers), len(answers))

    @property
    def rate(self) -> float:
        return self.num_right / self.num_asked

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of the rate (Wilson 1927)."""
        n, p, z2 = self.num_asked, self.rate, _Z95**2
        middle = (p + z2 / (2 * n)) / (1 + z2 / n)
        half = _Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True, slots=True)
class WindowScores:
    """The positions of one window of text, in order: arrays as in `halfbyte.model_runner.scoring.PositionScores`."""

    kl: np.ndarray[Any, Any]
    base_nll: np.ndarray[Any, Any]
    nll: np.ndarray[Any, Any]
    agrees: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class TextResult:
    """A format against the baseline on text. kl: mean KL(baseline || format) in nats per token, between kl_low and kl_high
    with 95% confidence; kl_p99 its 99th percentile. top1: share of positions with the same most likely token."""

    num_tokens: int
    kl: float
    kl_low: float
    kl_high: float
    kl_p99: float
    base_perplexity: float
    perplexity: float
    top1: float

    @classmethod
    def of(cls, windows: Sequence[WindowScores], seed: int) -> TextResult:
        import numpy as np

        kl = np.concatenate([window.kl for window in windows])
        low, high = bootstrap_interval((window.kl for window in windows), seed)
        return cls(
            num_tokens=len(kl),
            kl=float(kl.mean()),
            kl_low=low,
            kl_high=high,
            kl_p99=float(np.percentile(kl, 99)),
            base_perplexity=_perplexity([window.base_nll for window in windows]),
            perplexity=_perplexity([window.nll for window in windows]),
            top1=float(np.concatenate([window.agrees for window in windows]).mean()),
        )


def bootstrap_interval(series: Iterable[np.ndarray[Any, Any]], seed: int) -> tuple[float, float]:
    """The 95% interval of the mean over all series, from resampled blocks of neighbouring values."""
    import numpy as np

    blocks = [values[at : at + _BOOTSTRAP_BLOCK] for values in series for at in range(0, len(values), _BOOTSTRAP_BLOCK)]
    sums = np.array([block.sum() for block in blocks])
    counts = np.array([len(block) for block in blocks])
    drawn = np.random.default_rng(seed).integers(len(blocks), size=(_NUM_RESAMPLES, len(blocks)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def _perplexity(nlls: Sequence[np.ndarray[Any, Any]]) -> float:
    import numpy as np

    return float(np.exp(np.concatenate(nlls).mean()))
