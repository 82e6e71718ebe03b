"""Answers in the two syntaxes of DeepSeek V3."""

from __future__ import annotations

import pytest

from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers.deepseek_v3 import CALL_BEGIN, CALL_END, SEPARATOR, DeepseekV3
from halfbyte.errors import UserError
from tests.unit.tool_parsers.recorded import Recorded
from tests.unit.tool_parsers.token_marks import tokenizer_with

PARSERS = ["deepseek_v3", "deepseek_v31"]
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def fenced(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def plain(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}"


ARGUMENTS = f'{{"city": "Zürich 🌧 ``` \\"{CALL_END}", "at": [{{"x": []}}, -1.5]}}'
RECORDED = {
    "deepseek_v3": [
        Recorded("one call", BEGIN + fenced("get_weather", ARGUMENTS) + END, calls=[("get_weather", ARGUMENTS)]),
        Recorded(
            "text, three calls, the first without arguments",
            f"I look.\n{BEGIN}{fenced('now', '{}')}\n{fenced('f', '{}')}\n{fenced('g', ARGUMENTS)}{END}",
            content="I look.",
            calls=[("now", "{}"), ("f", "{}"), ("g", ARGUMENTS)],
        ),
        Recorded(
            "no fence, no end",
            f'{BEGIN}\n{CALL_BEGIN}function{SEPARATOR}f\n{{"a": 1}}{CALL_BEGIN}function{SEPARATOR}g{CALL_END}',
            calls=[("f", '{"a": 1}'), ("g", "{}")],
        ),
        Recorded("no section", f"{fenced('f', ARGUMENTS)} So.", content="So.", calls=[("f", ARGUMENTS)]),
        Recorded("an empty fence", f"{CALL_BEGIN}function{SEPARATOR}f\n```json\n```{CALL_END}", calls=[("f", "{}")]),
        Recorded(
            "cut in the name", f"{BEGIN}{CALL_BEGIN}function{SEPARATOR}f", content=f"{BEGIN}{CALL_BEGIN}function{SEPARATOR}f"
        ),
        Recorded("no call", f"{BEGIN} f and ｜tool", content=f"{BEGIN} f and ｜tool"),
    ],
    "deepseek_v31": [
        Recorded("one call", BEGIN + plain("get_weather", ARGUMENTS) + END, calls=[("get_weather", ARGUMENTS)]),
        Recorded(
            "text, two calls, text",
            f"I look.{BEGIN}{plain('now', '{}')}{plain('f', ARGUMENTS)}{END} So.",
            content="I look. So.",
            calls=[("now", "{}"), ("f", ARGUMENTS)],
        ),
        Recorded("no arguments", BEGIN + plain("now", "") + END, calls=[("now", "{}")]),
        Recorded("the older form", BEGIN + fenced("f", ARGUMENTS) + END, calls=[("f", ARGUMENTS)]),
        Recorded(
            "no marks between or at the end",
            f'{BEGIN}{CALL_BEGIN}f{SEPARATOR}{{"a": 1}}\n{CALL_BEGIN}g{SEPARATOR}{{"b": 2}}',
            calls=[("f", '{"a": 1}'), ("g", '{"b": 2}')],
        ),
        Recorded("cut in the name", f"Well {BEGIN}{CALL_BEGIN}get", content=f"Well {BEGIN}{CALL_BEGIN}get"),
        Recorded("text", "<｜tool▁calls▁", content="<｜tool▁calls▁"),
    ],
}


def test_a_vocabulary_without_the_marks_is_refused() -> None:
    with pytest.raises(UserError, match="no token '<｜tool▁call▁begin｜>' and no '<｜tool▁sep｜>'"):
        DeepseekV3(Marks(tokenizer_with(BEGIN)))
