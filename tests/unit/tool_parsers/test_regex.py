"""Answers in syntaxes that a file describes, and what such a file may say."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers.regex import Regex
from halfbyte.errors import UserError
from tests.unit.tool_parsers.recorded import Recorded, read
from tests.unit.tool_parsers.token_marks import tokenizer_with

PARSER = "regex"
JSON: dict[str, Any] = {"open": "<call", "name": r'\s+name="(?P<name>[\w.-]+)"\s*>', "arguments": "json", "close": "</call>"}
PARAMETERS: dict[str, Any] = {
    "section": {"open": "<calls>", "close": "</calls>"},
    "open": "<call:",
    "name": r"(?P<name>[\w.-]+)(?: /)?>",
    "arguments": "parameters",
    "parameter": {"open": r'\n?<arg key="(?P<key>[^"]+)">', "close": "</arg>"},
    "close": "</call>",
    "between": "\n",
}
TOOLS = [
    Tool(
        "write",
        {"type": "object", "properties": {"text": {"type": "string"}, "at": {"type": "integer"}, "o": {"type": "object"}}},
    ),
    Tool("now"),
]
IN_JSON = [
    Recorded("one call", '<call name="f">{"a": "é 🌧"}</call>', calls=[("f", '{"a": "é 🌧"}')]),
    Recorded(
        "text, two calls, marks inside a string",
        'See <calls>.\n<call  name="f.g" >\n{"a": "</call> <call name=\\"x\\">"}\n</call>\n<call name="h"></call> So.',
        content="See <calls>. So.",
        calls=[("f.g", '{"a": "</call> <call name=\\"x\\">"}'), ("h", "{}")],
    ),
    Recorded("no end", '<call name="f">{"a": [{}]}<call name="g">{}', calls=[("f", '{"a": [{}]}'), ("g", "{}")]),
    Recorded("another head", '<call id="f">{}</call>', content='<call id="f">{}</call>'),
    Recorded("cut in the head", 'ah <call name="f', content='ah <call name="f'),
]
WITH_PARAMETERS = [
    Recorded(
        "two calls",
        '<calls><call:write>\n<arg key="text">  x\n</arg><arg key="at">3</arg></call>\n<call:now /></call></calls>',
        calls=[("write", '{"text": "  x\\n", "at": 3}'), ("now", "{}")],
        tools=TOOLS,
    ),
    Recorded(
        "sloppy: no section, no end of a call",
        'So:\n<call:write> <arg key="o">{"a": [1]}</arg>\n<call:write><arg key="text">"</call>" \\</arg>\n</call> Well.',
        content="So: Well.",
        calls=[("write", '{"o": {"a": [1]}}'), ("write", '{"text": "\\"</call>\\" \\\\"}')],
        tools=TOOLS,
    ),
    Recorded(
        "the mark of an end in a string of an object",
        '<call:write><arg key="o">{"a": "</arg>"}</arg><arg key="text">{"</arg></call>',
        calls=[("write", '{"o": {"a": "</arg>"}, "text": "{\\""}')],
        tools=TOOLS,
    ),
    Recorded("no marks at the end", '<calls><call:write><arg key="at">3</arg>\n', calls=[("write", '{"at": 3}')], tools=TOOLS),
    Recorded("cut in a text", '<call:write><arg key="text">Onc', calls=[("write", '{"text": "Onc')], tools=TOOLS),
    Recorded("nothing a parameter", "<call:now> junk</call>" + "x" * 200, "junk</call>" + "x" * 200, [("now", "{}")], TOOLS),
    Recorded("cut in a number", '<call:write><arg key="at">12', calls=[("write", '{"at": ')], tools=TOOLS),
    Recorded("a section of something else", "<calls>none</calls>", content="<calls>none</calls>", tools=TOOLS),
]
RECORDED = [
    *(Recorded(f"json: {a.name}", a.text, a.content, a.calls, a.tools) for a in IN_JSON),
    *(Recorded(f"parameters: {a.name}", a.text, a.content, a.calls, a.tools) for a in WITH_PARAMETERS),
]
SYNTAX = {case.name: Regex(Marks(), JSON if case.name.startswith("json") else PARAMETERS) for case in RECORDED}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"open": ""}, "open must be a text that is not empty"),
        ({"close": None}, "close must be a text"),
        ({"arguments": "xml"}, 'arguments must be "json" or "parameters", got \'xml\''),
        ({"arguments": "parameters"}, "parameter goes with arguments"),
        ({"parameter": {"open": "(?P<key>a)>", "close": "<"}}, "parameter goes with arguments"),
        ({"section": "x"}, "section must be a mapping"),
        ({"section": {"open": "x"}}, "section.close is missing"),
        ({"ends": "x"}, "ends is unknown; known are arguments, between, close, name, open"),
        ({"name": "f"}, r"name needs a group \(\?P<name>...\)"),
        ({"name": "(?P<key>f)>"}, "name may have one group"),
        ({"name": "(?:(?P<name>f))>"}, "name may have one group"),
        ({"name": "(?P<name>f)(?=x)>"}, "name may have one group"),
        ({"name": r"(?P<name>f)\1"}, "name must not refer back"),
        ({"name": r"(?P<name>(?:a+)+)>"}, "name must not repeat a group"),
        ({"name": r"(?P<name>a)|b"}, "name must put alternatives into"),
        ({"name": r"(?P<name>\w+)"}, "name must end with what stands behind"),
        ({"name": r"(?P<name>\w+)\s*"}, "name must end with what stands behind"),
        ({"name": r"(?P<name>[a-)>"}, "name (needs a group|is no regular expression)"),
        ({"name": r"(?P<name>a)**>"}, "name must not repeat a group"),
    ],
)
def test_a_file_that_says_something_wrong_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Regex(Marks(), {**JSON, **change})


@pytest.mark.parametrize("name", [r"(?P<name>[]|)(]+)>", r"[(|\]](?P<name>[^]>]+)\|", r"\((?:a|b)?(?P<name>(?:x|y)?z)\)"])
def test_brackets_in_classes_and_escapes_are_no_groups(name: str) -> None:
    Regex(Marks(), {**JSON, "name": name})


def test_a_missing_key_is_named() -> None:
    with pytest.raises(UserError, match="name is missing"):
        Regex(Marks(), {key: value for key, value in JSON.items() if key != "name"})


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_the_file_is_json_or_yaml(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"syntax.{suffix}"
    file.write_text(json.dumps(JSON) if suffix == "json" else "".join(f"{key}: '{value}'\n" for key, value in JSON.items()))
    syntax = Regex.for_server(Marks(), f"regex:{file}", tokenizer_with(), "--tool-call-parser")
    assert read(syntax.reader([]), [IN_JSON[0].text]).calls == [["f", '{"a": "é 🌧"}']]


@pytest.mark.parametrize("content", [None, b"[1]", b"a: [", b"\xff\xfe\xfa", b"# " + b"x" * 70_000])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "syntax.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match="--tool-call-parser regex:.*the file (cannot be read|must hold one mapping)"):
        Regex.for_server(Marks(), f"regex:{file}", tokenizer_with(), "--tool-call-parser")


def test_marks_that_are_tokens_count_only_as_tokens() -> None:
    marks = Marks(tokenizer_with("<call", "</call>"))
    syntax = Regex(marks, JSON)
    assert read(syntax.reader([]), [IN_JSON[0].text]).content == IN_JSON[0].text
    written = IN_JSON[0].text.replace("<call", marks.mark("<call")).replace("</call>", marks.mark("</call>"))
    assert read(syntax.reader([]), written).calls == [["f", '{"a": "é 🌧"}']]


@pytest.mark.parametrize("tool", [Tool("a tool"), Tool("f", {"type": "object", "properties": {'"': {"type": "string"}}})])
def test_a_grammar_refuses_names_that_the_expressions_do_not_match(tool: Tool) -> None:
    with pytest.raises(UserError, match=f"tool {tool.name!r}: the expression for (names|parameters)"):
        Regex(Marks(), PARAMETERS).grammar([tool], lambda schema: "JSON", parallel=True)


def test_an_expression_sees_a_few_hundred_characters_at_most() -> None:
    syntax = Regex(Marks(), {**JSON, "name": r"(?P<name>.*.*.*)>"})
    started_s = time.process_time()
    meaning = read(syntax.reader([]), ["<call" + "a" * 100_000])
    assert time.process_time() - started_s < 5.0
    assert meaning.content == "<call" + "a" * 100_000
