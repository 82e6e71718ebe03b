"""Flags that several kinds of `halfbyte bench` have, so that one name means one thing in all of them.

Knows their names, ranges and meanings; what is done with a value is the kind's own. Called by the kinds' flag tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from halfbyte.entrypoints.flags import Flag
from halfbyte.errors import UserError


def count_flag(name: str, meaning: str, default: int | str, least: int = 1, group: str = "general") -> Flag:
    """A whole number that is at least `least`."""

    def check(value: int) -> None:
        if value < least:
            raise UserError(f"--{name} must be at least {least}, got {value}")

    return Flag(name=name, help=f"{meaning} (default: {default})", kind="size", check=check, group=group)


def range_check(name: str, low: float, high: float, *, below: bool = False) -> Callable[[float], None]:
    """The check of a number in [low, high], or in [low, high) with `below`."""

    def check(value: float) -> None:
        if not (math.isfinite(value) and low <= value <= high) or (below and value == high):
            raise UserError(f"--{name} must be in [{low:g}, {high:g}{')' if below else ']'}, got {value:g}")

    return check


def _check_output_json(name: str) -> None:
    """Said before the measurement, not after it."""
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--output-json: {name!r} must be a file in a folder that exists")


MODEL = Flag(name="model", help="the same as --model", owner="engine", positional=True)
OUTPUT_JSON = Flag(name="output-json", help="also write the result to this file", check=_check_output_json)
