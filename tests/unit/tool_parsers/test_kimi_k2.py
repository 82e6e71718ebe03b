"""Answers of Kimi K2."""

from __future__ import annotations

import pytest

from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers.kimi_k2 import ARGUMENTS, BEGIN, CALL_BEGIN, CALL_END, END, KimiK2
from halfbyte.errors import UserError
from tests.unit.tool_parsers.recorded import Recorded
from tests.unit.tool_parsers.token_marks import tokenizer_with

PARSER = "kimi_k2"
VALUE = f'{{"city": "Zürich 🌧 {CALL_END} \\"q\\" }}", "at": [{{"x": null}}]}}'


def call(identity: str, arguments: str) -> str:
    return f"{CALL_BEGIN}{identity}{ARGUMENTS}{arguments}{CALL_END}"


RECORDED = [
    Recorded(
        "one call",
        BEGIN + call("functions.get_weather:0", VALUE) + END,
        calls=[("get_weather", VALUE)],
        call_ids=["functions.get_weather:0"],
    ),
    Recorded(
        "text, two calls, the first without arguments",
        f"I look.{BEGIN}{call('functions.now:3', '{}')}{call('functions.f:4', VALUE)}{END}",
        content="I look.",
        calls=[("now", "{}"), ("f", VALUE)],
        call_ids=["functions.now:3", "functions.f:4"],
    ),
    Recorded(
        "spaces, no section, text between",
        f"{CALL_BEGIN} functions.f:0 \n{ARGUMENTS} {VALUE} {CALL_END} then {CALL_BEGIN}g:1{ARGUMENTS}{{}}{CALL_END}",
        content="then",
        calls=[("f", VALUE), ("g", "{}")],
        call_ids=["functions.f:0", "g:1"],
    ),
    Recorded("a dotted name without a number", call("functions.a.b", "{}"), calls=[("a.b", "{}")], call_ids=[None]),
    Recorded("no mark of arguments", f"{BEGIN}{CALL_BEGIN}functions.f:0{VALUE}{END}", calls=[("f", VALUE)]),
    Recorded(
        "no arguments", f"{BEGIN}{CALL_BEGIN}functions.f:0{CALL_END}{call('functions.g:1', '')}", calls=[("f", "{}"), ("g", "{}")]
    ),
    Recorded("cut in the name", f"{BEGIN}{CALL_BEGIN}functions.f:", content=f"{BEGIN}{CALL_BEGIN}functions.f:"),
    Recorded("no call", f"{BEGIN}f{CALL_BEGIN}:0{ARGUMENTS}", content=f"{BEGIN}f{CALL_BEGIN}:0{ARGUMENTS}"),
    Recorded("text", "<|tool_call", content="<|tool_call"),
]


def test_a_vocabulary_without_the_marks_is_refused() -> None:
    with pytest.raises(UserError, match=r"--tool-call-parser kimi_k2 does not fit this model"):
        KimiK2(Marks(tokenizer_with(BEGIN)))
