"""The seam of decision models: how a question becomes reads of the engine, and what was read becomes scores.

A model with a head or a template of its own is one file in `readers/`. Knows no HTTP and no engine; the decider asks a reader
for readings, has their reads made, and takes the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from halfbyte.entrypoints.decisions.prompts import Prompt
from halfbyte.entrypoints.decisions.questions import Question
from halfbyte.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Read:
    """What is asked of the engine: the log probabilities of `token_ids` behind a prompt and some tokens more.

    prompt: shared with other reads, so that many of them cost little.
    """

    prompt: list[int]
    behind: tuple[int, ...]
    token_ids: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.behind)

    @property
    def prompt_token_ids(self) -> list[int]:
        return [*self.prompt, *self.behind]


@dataclass(frozen=True, slots=True)
class Readout:
    """What a read found. best_token_id: the most likely token of the whole vocabulary. logprobs: by token id, over all of it."""

    best_token_id: int
    logprobs: dict[int, float]
    num_cached_tokens: int

    @classmethod
    def of(cls, found: TokenLogprobs, num_cached_tokens: int) -> Readout:
        listed = dict(zip(found.top_token_ids, found.top_logprobs, strict=True))
        return cls(found.token_id, listed, num_cached_tokens)


@dataclass(frozen=True, slots=True)
class Asked:
    """One question about a state, its options listed in `order` (indices into them). instructions: the operator's, for all."""

    state: Any
    question: Question
    order: tuple[int, ...]
    instructions: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scores:
    """logprobs: per option, as the question has them. argmax_is_label: the model's first choice would have been one of them."""

    logprobs: list[float]
    argmax_is_label: bool


class Reading(Protocol):
    """A question on its way through the engine."""

    @property
    def prompt(self) -> Prompt: ...

    def reads(self) -> Sequence[Read]: ...

    def scores(self, readouts: Sequence[Readout]) -> Scores:
        """readouts: of the reads, in their order."""
        ...


class Reader(Protocol):
    """Made once per model."""

    def read(self, asked: Asked) -> Reading:
        """UserError when this question cannot be asked here."""
        ...
