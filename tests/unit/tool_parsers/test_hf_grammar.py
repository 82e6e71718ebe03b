"""What a response template's grammar writes is read back by the same template as valid calls; what it cannot write is refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.grammar import tools_grammar
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers.hf import ResponseTemplateSyntax
from halfbyte.errors import UserError
from tests.unit.tool_parsers.drawn_texts import TOOLS, Writing, an_object, json_term
from tests.unit.tool_parsers.recorded import read
from tests.unit.tool_parsers.test_hf import (
    DIALECT_CALLS,
    JSON_CALLS,
    LINE_CALLS,
    LIST_CALLS,
    NAMED,
    SPACED_CALLS,
    TAG_CALLS,
    TYPED_TAGS,
    with_calls,
)

NAMED_JSON = with_calls(
    **{"open": None, "open_pattern": r"<\|tool\|>(?P<fn>[\w-]+)<\|args\|>\s*", "close": "<|end_tool|>"},
    content="json",
    repeats=True,
    transform=NAMED,
)
WHOLE_CALLS = with_calls(open=["<tool_call>", "<tc>"], content="json", repeats=True, transform={"function": "{content}"})
TEMPLATES = {
    "json": JSON_CALLS,
    "json, named by its opener": NAMED_JSON,
    "json, the function as it is": WHOLE_CALLS,
    "a list": LIST_CALLS,
    "tags": TAG_CALLS,
    "tags, spaces in patterns": SPACED_CALLS,
}
MARKS = ("<call>", "</call>", "<tool_call>", "</tool_call>", "</parameter>", "<|tool|>", "<|args|>", "<|end_tool|>", "[CALLS]")
# A closing tag ends a value also in a string of its JSON, so that such strings are not for tags.
NUMBERS = an_object(["x"], x={"type": "array", "items": {"type": "integer"}})
TAG_TOOLS = [*TOOLS[:-1], Tool("nest", an_object(["at"], at=NUMBERS))]


@pytest.mark.parametrize("parallel", [True, False], ids=["several", "one"])
@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "texts"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_it_reads_as_valid_calls(name: str, has_tokens: bool, parallel: bool) -> None:
    pen = Writing(lambda marks: ResponseTemplateSyntax(marks, TEMPLATES[name]), MARKS if has_tokens else ())
    draw = random.Random(f"{name} {has_tokens} {parallel}")
    seen: set[str] = set()
    by_name = {tool.name: tool for tool in (TAG_TOOLS if name.startswith("tags") else TOOLS)}
    for tools in [list(by_name.values()), *([tool] for tool in by_name.values())]:
        lark = tools_grammar(pen.syntax, pen.marks, tools, json_term, required=True, parallel=parallel)
        for _ in range(3):
            text = pen.draw(lark, draw)
            meaning = read(pen.syntax.reader(tools), [text])
            assert meaning.calls and (parallel or len(meaning.calls) == 1), text
            assert not meaning.content.strip(), (text, meaning.content)
            for called, arguments in meaning.calls:
                assert by_name[called] in tools, text
                jsonschema.validate(json.loads(arguments), dict(by_name[called].parameters))
                seen.add(called)
    assert seen == set(by_name)


def test_a_field_that_does_not_repeat_is_written_once() -> None:
    syntax = ResponseTemplateSyntax(Marks(), with_calls(content="json", transform={"function": "{content}"}))
    assert syntax.grammar(TOOLS, json_term, parallel=True) == syntax.grammar(TOOLS, json_term, parallel=False)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (DIALECT_CALLS, "unquoted_keys"),
        (LINE_CALLS, "kv-lines"),
        (TYPED_TAGS, "merge_duplicates"),
        (
            with_calls(content="json", transform={"function": {"name": "{content.a}", "arguments": {"x": "{content.b}"}}}),
            "transform",
        ),
        (with_calls(open=None, open_pattern=r"(?:<a>|<b>)", content="json", transform={"function": "{content}"}), "opener"),
        (with_calls(open=None, open_pattern=r"<a>(?=\{)", content="json", transform={"function": "{content}"}), "(?="),
    ],
)
def test_what_cannot_be_written_backwards_is_refused_by_name(template: Mapping[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=f"fields.tool_calls.*{re.escape(why)}.*tool_choice") as refused:
        ResponseTemplateSyntax(Marks(), template).grammar(TOOLS, json_term, parallel=True)
    assert refused.value.param == "tool_choice"


def test_a_tool_whose_name_the_opener_cannot_have_is_refused() -> None:
    with pytest.raises(UserError, match="which 'a tool' does not fit"):
        ResponseTemplateSyntax(Marks(), TAG_CALLS).grammar([Tool("a tool")], json_term, parallel=True)


def test_a_parameter_that_tags_cannot_enforce_is_refused() -> None:
    tool = Tool("f", {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x"}}})
    with pytest.raises(UserError, match="'pattern' of a string"):
        ResponseTemplateSyntax(Marks(), TAG_CALLS).grammar([tool], json_term, parallel=True)


def test_a_value_that_would_close_its_tag_is_refused() -> None:
    tool = Tool("f", {"type": "object", "properties": {"a": {"enum": ["x", "</a>"]}}})
    with pytest.raises(UserError, match="cannot be written in this model's syntax"):
        ResponseTemplateSyntax(Marks(), TAG_CALLS).grammar([tool], json_term, parallel=True)


def test_parameters_that_are_no_plain_object_are_refused_for_tags() -> None:
    tool = Tool("f", {"type": "object", "properties": {}, "minProperties": 1})
    with pytest.raises(UserError, match="'minProperties' of its parameters"):
        ResponseTemplateSyntax(Marks(), TAG_CALLS).grammar([tool], json_term, parallel=True)
