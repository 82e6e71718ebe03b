"""Every syntax reads what its grammar writes: texts drawn at random are calls of the tools, with valid arguments.

Where the vocabulary has the syntax's marks as tokens, and where it has not.
"""

from __future__ import annotations

import json
import random
from functools import lru_cache, partial
from importlib import import_module

import jsonschema
import pytest

from halfbyte.entrypoints.answers.grammar import tools_grammar
from halfbyte.entrypoints.tool_parsers import TOOL_PARSERS
from halfbyte.entrypoints.tool_parsers.regex import Regex
from tests.unit.tool_parsers.drawn_texts import BY_NAME, TOOLS, Writing, json_term, marks_of
from tests.unit.tool_parsers.recorded import read
from tests.unit.tool_parsers.test_regex import JSON, PARAMETERS

CONFIGURED = {"regex: json": partial(Regex, config=JSON), "regex: parameters": partial(Regex, config=PARAMETERS)}
SYNTAXES = [*(name for name in TOOL_PARSERS if name not in ("hf", "regex")), *CONFIGURED]


@lru_cache(maxsize=4)
def writing(name: str, has_tokens: bool) -> Writing:
    module, _, kind = TOOL_PARSERS.get(name, "").partition(":")
    make = CONFIGURED.get(name) or getattr(import_module(module), kind)
    return Writing(make, marks_of(make) if has_tokens else ())


@pytest.mark.parametrize("parallel", [True, False], ids=["several", "one"])
@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "texts"])
@pytest.mark.parametrize("name", SYNTAXES)
def test_what_a_grammar_writes_is_read_as_valid_calls(name: str, has_tokens: bool, parallel: bool) -> None:
    pen = writing(name, has_tokens)
    draw = random.Random(f"{name} {has_tokens} {parallel}")
    seen: set[str] = set()
    tool_sets = [TOOLS, *([tool] for tool in TOOLS)]
    for tools in tool_sets:
        lark = tools_grammar(pen.syntax, pen.marks, tools, json_term, required=True, parallel=parallel)
        for _ in range(2):
            text = pen.draw(lark, draw)
            meaning = read(pen.syntax.reader(tools), [text])
            assert meaning.calls and (parallel or len(meaning.calls) == 1), text
            assert not meaning.content.strip(), (text, meaning.content)
            for called, arguments in meaning.calls:
                assert called in {tool.name for tool in tools}, text
                jsonschema.validate(json.loads(arguments), dict(BY_NAME[called].parameters))
                seen.add(called)
    assert seen == set(BY_NAME)


@pytest.mark.parametrize("name", SYNTAXES)
def test_around_calls_any_text_may_stand(name: str) -> None:
    """Where calls are not required: what is no call is content, and calls are read as ever."""
    pen = writing(name, True)
    lark = tools_grammar(pen.syntax, pen.marks, TOOLS[:2], json_term, required=False, parallel=True)
    draw = random.Random(name)
    for _ in range(5):
        meaning = read(pen.syntax.reader(TOOLS[:2]), [pen.draw(lark, draw)])
        assert all(called in ("now", "nothing") and json.loads(arguments) == {} for called, arguments in meaning.calls)
