"""From scores to probabilities and answers: the arithmetic, in one place.

    p = softmax(log probability / temperature)       over the labels of the question, per listing
    label mass = sum of the labels' probabilities    of the whole vocabulary, at temperature 1
    confidence = p of the answer * label mass

Over several listings both are means, which do not depend on the order in which they are taken (`math.fsum`). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.entrypoints.decisions.prompts import Prompt
from halfbyte.entrypoints.decisions.questions import Question
from halfbyte.entrypoints.decisions.reading import Scores


@dataclass(frozen=True, slots=True)
class Answer:
    """One question's answer. probabilities: per option, as the question has them; they sum to 1. best: the option's index.

    abstained: label mass is below what was asked for. spread: the largest difference between two listings' probabilities of an
    option; None with one listing. prompts: one per listing. listing_logprobs: per listing and option, as the model has them,
    at temperature 1 and over the whole vocabulary.
    """

    question: Question
    probabilities: list[float]
    best: int
    label_mass: float
    argmax_is_label: bool
    temperature: float
    abstained: bool
    spread: float | None
    prompts: list[Prompt]
    listing_logprobs: list[list[float]]

    @property
    def num_listings(self) -> int:
        return len(self.listing_logprobs)

    @property
    def confidence(self) -> float:
        """0 for an answer that is none."""
        return 0.0 if self.abstained else self.probabilities[self.best] * self.label_mass

    @property
    def expected_index(self) -> float:
        """Of a score: its level, where 0 is the lowest; between levels where the model is."""
        return math.fsum(index * p for index, p in enumerate(self.probabilities))


def softmax(logprobs: Sequence[float], temperature: float) -> list[float]:
    top = max(logprobs)
    if top == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp((value - top) / temperature) for value in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def answer(
    question: Question,
    listings: Sequence[tuple[int, ...]],
    scores: Sequence[Scores],
    prompts: list[Prompt],
    *,
    temperature: float,
    min_label_mass: float,
) -> Answer:
    """scores, prompts: of each listing. Of equal probabilities that of the option listed first (in the first listing) wins."""
    by_listing = [softmax(found.logprobs, temperature) for found in scores]
    by_option = list(zip(*by_listing, strict=True))
    probabilities = [_mean(values) for values in by_option]
    label_mass = min(1.0, _mean([math.fsum(map(math.exp, found.logprobs)) for found in scores]))
    return Answer(
        question=question,
        probabilities=probabilities,
        best=max(listings[0], key=lambda option: probabilities[option]),
        label_mass=label_mass,
        argmax_is_label=all(found.argmax_is_label for found in scores),
        temperature=temperature,
        abstained=label_mass < min_label_mass,
        spread=max(max(values) - min(values) for values in by_option) if len(listings) > 1 else None,
        prompts=prompts,
        listing_logprobs=[found.logprobs for found in scores],
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
