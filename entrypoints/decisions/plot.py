"""The picture of a calibration: how often answers of each confidence are right, before and after, and how many there are of them.

Knows results. Needs matplotlib (extra `bench`), which is imported when a picture is asked for. Called by
`halfbyte decisions calibrate --plot`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from halfbyte.entrypoints.bench import plot
from halfbyte.entrypoints.decisions.calibration import NUM_BINS, Calibration, Metrics
from halfbyte.errors import HalfbyteError

_COLOURS = {"before": "tab:orange", "after": "tab:blue"}


def check_path(path: Path) -> None:
    """HalfbyteError without matplotlib, UsageError for a file that could not be written."""
    if find_spec("matplotlib") is None:
        raise HalfbyteError("--plot needs matplotlib, which the extra `bench` brings: pip install matplotlib")
    plot.check_path(path)


def draw(found: Calibration, title: str, path: Path) -> None:
    """Write the picture; the ending of `path` says its format. HalfbyteError when that cannot be done."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(found.by_type), 6), layout="constrained")
    panels = figure.subplots(2, len(found.by_type), sharex=True, squeeze=False, height_ratios=(3, 1))
    for column, (kind, result) in enumerate(found.by_type.items()):
        upper, lower = panels[0][column], panels[1][column]
        fitted = "not fitted" if result.temperature is None else f"T = {result.temperature:.3g}"
        upper.set_title(f"{kind}: {result.num_items} items, {fitted}")
        upper.plot([0, 1], [0, 1], linestyle="--", linewidth=1, color="tab:gray", label="perfect")
        for place, (name, metrics) in enumerate((("before", result.before), ("after", result.after))):
            _draw_bins(upper, lower, name, metrics, place)
        upper.set(xlim=(0, 1), ylim=(-0.02, 1.02), ylabel="share that is right")
        upper.legend(loc="upper left", fontsize=8)
        lower.set(xlabel="probability of the answer", ylabel="items per bin")
        lower.margins(y=0.25)
    figure.suptitle(title)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise HalfbyteError(f"--plot: cannot write {path}: {error}") from None


def _draw_bins(upper: Any, lower: Any, name: str, metrics: Metrics, place: int) -> None:
    """place: of this bar beside the other one of the same bin."""
    filled = [one for one in metrics.bins if one.num_items]
    colour, width = _COLOURS[name], 0.42 / NUM_BINS
    label = f"{name}, ECE {metrics.ece.value:.3f}"
    upper.plot(
        [one.confidence for one in filled], [one.accuracy for one in filled], "o-", color=colour, label=label, markersize=4
    )
    starts = [(index + 0.06) / NUM_BINS + place * width for index, one in enumerate(metrics.bins) if one.num_items]
    bars = lower.bar(starts, [one.num_items for one in filled], width, align="edge", color=colour)
    lower.bar_label(bars, fontsize=5, padding=1)
