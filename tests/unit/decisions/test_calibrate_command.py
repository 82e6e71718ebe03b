"""`halfbyte decisions calibrate`: labelled lines, a model that is too sure by a known factor, and what is printed and written."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import halfbyte
from halfbyte.entrypoints.commands import decisions
from halfbyte.entrypoints.decisions.answers import answer
from halfbyte.entrypoints.decisions.labelled import read_labelled
from halfbyte.entrypoints.decisions.orders import Order, listings
from halfbyte.entrypoints.decisions.questions import read_questions
from halfbyte.entrypoints.decisions.reading import Scores
from halfbyte.entrypoints.decisions.temperatures import read_temperatures
from halfbyte.entrypoints.flags import UsageError
from halfbyte.errors import HalfbyteError, UserError

SHARPNESS = 3.0
Item = dict[str, Any]


@dataclass
class FakeLLM:
    """Reads the weights that a state holds, and is too sure of them; the listings of "average" differ."""

    options: dict[str, Any]
    calls: list[tuple[Any, Mapping[str, Any]]] = field(default_factory=list)
    orders: list[str | None] = field(default_factory=list)
    closed: bool = False
    info: Any = field(default_factory=lambda: SimpleNamespace(architecture="FakeForCausalLM", max_model_len=100))

    def decide_many(self, calls: Iterable[tuple[Any, Mapping[str, Any], str | None]], *, order: Order) -> list[Any]:
        found = []
        for state, questions, _ in calls:
            self.calls.append((state, questions))
            self.orders.append(order)
            [question] = read_questions(questions)
            logprobs = [SHARPNESS * math.log(weight) - 9.0 for weight in state["weights"]]
            orders = listings(question, order)
            shifted = [
                Scores([value + 0.1 * turn * (i == 0) for i, value in enumerate(logprobs)], True) for turn in range(len(orders))
            ]
            found.append(SimpleNamespace(answers=[answer(question, orders, shifted, [], temperature=1.0, min_label_mass=0.0)]))
        return found

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    made: list[FakeLLM] = []

    def make(**options: Any) -> FakeLLM:
        made.append(FakeLLM(options))
        return made[-1]

    monkeypatch.setitem(vars(halfbyte), "LLM", make)
    monkeypatch.setattr(decisions, "environment", lambda: {"commit": "abc"})
    return made


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_lines(*items: Any) -> Path:
        path = tmp_path / "items.jsonl"
        path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in items))
        return path

    return write_lines


def noul(weights: tuple[int, int] = (8, 2), question: str = "Is it?") -> list[Item]:
    """Items whose labels come exactly as often as the weights say."""
    spec = {"type": "noul", "instructions": question}
    state = {"weights": weights, "of": question}
    return [{"state": state | {"n": n}, "question": spec, "answer": n < weights[0]} for n in range(sum(weights))]


def choice(question: str = "Which?") -> list[Item]:
    spec = {"type": "choice", "instructions": question, "criteria": {"red": None, "green": "like grass", "blue": None}}
    state = {"weights": [1, 7, 2]}
    return [{"state": state, "question": spec, "answer": name} for name in ("red", *["green"] * 7, *["blue"] * 2)]


def score(question: str = "How far?") -> list[Item]:
    spec = {"type": "score", "instructions": question, "criteria": ["low", "middle", "high"]}
    return [{"state": {"weights": [2, 3, 5]}, "question": spec, "answer": level} for level in [0, 0, 1, 1, "middle"] + [2] * 5]


def many(*, scores: int = 5) -> list[Item]:
    each = [item for i in range(5) for item in noul(question=f"Is it {i}?") + choice(f"Which {i}?")]
    return each + [item for i in range(scores) for item in score(f"How far {i}?")]


def run(path: Path, *words: str | Path) -> None:
    assert decisions.run(["calibrate", str(path), *map(str, words)]) == 0


def test_f03_the_known_temperature_is_found_and_the_error_falls(
    llms: list[FakeLLM], write: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, document = tmp_path / "t.json", tmp_path / "all.json"
    run(write(*many()), "--model", "some/model", "--max-model-len", "64", "--output", output, "--json", document)
    assert llms[0].options == {
        "model": "some/model",
        "max_model_len": 64,
        "decisions_config": {"reader": "auto", "temperatures": "none"},
    }
    assert llms[0].closed and set(llms[0].orders) == {"given"}
    found = read_temperatures(output)
    assert found.by_type == pytest.approx(dict.fromkeys(("choice", "noul", "score"), SHARPNESS), rel=1e-3)
    everything = json.loads(document.read_text())
    for kind in ("choice", "noul", "score"):
        before, after = (everything["types"][kind][when] for when in ("before", "after"))
        assert after["ece"]["value"] < 1e-3 < 0.1 < before["ece"]["value"]
        assert after["nll"] < before["nll"] and after["brier"] < before["brier"]
    assert everything["all"]["after"]["ece"]["value"] < 1e-3
    assert len(everything["items"]) == 150 and everything["environment"] == {"commit": "abc"}
    assert everything["items"][0]["before"][0] == pytest.approx(512 / 520)
    assert everything["items"][0]["after"][0] == pytest.approx(0.8, abs=1e-3)


def test_the_file_says_where_it_is_from(llms: list[FakeLLM], write: Callable[..., Path], tmp_path: Path) -> None:
    run(write(*many(scores=1)), "--output", tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    assert set(content["temperatures"]) == {"choice", "noul"}
    assert (content["model"], content["architecture"], content["order"]) == ("smollm2-135m", "FakeForCausalLM", "given")
    assert content["file"] == "items.jsonl" and content["items"] == {"choice": 50, "noul": 50, "score": 10}
    assert len(content["date"]) == len("2026-01-31") and set(content["metrics"]) == {"choice", "noul"}
    assert content["metrics"]["noul"]["before"]["accuracy"] == 0.8
    assert content["label_mass"]["noul"] == pytest.approx(math.exp(-9.0) * 520, abs=1e-4)


def test_the_table_and_what_is_left_out(
    llms: list[FakeLLM], write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run(write(*many(scores=1)))
    shown = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in shown]
    assert shown[0] == "smollm2-135m (FakeForCausalLM), items.jsonl, order given"
    mass = math.exp(-9.0) * (8**3 + 2**3)
    assert ["noul", "50", "5", "questions", f"{mass:.3f}", "before", "1.000", "0.800"] in [row[:8] for row in rows]
    assert ["after", "3.000", "0.800"] in [row[:3] for row in rows]
    assert ["score", "10", "10"] not in [row[:3] for row in rows] and ["after", "-", "-"] in [row[:3] for row in rows]
    assert "score: 10 items, at least 20 are needed; left out, its temperature stays 1" in shown
    assert any(row[:2] == ["all", "110"] for row in rows)


def test_without_output_nothing_is_written(
    llms: list[FakeLLM], write: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(write(*many()), "--model", "my model")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no temperatures were written; with --output decision_temperatures.json, use it: halfbyte serve")
    assert """'my model' --decisions-config '{"temperatures": "decision_temperatures.json"}', or put it beside""" in last
    assert [path.name for path in tmp_path.iterdir()] == ["items.jsonl"]


def test_a_file_that_exists_is_replaced_and_the_log_says_so(
    llms: list[FakeLLM],
    write: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    output = tmp_path / "t.json"
    output.write_text("mine")
    with caplog.at_level(logging.INFO, "halfbyte"):
        run(write(*many()), "--output", output)
    assert f"--output: {output} exists and is replaced" in caplog.text
    assert read_temperatures(output).source == "t.json"
    assert capsys.readouterr().out.splitlines()[-1].startswith("use it: halfbyte serve smollm2-135m --decisions-config")


def test_several_orders_are_fitted_as_they_are_answered(
    llms: list[FakeLLM], write: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(write(*many()), "--order", "average", "--json", tmp_path / "all.json")
    assert set(llms[0].orders) == {"average"}
    assert '"order": "average"' in capsys.readouterr().out
    items = json.loads((tmp_path / "all.json").read_text())["items"]
    assert {item["type"]: len(item["listing_logprobs"]) for item in items} == {"noul": 2, "choice": 3, "score": 2}
    assert items[0]["listing_logprobs"][0] != items[0]["listing_logprobs"][1]


def test_a_chat_template_is_the_servers(
    llms: list[FakeLLM], write: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template, output = tmp_path / "chat.jinja", tmp_path / "t.json"
    template.write_text("{{ messages }}")
    run(write(*many()), "--chat-template", template, "--output", output)
    assert llms[0].options["chat_template"] == "{{ messages }}"
    assert json.loads(output.read_text())["chat_template"] == "chat.jinja"
    assert f"--chat-template {template} --decisions-config" in capsys.readouterr().out
    with pytest.raises(UserError, match="chat-template"):
        run(write(*many()), "--chat-template", "nowhere.jinja")
    assert len(llms) == 1


def test_one_question_of_many_states(llms: list[FakeLLM], write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    run(write(*noul((24, 6))))
    shown = capsys.readouterr().out
    assert "30 states" in shown and "noul: fewer than 5 different questions: the measures hold for these questions only" in shown


def test_a_picture(llms: list[FakeLLM], write: Callable[..., Path], tmp_path: Path) -> None:
    run(write(*many()), "--plot", tmp_path / "found.svg")
    assert "<svg" in (tmp_path / "found.svg").read_text()


def test_a_picture_needs_matplotlib(llms: list[FakeLLM], write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.entrypoints.decisions.plot.find_spec", lambda name: None)
    with pytest.raises(HalfbyteError, match="--plot needs matplotlib, which the extra `bench` brings"):
        run(write(*many()), "--plot", "found.svg")
    assert not llms


def test_items_with_several_questions(llms: list[FakeLLM], write: Callable[..., Path]) -> None:
    specs = {"is it": {"type": "noul"}, "far": {"type": "score", "criteria": ["low", "high"]}}
    item = {"id": "x", "state": {"weights": [8, 2]}, "questions": specs, "answers": {"far": "high", "is it": False}}
    path = write(item, "", item | {"instructions": None, "answers": {"far": 0, "is it": True}})
    found = read_labelled(path)
    assert [(one.place, one.id, one.label) for one in found] == [
        ("line 1, is it", "is it", 1),
        ("line 1, far", "far", 1),
        ("line 3, is it", "is it", 0),
        ("line 3, far", "far", 0),
    ]
    assert found[0].asked == found[0].state_text, "a question without words is asked by its state"
    assert found[1].asked == "low: \nhigh: "
    run(write(*[item] * 20))
    assert len(llms[0].calls) == 40


def without(item: Item, name: str) -> Item:
    return {key: value for key, value in item.items() if key != name}


ONE, OF_CHOICE, OF_SCORE = noul()[0], choice()[0], score()[0]
SEVERAL = {"state": "", "questions": {"a": {"type": "noul"}}, "answers": {"a": True}}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"state": ', "this is not JSON: Expecting value at column 11"),
        ("[1]", "this must be an object, got list"),
        (without(ONE, "state"), "it has no state; an item has id, state, instructions, question, answer"),
        (without(ONE, "question"), "it has no question"),
        (without(ONE, "answer"), "it has no answer"),
        (ONE | {"anwser": True}, "it has a field 'anwser'"),
        (ONE | {"instructions": 5}, "instructions must be a text, got 5"),
        (ONE | {"id": 7}, "id must be a text, got 7"),
        (ONE | {"question": {"type": "rank"}}, "question 'question': type must be one of choice, noul, score, got 'rank'"),
        (ONE | {"answer": "yes"}, "the answer of a noul must be true or false, got 'yes'"),
        (ONE | {"answer": 1}, "the answer of a noul must be true or false, got 1"),
        (
            OF_CHOICE | {"answer": "grey"},
            "the answer 'grey' is no option; it has 'red', 'green', 'blue'",
        ),
        (OF_CHOICE | {"answer": 0}, "the answer 0 is no option"),
        (OF_SCORE | {"answer": 3}, "the answer 3 is no level; it has 0 to 2, which are 'low', 'middle', 'high'"),
        (OF_SCORE | {"answer": -1}, "the answer -1 is no level"),
        (OF_SCORE | {"answer": True}, "the answer True is no level"),
        (OF_SCORE | {"answer": 1.0}, "the answer 1.0 is no level"),
        (OF_SCORE | {"answer": "none"}, "the answer 'none' is no level"),
        (SEVERAL | {"questions": {}}, "questions must be an object from ids to questions"),
        (SEVERAL | {"answers": []}, "answers must be an object from the ids of the questions to answers, got []"),
        (SEVERAL | {"answers": {}}, "question 'a' has no answer"),
        (SEVERAL | {"answers": {"a": True, "b": True}}, "answers: there is no question 'b'"),
        (SEVERAL | {"answers": {"a": None}}, "question 'a': the answer of a noul must be true or false, got None"),
        (SEVERAL | {"instructions": ["Be fair."]}, "instructions must be a text"),
        (SEVERAL | {"answer": True}, "it has a field 'answer'; an item has id, state, instructions, questions, answers"),
    ],
)
def test_bad_lines_are_named_before_a_model_is_loaded(
    llms: list[FakeLLM], write: Callable[..., Path], line: Any, message: str
) -> None:
    with pytest.raises(UserError) as raised:
        run(write(ONE, "", line))
    assert f"items.jsonl, line 3: {message}" in str(raised.value)
    assert "\n" not in str(raised.value) and not llms


def test_files_that_cannot_be_used(llms: list[FakeLLM], write: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are no questions in this file"):
        run(write(""))
    with pytest.raises(UserError, match="at least 20 items of a type, there are 10 choice, 10 noul"):
        run(write(*noul(), *choice()))
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"state": "\xff"}\n')
    with pytest.raises(UserError, match="line 1: this is not UTF-8"):
        run(path)
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ONE).encode() + b"\r\n")
    assert len(read_labelled(path)) == 1
    with pytest.raises(UserError, match="cannot read this file"):
        read_labelled(tmp_path)
    assert not llms


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "needs a file of labelled questions"),
        ("nowhere.jsonl", "FILE: 'nowhere.jsonl' is not a file"),
        ("{file} --order random", "--order: 'random' is not one of given, average"),
        ("{file} --output /nowhere/t.json", "--output: '/nowhere/t.json' must be a file in a folder that exists"),
        ("{file} --json /", "--json: '/' must be a file"),
        ("{file} --plot x.nothing", "--plot: x.nothing must end in"),
        ("{file} --output {file}", "is the FILE; name another"),
        ("{file} --output t.json --json ./t.json", "--json: './t.json' is also --output; name another"),
        ("{file} --max-model-len few", "--max-model-len: 'few' is not a size"),
        ("{file} --temperature 1", "unknown flag --temperature"),
    ],
)
def test_wrong_flags_are_said_at_once(llms: list[FakeLLM], write: Callable[..., Path], words: str, message: str) -> None:
    path = write(*many())
    with pytest.raises(UsageError) as raised:
        decisions.run(["calibrate", *words.format(file=path).split()])
    assert message in str(raised.value) and not llms


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "decisions needs a kind: halfbyte decisions calibrate"),
        (["--output", "x"], "decisions needs a kind"),
        (["calibrat"], "unknown kind 'calibrat'; did you mean calibrate?"),
        (["serve"], "unknown kind 'serve': halfbyte decisions calibrate"),
    ],
)
def test_kinds(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        decisions.run(words)
    assert message in str(raised.value)


def test_help_says_what_a_line_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert decisions.run(["--help"]) == 0
    assert "  calibrate " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        decisions.run(["calibrate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("usage: halfbyte decisions calibrate [FILE] [flags]")
    assert "A line of FILE is a JSON object with state, question and answer" in shown and "--log-level" in shown


def test_an_engine_that_fails_is_closed(llms: list[FakeLLM], write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FakeLLM, calls: Any, order: str) -> list[Any]:
        raise UserError("question 'line 2': 3 options, this model can tell 2 apart", param="questions")

    monkeypatch.setattr(FakeLLM, "decide_many", refuse)
    with pytest.raises(UserError, match="question 'line 2': 3 options"):
        run(write(*many()))
    assert llms[0].closed
