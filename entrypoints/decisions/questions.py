"""Typed questions, read from what a client sent: choice, noul (yes or no) and score.

Knows the rules of the wire; knows no prompt, no token and no model. Everything that is wrong is a UserError that names the
question's id. Called by the routes and by `LLM.decide`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from halfbyte.errors import UserError

QuestionType = Literal["choice", "noul", "score"]
TYPES: tuple[QuestionType, ...] = get_args(QuestionType)

MAX_QUESTIONS = 64
MAX_OPTIONS = 255
MIN_LEVELS, MAX_LEVELS = 2, 10

_FIELDS = ("type", "instructions", "criteria")
_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class Option:
    """One possible answer, as the model is shown it. description: "" where there is none."""

    name: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """options: of a choice in the order given; of a noul yes, then no; of a score its levels, the lowest first."""

    id: str
    type: QuestionType
    instructions: str
    options: tuple[Option, ...]


def read_questions(given: Any) -> list[Question]:
    """The questions of `{id: specification}`, in their order."""
    if not isinstance(given, Mapping) or not given:
        raise UserError("questions must be an object from ids to questions, with at least one", param="questions")
    check_count(len(given))
    return [_read_question(str(name), spec) for name, spec in given.items()]


def check_count(count: int) -> None:
    if count > MAX_QUESTIONS:
        raise UserError(f"{count} questions were asked, at most {MAX_QUESTIONS} are possible; ask in several calls", "questions")


def check_options(name: str, count: int) -> None:
    if count > MAX_OPTIONS:
        raise _wrong(name, f"it has {count} options, at most {MAX_OPTIONS} are possible")


def check_levels(name: str, levels: Iterable[str]) -> None:
    """A score has 2 to 10 levels with names of their own."""
    names = list(levels)
    if not MIN_LEVELS <= len(names) <= MAX_LEVELS:
        raise _wrong(name, f"a score has {MIN_LEVELS} to {MAX_LEVELS} levels, got {len(names)}")
    if twice := _twice(names):
        raise _wrong(name, f"two levels are called {_shown(twice)}")


def _read_question(name: str, spec: Any) -> Question:
    if not name:
        raise UserError("questions: an id is empty; each question needs a name for its answer", param="questions")
    if not isinstance(spec, Mapping):
        raise _wrong(name, f"it must be an object with {', '.join(_FIELDS)}, got {type(spec).__name__}")
    if unknown := [str(field) for field in spec if field not in _FIELDS]:
        raise _wrong(name, f"it has no field {', '.join(map(_shown, unknown))}; a question has {', '.join(_FIELDS)}")
    kind = spec.get("type")
    if kind not in TYPES:
        raise _wrong(name, f"type must be one of {', '.join(TYPES)}, got {_shown(kind)}")
    read = {"choice": _options, "noul": _yes_and_no, "score": _levels}[kind]
    return Question(name, kind, _text(spec.get("instructions")), read(name, spec.get("criteria")))


def _options(name: str, criteria: Any) -> tuple[Option, ...]:
    if not isinstance(criteria, Mapping) or not criteria:
        raise _wrong(name, "criteria of a choice must be an object from options to descriptions (or null), with at least one")
    check_options(name, len(criteria))
    options = tuple(Option(str(option), _text(description)) for option, description in criteria.items())
    if twice := _twice([option.name for option in options]):
        raise _wrong(name, f"two options are called {_shown(twice)}")
    return options


def _yes_and_no(name: str, criteria: Any) -> tuple[Option, ...]:
    given = {} if criteria is None else criteria
    if not isinstance(given, Mapping) or any(key not in ("true", "false") for key in given):
        raise _wrong(name, "criteria of a noul must be null, or an object with true and false, both optional")
    return Option("yes", _text(given.get("true"))), Option("no", _text(given.get("false")))


def _levels(name: str, criteria: Any) -> tuple[Option, ...]:
    if not isinstance(criteria, list | tuple):
        raise _wrong(name, f"criteria of a score must be a list of {MIN_LEVELS} to {MAX_LEVELS} level names, the lowest first")
    levels = [_text(level) for level in criteria]
    check_levels(name, levels)
    return tuple(Option(level) for level in levels)


def _text(value: Any) -> str:
    """What a client gave where a text is meant: null is nothing, other values as Python writes them."""
    return "" if value is None else str(value)


def _twice(names: list[str]) -> str | None:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)  # type: ignore[func-returns-value]


def _shown(value: Any) -> str:
    return repr(value)[:_SHOWN_CHARS]


def _wrong(name: str, reason: str) -> UserError:
    return UserError(f"question {_shown(name)}: {reason}", param="questions")
