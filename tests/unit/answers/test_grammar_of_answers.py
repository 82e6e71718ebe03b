"""Grammars of whole answers: calls, text around them, or something else, with marks that are texts, tokens, special tokens."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest

from halfbyte.engine.grammar.compile import GrammarCompiler
from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.grammar import tools_grammar
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.openai.constraints import loose_schema
from halfbyte.entrypoints.tool_parsers import TOOL_PARSERS
from halfbyte.entrypoints.tool_parsers.hermes import Hermes
from halfbyte.entrypoints.tool_parsers.json_answers import JsonAnswer
from tests.unit.tool_parsers.token_marks import EOS, tokenizer_with

MARKS = ("<tool_call>", "</tool_call>")


def json_term(schema: Any) -> str:
    return f"%json {json.dumps(schema)}"


TOOLS = [Tool("f", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}), Tool("now")]
ONE = '<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>'
TWO = f'{ONE}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
WRONG = ONE.replace('"f"', '"h"')
TOKENIZERS = {
    "texts": tokenizer_with(),
    "tokens": tokenizer_with(*MARKS, special=False),
    "special tokens": tokenizer_with(*MARKS),
}


def allowed(tokenizer: Any, grammar: str, text: str) -> bool:
    matcher = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.token_id(EOS)]).matcher(grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("shape", "yes", "no"),
    [
        ({"required": True, "parallel": True}, [ONE, TWO], [WRONG, "Hi", "", f"Hi {ONE}", f"{ONE} Hi"]),
        ({"required": True, "parallel": False}, [ONE], [TWO, WRONG, "Hi"]),
        ({"required": False, "parallel": True}, [ONE, TWO, "Hi", "", f"Hi {ONE}", f"{ONE} Hi {TWO}"], [WRONG, f"Hi {WRONG}"]),
        ({"required": False, "parallel": False}, [ONE, "Hi", f"Hi {ONE} Hi"], [TWO, WRONG, f"{ONE} {WRONG}"]),
        ({"required": False, "parallel": True, "or_else": json_term({"type": "integer"})}, [TWO, "12"], ["Hi", WRONG]),
    ],
    ids=str,
)  # fmt: skip
def test_calls_and_what_may_be_around_them(kind: str, shape: dict[str, Any], yes: list[str], no: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]
    marks = Marks(tokenizer)
    grammar = tools_grammar(Hermes(marks), marks, TOOLS, json_term, **shape)
    assert [text for text in yes if not allowed(tokenizer, grammar, text)] == []
    assert [text for text in no if allowed(tokenizer, grammar, text)] == []


def test_calls_that_only_begin_an_answer() -> None:
    tokenizer = TOKENIZERS["texts"]
    marks = Marks(tokenizer)
    grammar = tools_grammar(JsonAnswer(marks), marks, TOOLS, json_term, required=False, parallel=True)
    call = '[{"name": "f", "arguments": {"x": 3}}]'
    yes, no = [call, "Hi", "", f"Hi {call}"], ['[{"name": "h", "arguments": {}}]', "{", call[1:-1], f"```json\n{call}"]
    assert [text for text in yes if not allowed(tokenizer, grammar, text)] == []
    assert [text for text in no if allowed(tokenizer, grammar, text)] == []


@pytest.mark.parametrize("name", [name for name in TOOL_PARSERS if name not in ("hf", "regex")])
def test_every_syntax_takes_tools_that_are_not_strict(name: str) -> None:
    """Of a schema that it could not enforce, names and simple types are left: enough to keep an answer to one call."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"oneOf": [{"not": {}}, True]}, "c": {"type": ["object", "null"]}},
        "patternProperties": {"x": {}},
        "required": ["a"],
    }
    tokenizer = TOKENIZERS["texts"]
    marks = Marks()
    module, _, kind = TOOL_PARSERS[name].partition(":")
    syntax = getattr(import_module(module), kind)(marks)
    tools = [Tool("f", loose_schema(schema)), Tool("g", loose_schema({"type": "object"}))]
    grammar = tools_grammar(syntax, marks, tools, json_term, required=False, parallel=False)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.token_id(EOS)])
    compiler.check(grammar, "tools")
