"""Questions with their right answers, read from the lines of a file. Everything wrong is a UserError that names file and line.

    {"id"?, "state", "instructions"?, "question": {"type", "instructions", "criteria"}, "answer"}
    {"id"?, "state", "instructions"?, "questions": {id: question}, "answers": {id: answer}}

An answer is true or false (noul), an option's name (choice), a level's index or name (score). Knows no model. Called by
`halfbyte decisions calibrate` before a model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.entrypoints.decisions.questions import Question, read_questions
from halfbyte.errors import UserError

_SINGLE = ("id", "state", "instructions", "question", "answer")
_SEVERAL = ("id", "state", "instructions", "questions", "answers")
_SHOWN_CHARS = 80
_SHOWN_NAMES = 12


@dataclass(frozen=True, slots=True)
class Labelled:
    """place: of the question in the file, as errors name it. spec: the question as it was written. label: of the right option.

    instructions: the call's, a system message.
    """

    place: str
    id: str
    state: Any
    instructions: str | None
    spec: Mapping[str, Any]
    question: Question
    label: int

    @property
    def asked(self) -> str:
        """What makes two questions the same one: the instructions, or the options' texts where there are none.

        A yes or no without either asks what its state says.
        """
        question = self.question
        if question.instructions:
            return question.instructions
        texts = [
            option.description if question.type == "noul" else f"{option.name}: {option.description}"
            for option in question.options
        ]
        return "\n".join(texts) if any(texts) else self.state_text

    @property
    def state_text(self) -> str:
        return json.dumps(self.state, sort_keys=True)


def read_labelled(path: Path) -> list[Labelled]:
    """All questions of a file, in its order; empty lines are passed over."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot read this file: {error.strerror}") from None
    found: list[Labelled] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found += _read_line(line, f"line {number}")
            except UserError as error:
                raise UserError(f"{path}, line {number}: {error}") from None
    if not found:
        raise UserError(f"{path}: there are no questions in this file")
    return found


def _read_line(line: bytes, place: str) -> Iterator[Labelled]:
    try:
        item = json.loads(line.decode("utf-8-sig" if place == "line 1" else "utf-8"))
    except UnicodeDecodeError:
        raise UserError("this is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"this is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(item, dict):
        raise UserError(f"this must be an object, got {type(item).__name__}")
    has_several = "questions" in item
    _check_fields(item, _SEVERAL if has_several else _SINGLE)
    name = item.get("id")
    if name is not None and not isinstance(name, str):
        raise UserError(f"id must be a text, got {_shown(name)}")
    instructions = item.get("instructions") or None
    if instructions is not None and not isinstance(instructions, str):
        raise UserError(f"instructions must be a text, got {_shown(instructions)}")
    shared = (item["state"], instructions)
    if not has_several:
        yield _labelled(place, name or "question", shared, item["question"], item["answer"])
        return
    specs, answers = _several(item)
    for key, spec in specs.items():
        try:
            yield _labelled(f"{place}, {key}", key, shared, spec, answers[key])
        except UserError as error:
            raise UserError(f"question {_shown(key)}: {error}") from None


def _check_fields(item: Mapping[str, Any], fields: tuple[str, ...]) -> None:
    if unknown := [field for field in item if field not in fields]:
        raise UserError(f"it has a field {_shown(unknown[0])}; an item has {', '.join(fields)}")
    if missing := [field for field in fields if field not in item and field not in ("id", "instructions")]:
        raise UserError(f"it has no {missing[0]}; an item has {', '.join(fields)}")


def _several(item: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The questions and the answers of an item that has several, each with the same ids."""
    specs, answers = item["questions"], item["answers"]
    read_questions(specs)
    if not isinstance(answers, dict):
        raise UserError(f"answers must be an object from the ids of the questions to answers, got {_shown(answers)}")
    if missing := [key for key in specs if key not in answers]:
        raise UserError(f"question {_shown(missing[0])} has no answer")
    if unasked := [key for key in answers if key not in specs]:
        raise UserError(f"answers: there is no question {_shown(unasked[0])}")
    return specs, answers


def _labelled(place: str, name: str, shared: tuple[Any, str | None], spec: Any, answer: Any) -> Labelled:
    [question] = read_questions({name: spec})
    return Labelled(place, name, *shared, spec, question, _label(question, answer))


def _label(question: Question, answer: Any) -> int:
    """The index of the option that is the answer."""
    names = [option.name for option in question.options]
    if question.type == "noul":
        if not isinstance(answer, bool):
            raise UserError(f"the answer of a noul must be true or false, got {_shown(answer)}")
        return 0 if answer else 1
    if isinstance(answer, str) and answer in names:
        return names.index(answer)
    if question.type == "choice":
        raise UserError(f"the answer {_shown(answer)} is no option; it has {_list(names)}")
    if type(answer) is int and 0 <= answer < len(names):
        return answer
    raise UserError(f"the answer {_shown(answer)} is no level; it has 0 to {len(names) - 1}, which are {_list(names)}")


def _list(names: list[str]) -> str:
    shown = ", ".join(map(_shown, names[:_SHOWN_NAMES]))
    return shown if len(names) <= _SHOWN_NAMES else f"{shown} and {len(names) - _SHOWN_NAMES} more"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
