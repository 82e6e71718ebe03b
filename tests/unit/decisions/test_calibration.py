"""Temperatures against a brute-force search, each measure against its formula by hand, and folds that keep questions whole."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.entrypoints.decisions import calibration
from halfbyte.entrypoints.decisions.calibration import (
    NUM_FOLDS,
    Prediction,
    Sample,
    accuracy,
    bins,
    brier,
    calibrate,
    cross_fitted,
    ece,
    fit_temperature,
    folds,
    golden_section,
    grouping,
    intervals,
    level_error,
    nll,
)

logprob_lists = st.lists(st.floats(-12, 0), min_size=3, max_size=3)


def sample(*listings: list[float], label: int = 0, question: str = "q", state: str = "s") -> Sample:
    return Sample(listings, label, question, state)


def proportional(weights: list[int], sharpness: float, question: str = "q") -> list[Sample]:
    """Items whose labels come exactly as often as `weights` say, read by a model that is too sure by a known factor."""
    logprobs = [sharpness * math.log(weight) for weight in weights]
    labels = [option for option, count in enumerate(weights) for _ in range(count)]
    return [sample(logprobs, label=label, question=question, state=str(i)) for i, label in enumerate(labels)]


def loss(samples: list[Sample], temperature: float) -> float:
    return -math.fsum(one.log_likelihood(temperature) for one in samples)


def predicted(*probabilities: float, label: int = 0, group: str = "") -> Prediction:
    return Prediction(list(probabilities), math.log(probabilities[label]), label, group)


@pytest.mark.parametrize("temperature", [0.25, 1.0, 2.5, 8.0])
def test_f03_the_temperature_of_a_known_distribution_is_found(temperature: float) -> None:
    samples = proportional([8, 2], temperature, "a") + proportional([7, 2, 1], temperature, "b")
    assert fit_temperature(samples) == pytest.approx(temperature, rel=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.lists(logprob_lists, min_size=1, max_size=3), st.integers(0, 2)), min_size=1, max_size=6))
def test_no_temperature_of_a_fine_grid_is_better(drawn: list[tuple[list[list[float]], int]]) -> None:
    samples = [sample(*listings, label=label) for listings, label in drawn]
    grid = [0.05 * 400 ** (step / 1000) for step in range(1001)]
    best = min(loss(samples, temperature) for temperature in grid)
    assert loss(samples, fit_temperature(samples)) <= best + 1e-4 * len(samples)


def test_temperatures_stay_in_their_range() -> None:
    always_right = [sample([-0.1, -2.0], label=0)] * 30
    always_wrong = [sample([-0.1, -2.0], label=1)] * 30
    assert (fit_temperature(always_right), fit_temperature(always_wrong)) == pytest.approx((0.05, 20.0))
    assert fit_temperature(always_right) >= 0.05 and fit_temperature(always_wrong) <= 20.0
    assert fit_temperature([]) == fit_temperature([sample([-1.0, -1.0])] * 5) == 1.0, "nothing is better than 1"


def test_golden_section_finds_a_minimum_anywhere() -> None:
    for at in (-1.0, 0.3, 2.0):
        assert golden_section(lambda x, at=at: (x - at) ** 2, -1.0, 2.0, 1e-6) == pytest.approx(at, abs=1e-5)


@given(st.lists(logprob_lists, min_size=1, max_size=4), st.integers(0, 2), st.floats(0.2, 20.0))
def test_likelihoods_are_those_of_the_answers(listings: list[list[float]], label: int, temperature: float) -> None:
    one = sample(*listings, label=label).predict(temperature, "g")
    assert math.exp(one.log_likelihood) == pytest.approx(one.probabilities[label], rel=1e-9)
    assert math.fsum(one.probabilities) == pytest.approx(1.0) and one.group == "g"


def test_a_temperature_holds_for_each_listing_before_the_mean() -> None:
    two = sample([0.0, -4.0], [-4.0, -1.0])
    p = [1 / (1 + math.exp(-2.0)), 1 / (1 + math.exp(1.5))]
    assert two.predict(2.0).probabilities[0] == pytest.approx(sum(p) / 2)


def test_what_is_ruled_out_is_a_large_loss_and_no_error() -> None:
    assert sample([0.0, -math.inf], label=1).log_likelihood(1.0) < -700
    assert sample([0.0, -60.0], label=1).log_likelihood(0.05) == pytest.approx(-1200.0), "below the smallest float"
    assert sample([-math.inf, -math.inf]).log_likelihood(2.0) == pytest.approx(math.log(0.5))
    assert fit_temperature([sample([0.0, -math.inf], label=1)] * 3) == 1.0


def test_measures_by_hand() -> None:
    found = [predicted(0.7, 0.2, 0.1, label=0), predicted(0.5, 0.3, 0.2, label=1), predicted(0.1, 0.1, 0.8, label=2)]
    assert accuracy(found) == pytest.approx(2 / 3)
    assert nll(found) == pytest.approx(-(math.log(0.7) + math.log(0.3) + math.log(0.8)) / 3)
    assert brier(found) == pytest.approx(((0.09 + 0.04 + 0.01) + (0.25 + 0.49 + 0.04) + (0.01 + 0.01 + 0.04)) / 3)
    assert level_error(found) == pytest.approx((0.4 + abs(0.7 - 1) + abs(1.7 - 2)) / 3)
    assert ece(found) == pytest.approx((0.3 + 0.5 + 0.2) / 3), "each is alone in its bin"


def test_bins_take_what_lies_in_them() -> None:
    edges = [predicted(1.0), predicted(14 / 15, 1 / 15), predicted(0.9, 0.1, label=1), predicted(0.95, 0.05, label=1)]
    found = bins(edges)
    assert [one.num_items for one in found] == [0] * 13 + [1, 3]
    assert found[14].accuracy == pytest.approx(2 / 3) and found[14].confidence == pytest.approx((1 + 14 / 15 + 0.95) / 3)
    assert ece(edges) == pytest.approx((0.9 + abs(2 - (1 + 14 / 15 + 0.95))) / 4)


def test_of_equal_probabilities_the_first_is_the_answer() -> None:
    assert predicted(0.5, 0.5, label=0).is_right and not predicted(0.5, 0.5, label=1).is_right


@given(st.lists(st.sampled_from("abcdefghijkl"), min_size=1, max_size=80))
def test_folds_keep_groups_whole_and_do_not_depend_on_the_order(groups: list[str]) -> None:
    found = folds(groups)
    assert all(len({fold for fold, group in zip(found, groups, strict=True) if group == name}) == 1 for name in set(groups))
    assert dict(zip(groups[::-1], folds(groups[::-1]), strict=True)) == dict(zip(groups, found, strict=True))


def test_folds_are_about_equal() -> None:
    found = folds([f"question {i // 2}" for i in range(100)])
    assert [found.count(fold) for fold in range(NUM_FOLDS)] == [20] * 5
    assert found != sorted(found), "not as the file has them"


def test_no_item_has_a_temperature_that_it_had_a_part_in() -> None:
    """One question is unlike the others: only they get a temperature that it had a part in."""
    samples = [one for i in range(9) for one in proportional([8, 2], 3.0, f"question {i}")]
    odd = proportional([8, 2], 0.5, "odd")
    groups = [one.question for one in samples + odd]
    found = cross_fitted(samples + odd, groups)
    in_fold = [fold == folds(groups)[-1] for fold in folds(groups)]
    assert [t == pytest.approx(3.0, rel=1e-4) for t in found] == in_fold
    assert len(set(found)) > 1


def test_few_questions_are_split_by_their_states() -> None:
    by, groups = grouping([sample([0.0], question="same", state=str(i % 7)) for i in range(21)])
    assert by == "state" and len(set(groups)) == 7
    by, groups = grouping([sample([0.0], question=str(i % 5), state=str(i)) for i in range(21)])
    assert by == "question" and len(set(groups)) == 5


def test_intervals_are_of_whole_groups_and_the_same_again() -> None:
    rng = random.Random(1)
    alone = [predicted(0.8, 0.2, label=int(rng.random() > 0.8), group=str(i)) for i in range(200)]
    together = [predicted(0.8, 0.2, label=one.label, group=str(i // 20)) for i, one in enumerate(sorted(alone, key=_label))]
    of_alone, of_together = intervals(alone), intervals(together)
    assert of_alone == intervals(alone)
    low, high = of_alone[0]
    assert low < accuracy(alone) < high
    deviation = 1.96 * math.sqrt(accuracy(alone) * (1 - accuracy(alone)) / 200)
    assert high - low == pytest.approx(2 * deviation, rel=0.2)
    assert of_together[0][1] - of_together[0][0] > 2 * (high - low), "groups that agree say less"
    assert of_alone[1][0] <= ece(alone) + 1e-12 and of_alone[1][1] <= 0.2


def _label(one: Prediction) -> int:
    return one.label


def test_f03_calibration_is_measured_on_what_it_was_not_fitted_to() -> None:
    nouls = [one for i in range(5) for one in proportional([8, 2], 3.0, f"question {i}")]
    scores = [one for i in range(5) for one in proportional([1, 2, 4, 3], 3.0, f"question {i}")]
    few = proportional([6, 4], 3.0)
    found = calibrate({"choice": few, "noul": nouls, "score": scores})
    assert found.temperatures == {"noul": pytest.approx(3.0, rel=1e-3), "score": pytest.approx(3.0, rel=1e-3)}
    noul = found.by_type["noul"]
    assert noul.before.ece.value == pytest.approx(512 / 520 - 0.8) and noul.after.ece.value == pytest.approx(0.0, abs=1e-4)
    assert noul.after.nll < noul.before.nll and noul.after.brier < noul.before.brier
    assert noul.after.accuracy == noul.before.accuracy and noul.before.level_error is None
    assert (noul.num_items, noul.num_groups, noul.grouped_by) == (50, 5, "question")
    score = found.by_type["score"]
    assert score.after.level_error is not None and score.before.level_error is not None
    left_out = found.by_type["choice"]
    assert left_out.temperature is None and left_out.after == left_out.before
    assert found.after.nll < found.before.nll and found.before.level_error is None
    assert sum(one.num_items for one in found.before.bins) == 110


def test_noise_gains_nothing() -> None:
    """Labels that have nothing to do with what was read: the fit to all items looks better than what it is worth."""
    rng = random.Random(3)
    samples = [
        sample([rng.gauss(0, 0.2), rng.gauss(0, 0.2)], label=rng.randrange(2), question=f"question {i}") for i in range(40)
    ]
    found = calibrate({"noul": samples}).by_type["noul"]
    assert found.temperature is not None
    in_sample = nll([one.predict(found.temperature) for one in samples])
    assert in_sample < found.after.nll
    assert len(set(found.item_temperatures)) == NUM_FOLDS or calibration.MAX_TEMPERATURE in found.item_temperatures
