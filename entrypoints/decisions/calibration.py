"""How far a model's probabilities are from the truth on labelled questions, and the temperatures that bring them nearer.

    p(T) = mean over listings of softmax(log probability / T)       as answers have it
    T    = the T that makes the mean of -log p(T) of the right options smallest; one per type of question

What a temperature gains is measured on questions that it was not fitted to (`cross_fitted`). The formula of each measure is in
its docstring. Pure: knows numbers and groups; numpy is imported for the intervals. Called by `halfbyte decisions calibrate`.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from halfbyte.entrypoints.decisions.answers import softmax
from halfbyte.entrypoints.decisions.questions import QuestionType
from halfbyte.entrypoints.decisions.temperatures import MAX_TEMPERATURE, MIN_TEMPERATURE

MIN_ITEMS = 20  # of a type, to fit a temperature
NUM_FOLDS = 5
NUM_BINS = 15
NUM_RESAMPLES = 1000
TEMPERATURE_DIGITS = 4
_SEED = 0
# First a coarse look (steps of a factor of 1.2), then a golden section between the neighbours of the best.
_NUM_STEPS = 33
_TOLERANCE = 1e-5
_GOLDEN = (math.sqrt(5) - 1) / 2
# In the place of log(0), for an option that the model rules out.
_LOG_NOTHING = -745.0

Grouping = Literal["question", "state"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A labelled question as it was read. listing_logprobs: per listing and option. label: the index of the right option.

    question, state: equal texts are equal questions, and equal states.
    """

    listing_logprobs: Sequence[Sequence[float]]
    label: int
    question: str
    state: str

    def predict(self, temperature: float, group: str = "") -> Prediction:
        by_listing = [softmax(logprobs, temperature) for logprobs in self.listing_logprobs]
        probabilities = [math.fsum(values) / len(by_listing) for values in zip(*by_listing, strict=True)]
        return Prediction(probabilities, self.log_likelihood(temperature), self.label, group)

    def log_likelihood(self, temperature: float) -> float:
        """log p(T) of the right option, also where p(T) is too small for a float."""
        terms = [_log_softmax(logprobs, self.label, temperature) for logprobs in self.listing_logprobs]
        top = max(terms)
        if top == -math.inf:
            return _LOG_NOTHING
        return top + math.log(math.fsum(math.exp(term - top) for term in terms) / len(terms))


@dataclass(frozen=True, slots=True)
class Prediction:
    """One item at one temperature. log_likelihood: of the right option, whose index is the label. group: see `Sample`."""

    probabilities: list[float]
    log_likelihood: float
    label: int
    group: str = ""

    @property
    def confidence(self) -> float:
        return max(self.probabilities)

    @property
    def is_right(self) -> bool:
        return self.probabilities.index(self.confidence) == self.label


@dataclass(frozen=True, slots=True)
class Bin:
    """The items whose confidence is in one fifteenth of [0, 1]. confidence, accuracy: means; 0 where there are no items."""

    num_items: int
    confidence: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value, and its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """level_error: of scores only."""

    accuracy: Estimate
    nll: float
    brier: float
    ece: Estimate
    level_error: float | None
    bins: list[Bin]


@dataclass(frozen=True, slots=True)
class TypeResult:
    """What became of the questions of one type. temperature: None where there were too few items to fit one.

    num_groups: different questions, or different states where there are fewer than NUM_FOLDS questions (grouped_by).
    item_temperatures: of each item, fitted without its group; `after` is measured with them.
    """

    num_items: int
    num_groups: int
    grouped_by: Grouping
    temperature: float | None
    item_temperatures: list[float]
    before: Metrics
    after: Metrics


@dataclass(frozen=True, slots=True)
class Calibration:
    """before, after: of all types together; a type without a temperature stays as it is."""

    by_type: dict[QuestionType, TypeResult]
    before: Metrics
    after: Metrics

    @property
    def temperatures(self) -> dict[QuestionType, float]:
        return {kind: found.temperature for kind, found in self.by_type.items() if found.temperature is not None}


def calibrate(samples_by_type: Mapping[QuestionType, Sequence[Sample]]) -> Calibration:
    """Fit and measure. Types without samples must not be there."""
    by_type: dict[QuestionType, TypeResult] = {}
    all_before: list[Prediction] = []
    all_after: list[Prediction] = []
    for kind, samples in samples_by_type.items():
        by, groups = grouping(samples)
        can_fit = len(samples) >= MIN_ITEMS
        temperatures = cross_fitted(samples, groups) if can_fit else [1.0] * len(samples)
        before = [sample.predict(1.0, group) for sample, group in zip(samples, groups, strict=True)]
        after = [sample.predict(t, group) for sample, t, group in zip(samples, temperatures, groups, strict=True)]
        by_type[kind] = TypeResult(
            num_items=len(samples),
            num_groups=len(set(groups)),
            grouped_by=by,
            temperature=round(fit_temperature(samples), TEMPERATURE_DIGITS) if can_fit else None,
            item_temperatures=temperatures,
            before=measure(before, has_levels=kind == "score"),
            after=measure(after, has_levels=kind == "score"),
        )
        all_before += before
        all_after += after
    return Calibration(by_type, measure(all_before), measure(all_after))


def fit_temperature(samples: Sequence[Sample]) -> float:
    """The T in [0.05, 20] with the smallest mean of -log p(T) of the right options; 1 where none is better than that.

    With one listing per question the mean is convex in 1/T (Guo et al. 2017, On Calibration of Modern Neural Networks), so that
    it has one minimum over log T, too; the coarse look is for means over listings, which may have several.
    """
    if not samples:
        return 1.0

    def loss(log_temperature: float) -> float:
        temperature = math.exp(log_temperature)
        return -math.fsum(sample.log_likelihood(temperature) for sample in samples) / len(samples)

    first, last = math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)
    grid = [first + step * (last - first) / _NUM_STEPS for step in range(_NUM_STEPS + 1)]
    losses = [loss(x) for x in grid]
    best = losses.index(min(losses))
    found = golden_section(loss, grid[max(best - 1, 0)], grid[min(best + 1, _NUM_STEPS)], _TOLERANCE)
    best_x = min((grid[best], found), key=loss)
    if loss(0.0) <= loss(best_x) + 1e-12:
        return 1.0
    return min(max(math.exp(best_x), MIN_TEMPERATURE), MAX_TEMPERATURE)


def golden_section(loss: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """Where `loss`, which has one minimum in [low, high], is smallest (Kiefer 1953, Sequential Minimax Search for a Maximum)."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = loss(left), loss(right)
    while high - low > tolerance:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = loss(right)
    return (low + high) / 2


def grouping(samples: Sequence[Sample]) -> tuple[Grouping, list[str]]:
    """The group of each sample: its question, or its state where there are fewer than NUM_FOLDS questions."""
    if len({sample.question for sample in samples}) >= NUM_FOLDS:
        return "question", [f"question: {sample.question}" for sample in samples]
    return "state", [f"state: {sample.state}" for sample in samples]


def folds(groups: Sequence[str]) -> list[int]:
    """The fold of each item. Groups in a fixed pseudo-random order; each goes as a whole to the fold with the fewest items."""
    counts = Counter(groups)
    names = sorted(counts)
    random.Random(_SEED).shuffle(names)
    sizes = [0] * NUM_FOLDS
    fold_of = {}
    for name in names:
        fold_of[name] = sizes.index(min(sizes))
        sizes[fold_of[name]] += counts[name]
    return [fold_of[group] for group in groups]


def cross_fitted(samples: Sequence[Sample], groups: Sequence[str]) -> list[float]:
    """Of each sample the temperature that is fitted to the other folds."""
    fold_of = folds(groups)
    fitted = {
        fold: fit_temperature([sample for sample, other in zip(samples, fold_of, strict=True) if other != fold])
        for fold in sorted(set(fold_of))
    }
    return [fitted[fold] for fold in fold_of]


def measure(predictions: Sequence[Prediction], *, has_levels: bool = False) -> Metrics:
    accuracy_interval, ece_interval = intervals(predictions)
    return Metrics(
        accuracy=Estimate(accuracy(predictions), *accuracy_interval),
        nll=nll(predictions),
        brier=brier(predictions),
        ece=Estimate(ece(predictions), *ece_interval),
        level_error=level_error(predictions) if has_levels else None,
        bins=bins(predictions),
    )


def accuracy(predictions: Sequence[Prediction]) -> float:
    """1/n * sum of [argmax p = label]; of equal probabilities the first counts."""
    return _mean([float(one.is_right) for one in predictions])


def nll(predictions: Sequence[Prediction]) -> float:
    """1/n * sum of -log p(label), in nats."""
    return _mean([-one.log_likelihood for one in predictions])


def brier(predictions: Sequence[Prediction]) -> float:
    """1/n * sum over items of the sum over options of (p - y)^2, where y is 1 for the label and 0 for others (Brier 1950)."""
    return _mean(
        [math.fsum((p - (option == one.label)) ** 2 for option, p in enumerate(one.probabilities)) for one in predictions]
    )


def level_error(predictions: Sequence[Prediction]) -> float:
    """1/n * sum of |sum over levels of level * p - label|: how far expected levels are from the right ones."""
    return _mean([abs(math.fsum(level * p for level, p in enumerate(one.probabilities)) - one.label) for one in predictions])


def ece(predictions: Sequence[Prediction]) -> float:
    """sum over bins of n_b / n * |accuracy_b - confidence_b|, over 15 bins of equal width (Guo et al. 2017)."""
    total = len(predictions)
    return math.fsum(one.num_items / total * abs(one.accuracy - one.confidence) for one in bins(predictions))


def bins(predictions: Sequence[Prediction]) -> list[Bin]:
    """Bin b of 15 has the items with b / 15 <= confidence < (b + 1) / 15; a confidence of 1 is in the last."""
    members: list[list[Prediction]] = [[] for _ in range(NUM_BINS)]
    for one in predictions:
        members[_bin_of(one)].append(one)
    return [
        Bin(len(found), _mean([one.confidence for one in found]), _mean([float(one.is_right) for one in found]))
        if found
        else Bin(0, 0.0, 0.0)
        for found in members
    ]


def intervals(predictions: Sequence[Prediction]) -> tuple[tuple[float, float], tuple[float, float]]:
    """The 95% percentile intervals of accuracy and ECE over 1000 resamples of whole groups, with a fixed seed.

    ECE is a sum of absolute values, which noise makes larger: resampled ones are higher than the value itself on average.
    """
    import numpy as np

    names = {group: index for index, group in enumerate(dict.fromkeys(one.group for one in predictions))}
    counts, rights = np.zeros(len(names)), np.zeros(len(names))
    excess = np.zeros((len(names), NUM_BINS))  # n_b * (accuracy_b - confidence_b), of each group
    for one in predictions:
        group = names[one.group]
        counts[group] += 1
        rights[group] += one.is_right
        excess[group, _bin_of(one)] += one.is_right - one.confidence
    shares = np.full(len(names), 1 / len(names))
    drawn = np.random.default_rng(_SEED).multinomial(len(names), shares, size=NUM_RESAMPLES)
    totals = drawn @ counts
    found = (drawn @ rights / totals, np.abs(drawn @ excess).sum(1) / totals)
    of_accuracy, of_ece = (np.percentile(values, [2.5, 97.5]) for values in found)
    return (float(of_accuracy[0]), float(of_accuracy[1])), (float(of_ece[0]), float(of_ece[1]))


def _log_softmax(logprobs: Sequence[float], index: int, temperature: float) -> float:
    """log(softmax(logprobs, temperature)[index])."""
    top = max(logprobs)
    if top == -math.inf:
        return -math.log(len(logprobs))
    total = math.fsum([math.exp((value - top) / temperature) for value in logprobs])
    return (logprobs[index] - top) / temperature - math.log(total)


def _bin_of(one: Prediction) -> int:
    return min(int(one.confidence * NUM_BINS), NUM_BINS - 1)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
