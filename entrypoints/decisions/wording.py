"""How a question is put to a model in words: the state, the question, its options with their labels, and how to answer.

The sentences are part of what a temperature was fitted to: a change of them asks for new measurements. Knows texts only; called
by the readers.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from typing import Any

from halfbyte.entrypoints.decisions.questions import Question

NUM_LETTERS = len(string.ascii_uppercase)


def labels_of(question: Question) -> list[str]:
    """One label per option: letters, or numbers of equal length where these run out; yes and no; the number of a level.

    Those of a choice belong to places in the list, those of the others to the options themselves.
    """
    count = len(question.options)
    match question.type:
        case "noul":
            return ["yes", "no"]
        case "score":
            return [str(level) for level in range(count)]
    if count <= NUM_LETTERS:
        return list(string.ascii_uppercase[:count])
    width = len(str(count))  # none is the beginning of another
    return [f"{number:0{width}d}" for number in range(1, count + 1)]


def label_at(question: Question, labels: Sequence[str], place: int, option: int) -> str:
    """The label of an option that is listed at this place."""
    return labels[place if question.type == "choice" else option]


def state_text(state: Any, indent: int | None = None) -> str:
    """A text as it is, anything else as JSON: compact, or indented."""
    if isinstance(state, str):
        return state
    separators = (",", ":") if indent is None else None
    return json.dumps(state, ensure_ascii=False, separators=separators, indent=indent)


def question_text(question: Question, order: Sequence[int]) -> str:
    """The question with its options as `order` lists them (indices into `question.options`), and how to answer."""
    labels = labels_of(question)
    lines = [f"Question: {question.instructions}"] if question.instructions else []
    for place, index in enumerate(order):
        option, label = question.options[index], label_at(question, labels, place, index)
        words = [option.description] if question.type == "noul" else [option.name, option.description]
        what = " - ".join(word for word in words if word)
        lines.append(f"{label}: {what}" if what else label)
    return "\n".join([*lines, _closing(question, labels)])


def _closing(question: Question, labels: Sequence[str]) -> str:
    match question.type:
        case "noul":
            return "Answer with yes or no."
        case "score":
            return "Answer with the number of the level that fits."
    if len(labels) <= NUM_LETTERS:
        return "Answer with the letter of the best option."
    return f"Answer with the {len(labels[0])}-digit number of the best option."
