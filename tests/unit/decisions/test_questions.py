"""What a question may be: the boundary table, with errors that name the question."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.entrypoints.decisions.orders import check_order, listings
from halfbyte.entrypoints.decisions.questions import Option, Question, read_questions
from halfbyte.entrypoints.decisions.wording import labels_of, question_text, state_text
from halfbyte.errors import UserError


def choice(count: int) -> dict[str, Any]:
    return {"type": "choice", "instructions": "Which?", "criteria": {f"option {i}": None for i in range(count)}}


def score(count: int) -> dict[str, Any]:
    return {"type": "score", "criteria": [f"level {i}" for i in range(count)]}


@pytest.mark.parametrize(
    "spec",
    [
        choice(1),
        choice(255),
        {"type": "choice", "criteria": {"a": "first", "b": 2, "c": ["x"], "": None}},
        {"type": "noul"},
        {"type": "noul", "instructions": None, "criteria": None},
        {"type": "noul", "instructions": 7, "criteria": {"true": "it is"}},
        score(2),
        score(10),
        {"type": "score", "criteria": [1, 2, 3]},
    ],
)
def test_f10_questions_that_can_be_asked(spec: dict[str, Any]) -> None:
    [question] = read_questions({"q": spec})
    assert question.id == "q" and question.type == spec["type"]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("text", "must be an object"),
        ({}, "type must be one of choice, noul, score, got None"),
        ({"type": "rank"}, "type must be one of choice, noul, score, got 'rank'"),
        ({"type": ["noul"]}, "type must be one of"),
        ({"type": "noul", "temperature": 1, "n": 2}, "it has no field 'temperature', 'n'"),
        ({"type": "choice"}, "criteria of a choice must be an object"),
        ({"type": "choice", "criteria": {}}, "with at least one"),
        ({"type": "choice", "criteria": ["a", "b"]}, "criteria of a choice must be an object"),
        (choice(256), "it has 256 options, at most 255 are possible"),
        ({"type": "choice", "criteria": {1: None, "1": None}}, "two options are called '1'"),
        ({"type": "noul", "criteria": {"yes": "x"}}, "an object with true and false"),
        ({"type": "noul", "criteria": ["true"]}, "an object with true and false"),
        ({"type": "score"}, "a list of 2 to 10 level names"),
        ({"type": "score", "criteria": {"0": "low"}}, "a list of 2 to 10 level names"),
        (score(1), "a score has 2 to 10 levels, got 1"),
        (score(11), "a score has 2 to 10 levels, got 11"),
        ({"type": "score", "criteria": ["low", "high", "low"]}, "two levels are called 'low'"),
    ],
)
def test_f10_questions_that_cannot_name_the_question(spec: Any, reason: str) -> None:
    with pytest.raises(UserError, match="question 'my id'") as raised:
        read_questions({"fine": {"type": "noul"}, "my id": spec})
    assert reason in str(raised.value) and raised.value.param == "questions"


@pytest.mark.parametrize(
    ("questions", "reason"),
    [
        ({}, "at least one"),
        ([], "must be an object"),
        (None, "must be an object"),
        ({"": {"type": "noul"}}, "an id is empty"),
        ({str(i): {"type": "noul"} for i in range(65)}, "65 questions were asked, at most 64 are possible"),
    ],
)
def test_f10_calls_that_cannot(questions: Any, reason: str) -> None:
    with pytest.raises(UserError) as raised:
        read_questions(questions)
    assert reason in str(raised.value) and raised.value.param == "questions"


def test_the_words_of_each_type() -> None:
    [question] = read_questions(
        {"q": {"type": "choice", "instructions": "Who?", "criteria": {"sales": "new orders", "help": None}}}
    )
    assert question_text(question, (1, 0)).split("\n")[:3] == ["Question: Who?", "A: help", "B: sales - new orders"]
    [question] = read_questions({"q": {"type": "noul", "criteria": {"false": "nothing is said"}}})
    assert question_text(question, (0, 1)).split("\n")[:2] == ["yes", "no: nothing is said"]
    [question] = read_questions({"q": {"type": "score", "instructions": "How?", "criteria": ["bad", "good"]}})
    assert question_text(question, (1, 0)).split("\n")[:3] == ["Question: How?", "1: good", "0: bad"]


@pytest.mark.parametrize(
    ("count", "first", "last"), [(1, "A", "A"), (26, "A", "Z"), (27, "01", "27"), (99, "01", "99"), (255, "001", "255")]
)
def test_labels_of_many_options(count: int, first: str, last: str) -> None:
    labels = labels_of(Question("q", "choice", "", tuple(Option(str(i)) for i in range(count))))
    assert (labels[0], labels[-1], len(set(labels))) == (first, last, count)
    assert len(set(map(len, labels))) == 1, "none begins another"


def test_states_are_texts_or_json() -> None:
    assert state_text(" as it is\n") == " as it is\n"
    assert state_text({"b": [1, None], "a": "ü"}) == '{"b":[1,null],"a":"ü"}'
    assert state_text({"a": 1}, indent=2) == '{\n  "a": 1\n}'


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 255])
def test_listings_do_not_depend_on_how_options_were_given(count: int) -> None:
    names = [f"option {i}" for i in range(count)]
    told = []
    for given in (names, names[::-1], names[1:] + names[:1]):
        question = Question("q", "choice", "", tuple(map(Option, given)))
        told.append([[given[i] for i in order] for order in listings(question, "average")])
    assert told[0] == told[1] == told[2]
    assert all(sorted(order) == sorted(names) for order in told[0])
    assert len(told[0]) == min(count, 8)
    if count <= 8:
        assert all(len({order[place] for order in told[0]}) == count for place in range(count)), "each at each place"


def test_other_listings() -> None:
    assert listings(Question("q", "score", "", tuple(map(Option, "abc"))), "average") == [(0, 1, 2), (2, 1, 0)]
    assert listings(Question("q", "choice", "", tuple(map(Option, "ba"))), "given") == [(0, 1)]
    assert (check_order(None), check_order("average")) == ("given", "average")
    with pytest.raises(UserError, match="order must be one of given, average, got 'random'"):
        check_order("random")
