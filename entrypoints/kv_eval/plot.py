"""The picture of an evaluation: what formats cost in KL against what they take in bits, the KL on a logarithmic axis.

Knows a report. Needs matplotlib (extra `bench`), which is imported when a picture is drawn. Called by the command.
"""

from __future__ import annotations

from pathlib import Path

from halfbyte.entrypoints.kv_eval.results import Report
from halfbyte.errors import HalfbyteError

# Where a logarithmic axis puts a format that costs less, such as the baseline itself
_LEAST_KL = 1e-7


def draw(report: Report, path: Path) -> None:
    """Write the picture; the ending of `path` says its format. HalfbyteError when that cannot be done."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for result in report.formats:
        if result.text is None:
            continue
        kl, low, high = (max(value, _LEAST_KL) for value in (result.text.kl, result.text.kl_low, result.text.kl_high))
        at = result.bits_per_element
        axes.errorbar([at], [kl], yerr=[[max(kl - low, 0.0)], [max(high - kl, 0.0)]], fmt="o", capsize=3, color="tab:blue")
        axes.annotate(result.name, (at, kl), xytext=(5, 5), textcoords="offset points", fontsize=8)
    limit = report.settings.thresholds.max_kl
    axes.axhline(limit, linestyle="--", linewidth=1, color="tab:red", label=f"largest KL that passes: {limit:g}")
    axes.margins(x=0.12)
    axes.set_yscale("log")
    axes.set_xlabel("bits per cached element")
    axes.set_ylabel(f"KL({report.baseline.name} || format) per token (nats)")
    axes.set_title(f"KV cache formats of {Path(report.model).name}, 95% intervals")
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise HalfbyteError(f"--plot: cannot write {path}: {error}") from None
