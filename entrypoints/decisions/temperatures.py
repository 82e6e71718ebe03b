"""Temperatures that make a model's probabilities honest, one per type of question, shipped in a file beside the model.

`decision_temperatures.json`: {"temperatures": {"choice": 1.7, "noul": 2.1, "score": 1.4}, ...}; types may be missing, other keys
are notes. Written by `halfbyte decisions calibrate`. Knows files; called once per start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.entrypoints.decisions.questions import TYPES, QuestionType
from halfbyte.errors import UserError
from halfbyte.model_runner.source import ModelFiles

FILE_NAME = "decision_temperatures.json"
# Beyond these a softmax is a constant or a step.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0


@dataclass(frozen=True, slots=True)
class Temperatures:
    """source: the name of the file, without its folder; None where there is none."""

    by_type: Mapping[QuestionType, float] = field(default_factory=dict)
    source: str | None = None

    def of(self, kind: QuestionType) -> float:
        return self.by_type.get(kind, 1.0)


def find_temperatures(files: ModelFiles, asked: str | None = None) -> Temperatures:
    """The operator's file; without one, the file beside the model, if there is one. asked: "none" to do without.

    Beside NAME.gguf, which may have neighbours, NAME.decision_temperatures.json comes first. UserError says what is wrong with
    a file.
    """
    if asked == "none":
        return Temperatures()
    if asked is not None:
        return read_temperatures(Path(asked).expanduser())
    path = files.path
    candidates = [path / FILE_NAME] if path.is_dir() else [path.with_suffix(f".{FILE_NAME}"), path.with_name(FILE_NAME)]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    return Temperatures() if found is None else read_temperatures(found)


def read_temperatures(path: Path) -> Temperatures:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot read these temperatures: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: this is not JSON: {error}") from None
    given = content.get("temperatures") if isinstance(content, dict) else None
    if not isinstance(given, dict) or not all(kind in TYPES and _is_temperature(value) for kind, value in given.items()):
        raise UserError(
            f'{path}: must have an object "temperatures" with numbers from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}'
            f" for some of {', '.join(TYPES)}"
        )
    return Temperatures({kind: float(given[kind]) for kind in TYPES if kind in given}, path.name)


def write_temperatures(path: Path, by_type: Mapping[QuestionType, float], notes: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({"temperatures": dict(by_type), **notes}, indent=2) + "\n", encoding="utf-8")


def _is_temperature(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return is_number and MIN_TEMPERATURE <= value <= MAX_TEMPERATURE
