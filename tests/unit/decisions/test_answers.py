"""The arithmetic of answers, and the files of temperatures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.entrypoints.decisions.answers import Answer, answer, softmax
from halfbyte.entrypoints.decisions.orders import listings
from halfbyte.entrypoints.decisions.questions import Option, Question, read_questions
from halfbyte.entrypoints.decisions.reading import Scores
from halfbyte.entrypoints.decisions.temperatures import find_temperatures, read_temperatures, write_temperatures
from halfbyte.errors import UserError
from halfbyte.model_runner.source import ModelFiles

THREE = Question("q", "choice", "", (Option("a"), Option("b"), Option("c")))


def answered(question: Question, *logprobs: list[float], temperature: float = 1.0, min_label_mass: float = 0.0) -> Answer:
    orders = listings(question, "average" if len(logprobs) > 1 else "given")
    scores = [Scores(values, True) for values in logprobs]
    return answer(question, orders, scores, [], temperature=temperature, min_label_mass=min_label_mass)


def test_probabilities_are_of_the_labels_only() -> None:
    found = answered(THREE, [math.log(0.3), math.log(0.1), math.log(0.1)])
    assert found.probabilities == pytest.approx([0.6, 0.2, 0.2]) and found.label_mass == pytest.approx(0.5)
    assert found.best == 0 and found.confidence == pytest.approx(0.3)
    assert found.expected_index == pytest.approx(0.2 + 0.4)
    assert not found.abstained and found.spread is None


def test_the_first_of_equals_wins() -> None:
    assert answered(THREE, [-2.0, -1.0, -1.0]).best == 1


def test_f03_a_temperature_moves_probabilities_before_the_confidence_and_leaves_the_mass() -> None:
    plain, warm = answered(THREE, [-0.2, -2.0, -3.0]), answered(THREE, [-0.2, -2.0, -3.0], temperature=2.0)
    assert warm.probabilities == pytest.approx(softmax([-0.1, -1.0, -1.5], 1.0))
    assert warm.label_mass == plain.label_mass and warm.confidence == pytest.approx(max(warm.probabilities) * warm.label_mass)
    assert (warm.best, warm.temperature) == (plain.best, 2.0)


def test_too_little_mass_abstains() -> None:
    found = answered(THREE, [-5.0, -6.0, -7.0], min_label_mass=0.5)
    assert found.abstained and found.confidence == 0.0
    assert not answered(THREE, [-0.1, -6.0, -7.0], min_label_mass=0.5).abstained


def test_logits_without_any_hope_are_no_error() -> None:
    found = answered(THREE, [-math.inf] * 3)
    assert found.probabilities == [1 / 3] * 3 and found.label_mass == 0.0


@given(st.lists(st.lists(st.floats(-30, 0), min_size=3, max_size=3), min_size=3, max_size=3))
def test_means_do_not_depend_on_the_order_of_listings(values: list[list[float]]) -> None:
    found = [answered(THREE, *order) for order in (values, values[::-1], values[1:] + values[:1])]
    assert found[0].probabilities == found[1].probabilities == found[2].probabilities
    assert found[0].label_mass == found[1].label_mass and found[0].spread == found[2].spread
    assert sum(found[0].probabilities) == pytest.approx(1.0)


@given(st.lists(st.floats(-700, 0), min_size=1, max_size=255), st.floats(0.05, 20.0))
def test_softmax_sums_to_one(logprobs: list[float], temperature: float) -> None:
    probabilities = softmax(logprobs, temperature)
    assert math.fsum(probabilities) == pytest.approx(1.0, abs=1e-12) and min(probabilities) >= 0.0


def files(path: Path) -> ModelFiles:
    return ModelFiles(path.name, "gguf" if path.suffix == ".gguf" else "hf", path)


def test_f03_temperatures_are_found_beside_the_model(tmp_path: Path) -> None:
    gguf, folder = tmp_path / "a.gguf", tmp_path / "hub"
    folder.mkdir()
    assert find_temperatures(files(gguf)).source is None and find_temperatures(files(folder)).of("noul") == 1.0
    write_temperatures(tmp_path / "decision_temperatures.json", {"noul": 2.5}, {"note": "of the folder"})
    write_temperatures(tmp_path / "a.decision_temperatures.json", {"noul": 1.5, "score": 3}, {})
    write_temperatures(folder / "decision_temperatures.json", {"choice": 0.5}, {})
    found = find_temperatures(files(gguf))
    assert (found.of("noul"), found.of("score"), found.of("choice")) == (1.5, 3.0, 1.0)
    assert found.source == "a.decision_temperatures.json"
    assert find_temperatures(files(tmp_path / "b.gguf")).of("noul") == 2.5
    assert find_temperatures(files(folder)).of("choice") == 0.5
    assert find_temperatures(files(folder), "none").source is None
    assert find_temperatures(files(folder), str(tmp_path / "decision_temperatures.json")).of("noul") == 2.5


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"temperatures": []}', '{"temperatures": {"rank": 1}}', '{"temperatures": {"noul": 0}}']
    + ['{"temperatures": {"noul": "1"}}', '{"temperatures": {"noul": true}}', '{"temperatures": {"noul": NaN}}'],
)
def test_temperatures_that_cannot_be_used(tmp_path: Path, content: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"t\.json: "):
        read_temperatures(path)
    with pytest.raises(UserError, match="cannot read these temperatures"):
        read_temperatures(tmp_path / "absent.json")


def test_written_temperatures_keep_their_notes(tmp_path: Path) -> None:
    write_temperatures(tmp_path / "t.json", {"noul": 2.0}, {"model": "m"})
    content: dict[str, Any] = json.loads((tmp_path / "t.json").read_text())
    assert content == {"temperatures": {"noul": 2.0}, "model": "m"}


def test_a_question_of_one_option_is_certain() -> None:
    [question] = read_questions({"q": {"type": "choice", "criteria": {"only": None}}})
    found = answered(question, [-3.0])
    assert found.probabilities == [1.0] and found.confidence == pytest.approx(math.exp(-3.0))
