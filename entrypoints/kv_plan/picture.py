"""The picture of a plan: a bar per KV format. Needs matplotlib (extra `bench`). Called by `halfbyte kv-plan --plot`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from halfbyte.entrypoints.bench import plot
from halfbyte.entrypoints.kv_plan.plan import FormatPlan
from halfbyte.errors import HalfbyteError


def check_path(path: Path) -> None:
    """HalfbyteError without matplotlib, UsageError for a file that could not be written."""
    if find_spec("matplotlib") is None:
        raise HalfbyteError("--plot needs matplotlib, which the extra `bench` brings: pip install matplotlib")
    plot.check_path(path)


def draw(plans: Sequence[FormatPlan], title: str, path: Path) -> None:
    """Tokens that the memory holds, or bytes per token when no memory was given; the ending of `path` says the format."""
    from matplotlib.figure import Figure

    has_memory = any(plan.tokens_by_bytes is not None for plan in plans)
    values = [plan.capacity.num_tokens if plan.capacity else 0 if has_memory else float(plan.bytes_per_token) for plan in plans]
    figure = Figure(figsize=(8, 1.5 + 0.35 * len(plans)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh([plan.name for plan in plans], values)
    axes.bar_label(bars, labels=[f"{value:,.0f}" for value in values], padding=4, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens" if has_memory else "KV bytes per token")
    axes.set_title(title)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise HalfbyteError(f"--plot: cannot write {path}: {error}") from None
