"""What a benchmark's result holds beside its numbers, and the arithmetic that all kinds share.

`environment` says where a result comes from: date, commit, command (without its secrets), machine and versions. Knows no engine
and no dataset. Called by every kind of `halfbyte bench` and by the scripts in `benchmarks/`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from halfbyte.entrypoints.commands.collect_env import PACKAGES, report
from halfbyte.errors import HalfbyteError

ROOT = Path(__file__).resolve().parents[2]
# Flags whose values are not for a file that is shown to others.
SECRET_FLAGS = frozenset({"--admin-api-key", "--api-key", "--hf-token", "--header"})
HIDDEN = "***"
_VERSIONS = frozenset({"halfbyte", "python", "torch cuda / hip", *PACKAGES})


def environment(facts: Iterable[tuple[str, str]] | None = None) -> dict[str, Any]:
    """Date, commit, command, machine and versions. `facts` stands in for what `collect-env` reports.

    Reads the machine anew and imports torch: call it when the measuring is over.
    """
    known = dict(report() if facts is None else facts)
    if "python" in known:
        known["python"] = known["python"].partition(" (")[0]  # without the interpreter's path
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": shown_command(sys.argv),
        "machine": {name: value for name, value in known.items() if name not in _VERSIONS},
        "versions": {name: value for name, value in known.items() if name in _VERSIONS},
    }


def commit(root: Path = ROOT) -> str | None:
    """The commit of the source tree, with `-dirty` behind it when files differ from it; None outside a checkout."""
    if not (root / ".git").exists():
        return None  # an installed copy: a repository further up is somebody else's
    command = ["git", "--no-optional-locks", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def shown_command(words: Sequence[str]) -> list[str]:
    """A command line as others may see it: no folders before the program, no values of SECRET_FLAGS."""
    program = Path(words[0]).name
    shown = ["halfbyte" if program == "__main__.py" else program]
    secret = False
    for word in words[1:]:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            secret = name.replace("_", "-") in SECRET_FLAGS
            shown.append(name + equals + HIDDEN if secret and equals else word)
        else:
            shown.append(HIDDEN if secret else word)
    return shown


def save(path: str | Path, document: Mapping[str, Any], append: bool = False) -> None:
    """Write a result as JSON, or add it to a file with one result per line. HalfbyteError when that cannot be done."""
    text = json.dumps(document, indent=None if append else 2, allow_nan=False) + "\n"
    try:
        with Path(path).open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise HalfbyteError(f"cannot write {path}: {error.strerror}") from None


def summary(values: Sequence[float], percentiles: Sequence[float] = ()) -> dict[str, float]:
    """mean, median, std (of the population) and `p<percentile>` of each percentile, linear between neighbours.

    In the unit of the values. Empty for no values: there is no number to report.
    """
    if not values:
        return {}
    import numpy as np

    numbers = {"mean": np.mean(values), "median": np.median(values), "std": np.std(values)}
    numbers |= {f"p{percentile:g}": np.percentile(values, percentile) for percentile in percentiles}
    return {name: float(number) for name, number in numbers.items()}


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one thing: the one in the middle, and how far they lie apart."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(summary(values)["median"], min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} (from {self.min:.2f} to {self.max:.2f})"
