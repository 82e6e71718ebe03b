"""Answers whose calls are JSON behind a mark: Granite, Hunyuan, InternLM, Jamba, Phi-4-mini."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers.internlm import InternLM
from halfbyte.entrypoints.tool_parsers.json_arrays import Granite, Jamba
from halfbyte.errors import UserError
from tests.unit.tool_parsers.recorded import Recorded, read
from tests.unit.tool_parsers.token_marks import tokenizer_with

PARSERS = ["granite", "hunyuan_a13b", "internlm", "jamba", "phi4_mini_json"]


def in_array(opening: str, close: str) -> Iterator[Recorded]:
    """The same answers between other marks."""
    yield Recorded(
        "one call",
        f'{opening}[{{"name": "get_weather", "arguments": {{"city": "Zürich 🌧", "days": 3}}}}]{close}',
        calls=[("get_weather", '{"city": "Zürich 🌧", "days": 3}')],
    )
    yield Recorded(
        "text, several calls over lines, text",
        f'I look.\n{opening}[\n    {{"name": "now", "arguments": {{}}}},\n'
        f'    {{"name": "f", "arguments": {{"a": [{{"b": null}}]}}}},\n    {{"name": "g"}}\n]{close}\n Well.',
        content="I look.\n Well.",
        calls=[("now", "{}"), ("f", '{"a": [{"b": null}]}'), ("g", "{}")],
    )
    yield Recorded(
        "quotes, brackets and the marks inside a string",
        f'{opening} [{{"name": "write", "arguments": {{"text": "]{close}{opening}[{{ \\"q\\" \\\\", "n": -1.5e3}}}}]{close}',
        calls=[("write", f'{{"text": "]{close}{opening}[{{ \\"q\\" \\\\", "n": -1.5e3}}')],
    )
    yield Recorded(
        "no comma, no bracket at the end, arguments as a string",
        f'{opening}[{{"name": "f", "arguments": "{{\\"a\\": 1}}"}} {{"name": "g", "parameters": {{"b": 2}}}}{close}',
        calls=[("f", '{"a": 1}'), ("g", '{"b": 2}')],
    )
    yield Recorded("one object, no end", f'{opening}{{"name": "f", "arguments": null}}', calls=[("f", "{}")])
    yield Recorded(
        "again behind the end",
        f'{opening}[{{"name": "f"}}]{close}{opening}[{{"name": "g"}}]{close}',
        calls=[("f", "{}"), ("g", "{}")],
    )
    yield Recorded("no array", f"see {opening}(1) and {opening}[]", content=f"see {opening}(1) and {opening}[]")
    yield Recorded("text", f"Hello {opening[:-1]}", content=f"Hello {opening[:-1]}")


PLUGIN = "<|action_start|><|plugin|>"
RECORDED = {
    "granite": [
        *in_array("<|tool_call|>", ""),
        Recorded("spelled", '<tool_call>[{"name": "f"}]</tool_call>', calls=[("f", "{}")]),
    ],
    "hunyuan_a13b": list(in_array("<tool_calls>", "</tool_calls>")),
    "jamba": list(in_array("<tool_calls>", "</tool_calls>")),
    "phi4_mini_json": [
        *in_array("functools", ""),
        *(Recorded(f"marks: {a.name}", a.text, a.content, a.calls) for a in in_array("<|tool_call|>", "<|/tool_call|>")),
        Recorded("a module", "use functools.cache [1]", content="use functools.cache [1]"),
    ],
    "internlm": [
        Recorded(
            "text, then a call",
            f'Sure, I look.{PLUGIN}\n{{"name": "get_weather", "parameters": {{"city": "上海", "days": 3}}}}<|action_end|>\n',
            content="Sure, I look.",
            calls=[("get_weather", '{"city": "上海", "days": 3}')],
        ),
        Recorded(
            "two calls, the first without parameters or an end",
            f'{PLUGIN}{{"name": "now", "parameters": {{}}}}\n'
            f'{PLUGIN}\n{{"name": "f", "arguments": {{"a": "<|action_end|> \\"}}"}}}}<|action_end|>',
            calls=[("now", "{}"), ("f", '{"a": "<|action_end|> \\"}"}')],
        ),
        Recorded(
            "no plugin named",
            '<|action_start|>{"name": "f", "parameters": {"a": {"b": [1]}}}',
            calls=[("f", '{"a": {"b": [1]}}')],
        ),
        Recorded(
            "code is no call",
            "<|action_start|><|interpreter|>\nx = {}\n<|action_end|>",
            content="<|action_start|><|interpreter|>\nx = {}\n<|action_end|>",
        ),
        Recorded("text", "<|action_sta", content="<|action_sta"),
    ],
}


def test_a_vocabulary_without_the_marks_is_refused() -> None:
    with pytest.raises(UserError, match=r"--tool-call-parser internlm does not fit this model.*'<\|plugin\|>'"):
        InternLM(Marks(tokenizer_with("<|action_start|>")))
    with pytest.raises(UserError, match="--tool-call-parser jamba does not fit"):
        Jamba(Marks(tokenizer_with()))


def test_a_mark_that_is_a_token_is_only_that_token() -> None:
    marks = Marks(tokenizer_with("<|tool_call|>"))
    syntax = Granite(marks)
    spelled = '<|tool_call|>[{"name": "f"}]'
    assert read(syntax.reader([]), [spelled]).content == spelled
    assert read(syntax.reader([]), [marks.mark("<|tool_call|>") + '[{"name": "f"}]']).calls == [["f", "{}"]]
