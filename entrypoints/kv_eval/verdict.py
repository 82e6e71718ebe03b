"""What the numbers of a format are worth: what passes, why something does not, and which format to take.

Knows results and thresholds only. Called by the command and by whoever chooses a format by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.entrypoints.kv_eval.results import FormatResult, Report
from halfbyte.entrypoints.kv_eval.settings import Thresholds
from halfbyte.errors import HalfbyteError


def failures(result: FormatResult, baseline: FormatResult, thresholds: Thresholds) -> list[str]:
    """Every threshold that a format misses, in words; none when it passes. What was not measured is not judged."""
    return list(_failures(result, baseline, thresholds))


def verdict(result: FormatResult, report: Report) -> str:
    """One line about a format."""
    if result.refusal is not None:
        return f"{result.name}: not possible here: {result.refusal}"
    missed = failures(result, report.baseline, report.settings.thresholds)
    return f"{result.name}: fails: {', '.join(missed)}" if missed else f"{result.name}: passes"


def pick(report: Report) -> FormatResult:
    """The passing format with the fewest bits per element, of equals the one with the least KL.

    HalfbyteError with every verdict when none passes.
    """
    thresholds = report.settings.thresholds
    passing = [r for r in report.formats if r.refusal is None and not failures(r, report.baseline, thresholds)]
    if not passing:
        raise HalfbyteError("no KV format passes: " + "; ".join(verdict(result, report) for result in report.formats))
    return min(passing, key=lambda result: (result.bits_per_element, result.text.kl if result.text else 0.0))


def _failures(result: FormatResult, baseline: FormatResult, thresholds: Thresholds) -> Iterator[str]:
    # written as `not <=`, so that what is no number fails
    if result.text is not None:
        for what, value, limit in (
            ("KL", result.text.kl, thresholds.max_kl),
            ("p99 KL", result.text.kl_p99, thresholds.max_p99_kl),
        ):
            if not value <= limit:
                yield f"{what} {value:.4g} is more than {limit:g}"
    limits = {
        "retrieval": thresholds.max_retrieval_loss,
        "format": thresholds.max_format_loss,
        "gsm8k": thresholds.max_gsm8k_loss,
    }
    for test, share in result.shares.items():
        loss = baseline.shares[test].rate - share.rate
        if not loss <= limits[test]:
            yield f"{test} loses {loss:.3f}, more than {limits[test]:g}"
