"""docs/tool_calls.md says what there is: every parser, and an example of a syntax that works as the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers import TOOL_PARSERS
from halfbyte.entrypoints.tool_parsers.head_patterns import MAX_HEAD_CHARS
from halfbyte.entrypoints.tool_parsers.regex import Regex
from tests.unit.tool_parsers.recorded import read

PAGE = (Path(__file__).parents[3] / "docs" / "tool_calls.md").read_text()


def test_the_table_has_every_parser_in_order() -> None:
    table = PAGE.split("## Parsers")[1].split("## ")[0]
    assert [name.partition(":")[0] for name in re.findall(r"^\| `([^`]+)` \|", table, re.M)] == list(TOOL_PARSERS)
    assert list(TOOL_PARSERS) == sorted(TOOL_PARSERS)


def test_the_example_of_a_syntax_reads_the_example_of_an_answer() -> None:
    section = PAGE.split("## A syntax of your own")[1]
    config, answer = re.findall(r"```(?:yaml)?\n(.*?)```", section, re.S)
    tool = Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
    meaning = read(Regex(Marks(), yaml.safe_load(config)).reader([tool]), [answer])
    ((name, arguments),) = meaning.calls
    assert (meaning.content, name) == ("", "get_weather")
    assert f"`{arguments}`" in section and json.loads(arguments) == {"city": "Oslo", "days": 3}
    assert f"at most {MAX_HEAD_CHARS} characters" in section
