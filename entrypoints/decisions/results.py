"""What is answered: the object that /v1/systemone sends and `LLM.decide` returns. Plain data, nulls and all.

A superset of what clients of other servers read: every answer has a confidence and says whether it abstained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from halfbyte.entrypoints.decisions.answers import Answer
from halfbyte.entrypoints.decisions.decider import Decider
from halfbyte.entrypoints.decisions.prompts import Prompt
from halfbyte.entrypoints.decisions.reading import Read, Readout
from halfbyte.types import EngineInfo


class InputTokensDetails(msgspec.Struct):
    """cached_tokens: were in the prefix cache, many of them by the call's own first read. cache_write_tokens: came into it."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class DecisionUsage(msgspec.Struct, kw_only=True):
    """Sums over all reads: mostly one per question. What had to be computed is input_tokens - cached_tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ChoiceAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="choice"):
    """choice, probabilities: None where it abstains."""

    choice: str | None
    probabilities: dict[str, float] | None
    confidence: float
    abstained: bool


class NoulAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="noul"):
    """noul: the probability of yes."""

    noul: float | None
    probabilities: dict[str, float] | None
    confidence: float
    abstained: bool


class ScoreAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="score"):
    """score: the expected level, 0 is the lowest. legend: level number to name; probabilities by number."""

    score: float | None
    legend: dict[str, str]
    probabilities: dict[str, float] | None
    confidence: float
    abstained: bool


class Diagnostics(msgspec.Struct, kw_only=True):
    """label_mass: how much of all probability is on the labels. argmax_is_label: the model's own first choice is one.

    temperature: what log probabilities were divided by. num_orders: 1 but for order="average"; spread, then: the largest
    difference that the order made to a probability. prompts: where they were asked for, one per order.
    """

    label_mass: float
    argmax_is_label: bool
    temperature: float
    num_orders: int
    spread: float | UnsetType = UNSET
    prompts: list[Prompt] | UnsetType = UNSET


class Decision(msgspec.Struct, kw_only=True):
    """answers, diagnostics: by the question's id, in the order asked. repeatable: the same call gives these very numbers again.

    temperatures_from: the name of the file that the temperatures are from, None where all are 1.
    """

    id: str
    object: Literal["structured_decision"] = "structured_decision"
    created: int
    model: str
    answers: dict[str, ChoiceAnswer | NoulAnswer | ScoreAnswer]
    usage: DecisionUsage
    diagnostics: dict[str, Diagnostics]
    repeatable: bool
    temperatures_from: str | None


@dataclass(frozen=True, slots=True)
class Decided:
    """A call's answers, before they have the form of a route."""

    answers: list[Answer]
    usage: DecisionUsage
    repeatable: bool
    temperatures_from: str | None


def decided(
    decider: Decider, info: EngineInfo, answers: list[Answer], reads: Sequence[Read], found: Sequence[Readout]
) -> Decided:
    return Decided(answers, _usage(info, reads, found), decider.batch_invariant, decider.temperatures.source)


def _usage(info: EngineInfo, reads: Sequence[Read], found: Sequence[Readout]) -> DecisionUsage:
    lengths = list(map(len, reads))
    cached = sum(readout.num_cached_tokens for readout in found)
    cacheable = sum(length // info.block_size * info.block_size for length in lengths) if info.enable_prefix_caching else 0
    return DecisionUsage(
        input_tokens=sum(lengths),
        input_tokens_details=InputTokensDetails(cached, max(0, cacheable - cached)),
        output_tokens=len(reads),
        output_tokens_details=OutputTokensDetails(),
        total_tokens=sum(lengths) + len(reads),
    )


def as_decision(result: Decided, *, id: str, created: int, model: str, with_prompts: bool) -> Decision:
    return Decision(
        id=id,
        created=created,
        model=model,
        answers={found.question.id: _answer(found) for found in result.answers},
        usage=result.usage,
        diagnostics={found.question.id: diagnostics(found, with_prompts) for found in result.answers},
        repeatable=result.repeatable,
        temperatures_from=result.temperatures_from,
    )


def diagnostics(found: Answer, with_prompts: bool) -> Diagnostics:
    return Diagnostics(
        label_mass=found.label_mass,
        argmax_is_label=found.argmax_is_label,
        temperature=found.temperature,
        num_orders=found.num_listings,
        spread=UNSET if found.spread is None else found.spread,
        prompts=found.prompts if with_prompts else UNSET,
    )


def _answer(found: Answer) -> ChoiceAnswer | NoulAnswer | ScoreAnswer:
    question, silent = found.question, found.abstained
    names = [option.name for option in question.options]
    common: dict[str, Any] = {"confidence": found.confidence, "abstained": silent}
    if question.type == "score":
        numbers = list(map(str, range(len(names))))
        probabilities = None if silent else dict(zip(numbers, found.probabilities, strict=True))
        score = None if silent else found.expected_index
        return ScoreAnswer(score=score, legend=dict(zip(numbers, names, strict=True)), probabilities=probabilities, **common)
    probabilities = None if silent else dict(zip(names, found.probabilities, strict=True))
    if question.type == "noul":
        return NoulAnswer(noul=None if silent else found.probabilities[0], probabilities=probabilities, **common)
    return ChoiceAnswer(choice=None if silent else names[found.best], probabilities=probabilities, **common)
