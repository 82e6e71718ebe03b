"""POST /v1/decisions: the same judgements in OpenAI's shape, where questions are a list and values keep their types.

Predicates and scores are put to the model as choices between letters, too. What abstains is a refusal.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from starlette.responses import Response

from halfbyte.entrypoints.decisions.answers import Answer
from halfbyte.entrypoints.decisions.decider import Asking
from halfbyte.entrypoints.decisions.orders import check_order
from halfbyte.entrypoints.decisions.questions import Option, Question, check_count, check_levels, check_options
from halfbyte.entrypoints.decisions.results import DecisionUsage, Diagnostics, diagnostics
from halfbyte.entrypoints.openai.decision_protocol import (
    Choice,
    DecisionsRequest,
    InputMessage,
    JsonPart,
    Predicate,
    Score,
    TextPart,
)
from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.reads import decide, salt_of
from halfbyte.entrypoints.openai.wire import to_json
from halfbyte.errors import UserError

_FALSE_OR_TRUE: tuple[Option, ...] = (Option("false"), Option("true"))


class PredicateDecision(msgspec.Struct, kw_only=True, tag_field="type", tag="predicate"):
    name: str | None
    probability: float


class ValueProbability(msgspec.Struct):
    value: str | bool
    probability: float


class ChoiceDecision(msgspec.Struct, kw_only=True, tag_field="type", tag="choice"):
    name: str | None
    choice: str | bool
    probabilities: list[ValueProbability]
    confidence: float


class LevelProbability(msgspec.Struct):
    value: int
    label: str
    probability: float


class ScoreDecision(msgspec.Struct, kw_only=True, tag_field="type", tag="score"):
    name: str | None
    score: float
    probabilities: list[LevelProbability]
    confidence: float


class Refusal(msgspec.Struct, kw_only=True, tag_field="type", tag="refusal"):
    name: str | None


class Decisions(msgspec.Struct, kw_only=True):
    """diagnostics, repeatable, temperatures_from: Halfbyte's own, as /v1/systemone has them; diagnostics in question order."""

    model: str
    answers: list[PredicateDecision | ChoiceDecision | ScoreDecision | Refusal]
    usage: DecisionUsage
    diagnostics: list[Diagnostics]
    repeatable: bool
    temperatures_from: str | None


async def create(frontend: Frontend, call: Call, request: DecisionsRequest) -> Response:
    model = frontend.served_model(request.model)
    frontend.require_serving()
    frontend.decider.require_some()
    check_count(len(request.questions))
    questions = [_question(str(index), asked) for index, asked in enumerate(request.questions)]
    asking = Asking(
        state=request.input if isinstance(request.input, str) else "\n\n".join(map(_message_text, request.input)),
        order=check_order(request.order),
        min_label_mass=request.min_label_mass or 0.0,
    )
    result = await decide(frontend, call, questions, asking, model, cache_salt=salt_of(request.prompt_cache_key))
    pairs = zip(request.questions, result.answers, strict=True)
    return to_json(
        Decisions(
            model=model,
            answers=[_answer(asked, found) for asked, found in pairs],
            usage=result.usage,
            diagnostics=[diagnostics(found, bool(request.return_prompt)) for found in result.answers],
            repeatable=result.repeatable,
            temperatures_from=result.temperatures_from,
        )
    )


def _message_text(message: InputMessage) -> str:
    """What a user says stands for itself; others are named."""
    text = _parts_text(message.content)
    return text if message.role == "user" else f"{message.role}: {text}"


def _parts_text(content: str | list[TextPart | JsonPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, TextPart) else _json(part.data) for part in content)


def _question(name: str, asked: Predicate | Choice | Score) -> Question:
    match asked:
        case Predicate():
            options = _FALSE_OR_TRUE
        case Choice():
            check_options(name, len(asked.choices))
            options = tuple(Option(_json(choice.value), choice.description) for choice in asked.choices)
            if len({option.name for option in options}) < len(options):
                raise UserError(f"question {name!r}: two choices have the same value", param="questions")
        case Score():
            check_levels(name, [level.label for level in asked.levels])
            options = tuple(Option(level.label, level.description) for level in asked.levels)
    return Question(name, "choice", _parts_text(asked.instructions), options)


def _answer(asked: Predicate | Choice | Score, found: Answer) -> PredicateDecision | ChoiceDecision | ScoreDecision | Refusal:
    name, probabilities = asked.name, found.probabilities
    if found.abstained:
        return Refusal(name=name)
    match asked:
        case Predicate():
            return PredicateDecision(name=name, probability=probabilities[1])
        case Choice():
            values = [choice.value for choice in asked.choices]
            listed = [ValueProbability(value, p) for value, p in zip(values, probabilities, strict=True)]
            return ChoiceDecision(name=name, choice=values[found.best], probabilities=listed, confidence=found.confidence)
        case Score():
            levels = [
                LevelProbability(value, level.label, p)
                for value, (level, p) in enumerate(zip(asked.levels, probabilities, strict=True))
            ]
            return ScoreDecision(name=name, score=found.expected_index, probabilities=levels, confidence=found.confidence)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
