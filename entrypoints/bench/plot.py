"""The plot of a sweep: output throughput against time to first token, one point per run.

Knows numbers and labels only. Needs matplotlib (extra `bench`), which is imported when a plot is drawn. Called by `bench serve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halfbyte.entrypoints.flags import UsageError
from halfbyte.errors import HalfbyteError


@dataclass(frozen=True, slots=True)
class Point:
    """One run. label: what was varied, as it stands beside the point."""

    label: str
    output_tokens_per_s: float
    median_ttft_ms: float
    p99_ttft_ms: float


def check_path(path: Path) -> None:
    """UsageError for a file that could not be written when the runs are over."""
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise UsageError(f"--plot: {path} must end in one of .{', .'.join(sorted(formats))}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot: {path} must be in a folder that exists")


def draw(points: Sequence[Point], title: str, path: Path) -> None:
    """Write the picture; the ending of `path` says its format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    throughputs = [point.output_tokens_per_s for point in points]
    for name, values in (
        ("median", [point.median_ttft_ms for point in points]),
        ("p99", [point.p99_ttft_ms for point in points]),
    ):
        axes.plot(throughputs, values, marker="o", label=name)
        for point, value in zip(points, values, strict=True):
            axes.annotate(point.label, (point.output_tokens_per_s, value), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set_xlabel("output throughput (tokens/s)")
    axes.set_ylabel("time to first token (ms)")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise HalfbyteError(f"--plot: cannot write {path}: {error}") from None
