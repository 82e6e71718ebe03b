"""Questions about a state to reads of the engine, and the reads to answers.

`Decider` belongs to one served model and knows at once which types of questions that can answer. It does no input or output: the
routes and `LLM.decide` make the reads of a `Plan` and give it what was found. Planning renders and tokenises: call it beside the
event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import msgspec

from halfbyte.engine.limits import Limits
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints.chat_template import ChatTemplate
from halfbyte.entrypoints.decisions.answers import Answer, answer
from halfbyte.entrypoints.decisions.labels import LabelTrees
from halfbyte.entrypoints.decisions.orders import Order, listings
from halfbyte.entrypoints.decisions.prompts import PromptMaker
from halfbyte.entrypoints.decisions.questions import MAX_LEVELS, MAX_OPTIONS, TYPES, Option, Question, QuestionType
from halfbyte.entrypoints.decisions.readers import make_reader
from halfbyte.entrypoints.decisions.reading import Asked, Read, Reader, Reading, Readout
from halfbyte.entrypoints.decisions.settings import DecisionSettings
from halfbyte.entrypoints.decisions.temperatures import Temperatures
from halfbyte.entrypoints.decisions.wording import NUM_LETTERS
from halfbyte.entrypoints.reasoning_parsers.protocol import ReasoningSyntax
from halfbyte.errors import Refusal, UnsupportedError, UserError

MAX_CHARS = 64 << 20  # of all prompts of a call
_OPTION_COUNTS = (NUM_LETTERS, 99, MAX_OPTIONS)  # the longest list with labels of each kind


@dataclass(frozen=True, slots=True)
class Support:
    """max_options: of a question of this type; 0 where there is a refusal."""

    max_options: int
    refusal: Refusal | None = None


class TypeSupport(msgspec.Struct):
    """Support, as it is told to clients."""

    max_options: int
    reason: str | None


class DecisionSupport(msgspec.Struct, kw_only=True):
    """What a model can answer: a field for each type of question."""

    reader: str
    repeatable: bool
    choice: TypeSupport
    noul: TypeSupport
    score: TypeSupport


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What all questions of a call share. instructions: a system message."""

    state: Any
    instructions: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    order: Order = "given"
    min_label_mass: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_label_mass <= 1.0:
            raise UserError(f"min_label_mass must be in [0, 1], got {self.min_label_mass}", param="min_label_mass")


@dataclass(frozen=True, slots=True)
class _Part:
    """One question of a plan, with a reading per listing, and the reads of each."""

    question: Question
    listings: list[tuple[int, ...]]
    readings: list[Reading]
    reads: list[Sequence[Read]]


@dataclass(frozen=True, slots=True)
class Plan:
    """reads: of all questions, in their order: the first computes what the others share."""

    reads: list[Read]
    _parts: list[_Part]
    _asking: Asking
    _temperatures: Temperatures

    def answers(self, readouts: Sequence[Readout]) -> list[Answer]:
        """readouts: of the reads, in their order."""
        left = iter(readouts)
        found = []
        for part in self._parts:
            pairs = zip(part.readings, part.reads, strict=True)
            scores = [reading.scores(list(islice(left, len(reads)))) for reading, reads in pairs]
            found.append(
                answer(
                    part.question,
                    part.listings,
                    scores,
                    [reading.prompt for reading in part.readings],
                    temperature=self._temperatures.of(part.question.type),
                    min_label_mass=self._asking.min_label_mass,
                )
            )
        return found


class ModelFacts(Protocol):
    """What of an `EngineInfo` matters here."""

    @property
    def architecture(self) -> str: ...

    @property
    def logprobs_mode(self) -> str: ...

    @property
    def batch_invariant(self) -> bool: ...


class Decider:
    """support: what the model can answer, by type of question. batch_invariant: whether its probabilities can be repeated.

    template: gives the chat template, or raises why there is none. template_kwargs: the operator's variables for it.
    reasoning: the operator's reasoning parser. refusal: why there are no decisions at all, whatever the questions.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Callable[[], ChatTemplate],
        limits: Limits,
        facts: ModelFacts,
        settings: DecisionSettings,
        temperatures: Temperatures,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning: ReasoningSyntax | None = None,
        refusal: Refusal | None = None,
    ) -> None:
        self.reader_name = settings.reader_for(facts.architecture)
        self.temperatures = temperatures
        self.batch_invariant = facts.batch_invariant
        self._max_model_len = limits.max_model_len
        labels = LabelTrees(tokenizer, limits.vocab_size)

        def reader(limits: Limits | None) -> Reader:
            prompts = PromptMaker(template, tokenizer, limits, template_kwargs=template_kwargs, reasoning=reasoning)
            return make_reader(self.reader_name, prompts, labels)

        self._reader, probe = reader(limits), reader(None)
        self.support = {kind: Support(0, refusal) if refusal else _look(kind, probe, facts.logprobs_mode) for kind in TYPES}

    def describe(self) -> DecisionSupport:
        told = {
            kind: TypeSupport(support.max_options, None if support.refusal is None else str(support.refusal))
            for kind, support in self.support.items()
        }
        return DecisionSupport(reader=self.reader_name, repeatable=self.batch_invariant, **told)

    def require_some(self) -> None:
        """UnsupportedError when no type of question can be answered."""
        refusals = dict.fromkeys(support.refusal for support in self.support.values() if support.refusal is not None)
        if not any(support.max_options for support in self.support.values()):
            raise UnsupportedError(Refusal("this model cannot answer structured decisions", ""), *refusals)

    def plan(self, questions: Sequence[Question], asking: Asking) -> Plan:
        """UnsupportedError for a type that the model cannot answer, UserError for what is wrong with a question."""
        parts: list[_Part] = []
        num_chars = 0
        for question in questions:
            parts.append(self._part(question, asking))
            num_chars += sum(len(reading.prompt.text) for reading in parts[-1].readings)
            if num_chars > MAX_CHARS:
                raise UserError(
                    f"the questions' prompts have more than {MAX_CHARS:,} characters together; ask in several calls",
                    param="questions",
                )
        reads = [read for part in parts for of_listing in part.reads for read in of_listing]
        return Plan(reads, parts, asking, self.temperatures)

    def _part(self, question: Question, asking: Asking) -> _Part:
        support = self.support[question.type]
        if support.refusal is not None:
            raise UnsupportedError(support.refusal)
        if len(question.options) > support.max_options:
            raise UserError(
                f"question {question.id!r}: {len(question.options)} options, this model can tell {support.max_options} apart",
                param="questions",
            )
        orders = listings(question, asking.order)
        shared = (asking.instructions, asking.template_kwargs)
        try:
            readings = [self._reader.read(Asked(asking.state, question, order, *shared)) for order in orders]
        except UserError as error:
            raise UserError(f"question {question.id!r}: {error}", param=error.param or "questions") from None
        part = _Part(question, orders, readings, [reading.reads() for reading in readings])
        if (longest := max(len(read) for reads in part.reads for read in reads)) > self._max_model_len:
            raise UserError(
                f"question {question.id!r}: its prompt has {longest} tokens, but max_model_len={self._max_model_len};"
                " shorten the state or the question",
                param="input_tokens",
            )
        return part


def _look(kind: QuestionType, reader: Reader, logprobs_mode: str) -> Support:
    """Try the labels behind a conversation of one letter, as they will be behind real ones."""
    if not logprobs_mode.endswith("logprobs"):
        reason = f"decisions read log probabilities, and --logprobs-mode is {logprobs_mode}"
        return Support(0, Refusal(reason, "use raw_logprobs"))
    counts = {"choice": _OPTION_COUNTS, "noul": (2,), "score": (MAX_LEVELS,)}[kind]
    found = 0
    for count in counts:
        options = tuple(Option(str(index)) for index in range(count))
        try:
            reader.read(Asked("x", Question("probe", kind, "", options), tuple(range(count))))
        except UserError as error:
            refusal = Refusal(f"{kind} questions cannot be read with this model: {error}", "")
            return Support(found, None if found else refusal)
        found = count
    return Support(found)
