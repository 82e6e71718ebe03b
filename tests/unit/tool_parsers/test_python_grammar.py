"""Schemas as grammars of Python's literals: what they let through, what is read back, what is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from halfbyte.engine.grammar.compile import GrammarCompiler
from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.grammar import tools_grammar
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers.pythonic import Lfm2, Marked, Olmo3, Pythonic
from halfbyte.errors import UserError
from tests.unit.tool_parsers.recorded import read
from tests.unit.tool_parsers.token_marks import EOS, tokenizer_with

TOKENIZER = tokenizer_with("<|tool_call_start|>", "<|tool_call_end|>")
EOS_ID = TOKENIZER.token_id(EOS)
assert EOS_ID is not None
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, [EOS_ID])


def json_term(schema: Any) -> str:
    return "%json " + json.dumps(schema)


def grammar(*tools: Tool, syntax: type[Pythonic | Marked] = Pythonic, parallel: bool = False) -> str:
    marks = Marks(TOKENIZER)
    return tools_grammar(syntax(marks), marks, tools, json_term, required=True, parallel=parallel)


def allows(lark: str, text: str) -> bool:
    """Whether an answer may be `text`, the whole of it."""
    matcher = COMPILER.matcher(lark)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode(text, False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def of_value(schema: Any, literal: str) -> bool:
    tool = Tool("f", {"type": "object", "properties": {"a": schema}, "required": ["a"]})
    return allows(grammar(tool), f"[f(a={literal})]")


@pytest.mark.parametrize(
    ("schema", "allowed", "barred"),
    [
        ({"type": "boolean"}, ["True", "False"], ["true", "1", "None"]),
        ({"type": ["integer", "null"], "minimum": 3}, ["None", "3", "10"], ["2", "null", "'a'"]),
        ({"type": "string", "pattern": "^[a-z]+$"}, ['"abc"'], ['"A"', '""']),
        (
            {"enum": ["x", 'q"', 1, None, True, {"k": [False]}]},
            ['"x"', '"q\\""', "1", "None", "True", '{"k": [False]}'],
            ["x", "2", "true"],
        ),
        ({"enum": ["x", 1], "type": "string"}, ['"x"'], ["1"]),
        ({"const": None}, ["None"], ["null"]),
        ({"type": "array", "items": {"type": "boolean"}}, ["[]", "[True, False]"], ["[1]", "[True,]", "(True, False)"]),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
            ["[1, 2]", "[1, 2, 3]"],
            ["[]", "[1]", "[1, 2, 3, 4]"],
        ),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "null"}}]}, ['"a"', "[None]"], ["None", "[1]"]),
        (
            {"type": "object", "properties": {"o": {"type": "boolean"}, "n": {"type": "integer"}, "p": {}}, "required": ["n"]},
            ['{"n": 1}', '{"n": 1, "o": True}', '{"n": 1, "p": [None]}', '{"n": 1, "o": False, "p": {"x": "y"}}'],
            ["{}", '{"o": True}', '{"n": 1, "z": 1}', '{"n": 1, }'],
        ),
        (
            {"type": "object", "additionalProperties": {"type": "boolean"}},
            ["{}", '{"x y": True, "z": False}'],
            ['{"x": 1}', "{x: True}"],
        ),
        ({"type": "object", "additionalProperties": False}, ["{}"], ['{"x": 1}']),
        (True, ["None", "[1, {}]", '{"a": (1)}'.replace("(1)", "[1.5]")], ["null", "f()"]),
    ],
)
def test_a_schema_lets_its_values_through_and_no_others(schema: Any, allowed: list[str], barred: list[str]) -> None:
    assert {literal: of_value(schema, literal) for literal in allowed} == dict.fromkeys(allowed, True)
    assert {literal: of_value(schema, literal) for literal in barred} == dict.fromkeys(barred, False)


def test_required_parameters_come_first_then_any_of_the_others_in_their_order() -> None:
    number = {"type": "integer"}
    some = grammar(Tool("f", {"type": "object", "properties": {"a": number, "b": number, "c": number}, "required": ["c"]}))
    assert [allows(some, f"[f({inner})]") for inner in ("c=1", "c=1, a=2", "c=1, b=2", "c=1, a=2, b=3")] == [True] * 4
    assert [allows(some, f"[f({inner})]") for inner in ("", "a=1", "a=1, c=2", "c=1, b=2, a=3", "c=1, d=1")] == [False] * 5
    none = grammar(Tool("f", {"type": "object", "properties": {"a": number, "b": number, "c": number}}))
    assert [allows(none, f"[f({inner})]") for inner in ("", "a=1", "b=1", "c=1", "a=1, c=2", "a=1, b=1, c=1")] == [True] * 6
    assert [allows(none, f"[f({inner})]") for inner in ("b=1, a=1", "a=1, a=1", ", a=1", "a=1,")] == [False] * 4


def test_schemas_may_refer_to_each_other_and_to_themselves() -> None:
    tree = {
        "type": "object",
        "properties": {"leaf": {"type": "boolean"}, "more": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    }
    tool = Tool(
        "f", {"type": "object", "properties": {"t": {"$ref": "#/$defs/tree"}}, "required": ["t"], "$defs": {"tree": tree}}
    )
    assert allows(grammar(tool), '[f(t={"leaf": True, "more": [{}, {"more": [{"leaf": False}]}]})]')
    assert not allows(grammar(tool), '[f(t={"more": [{"leaf": 1}]})]')


def test_one_call_unless_parallel_in_the_layout_of_the_family() -> None:
    tools = (Tool("f"), Tool("g"))
    assert allows(grammar(*tools), "[g()]") and not allows(grammar(*tools), "[f(), g()]")
    assert allows(grammar(*tools, parallel=True), "[f(), g(), f()]") and not allows(grammar(*tools, parallel=True), "[f(),g()]")
    lfm2, olmo3 = (grammar(*tools, syntax=syntax, parallel=True) for syntax in (Lfm2, Olmo3))
    assert allows(lfm2, "<|tool_call_start|>[f(), g()]<|tool_call_end|>")
    assert allows(olmo3, "<function_calls>f()\ng()</function_calls>")


def test_olmo3_writes_the_words_of_json() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": ["boolean", "null"]}, "b": {"enum": [[None, True]]}},
        "required": ["a", "b"],
    }
    lark = grammar(Tool("f", schema), syntax=Olmo3)
    assert allows(lark, "<function_calls>f(a=null, b=[null, true])</function_calls>")
    assert not allows(lark, "<function_calls>f(a=None, b=[None, True])</function_calls>")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}]}}}, "oneOf"),
        ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties"),
        ({"type": "object", "properties": {"a": {"anyOf": [{}], "minLength": 1}}}, "minLength"),
        ({"type": "object", "properties": {"a": {"minimum": 1}}}, "minimum"),
        ({"type": "object", "properties": {"a b": {}}}, "'a b'"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "the type 'text'"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, "leads nowhere"),
        ({"type": "object", "properties": {"a": {"$ref": "http://x/y"}}}, "leads nowhere"),
        ({"type": "object", "properties": {"a": {"enum": [1], "type": "string"}}}, "without a value"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "False"),
        ({"anyOf": [{"type": "object"}]}, "anyOf"),
        ({"type": "array"}, "no object"),
    ],
)
def test_what_cannot_be_held_to_is_refused_by_name_with_another_way(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        Pythonic(Marks()).grammar([Tool("f", parameters)], json_term, parallel=True)
    assert raised.value.param == "tools" and "tool call parser that writes JSON" in str(raised.value)


def test_a_schema_of_endless_depth_is_refused() -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(100):
        schema = {"anyOf": [schema]}
    with pytest.raises(UserError, match="inside each other"):
        Pythonic(Marks()).grammar([Tool("f", {"type": "object", "properties": {"a": schema}})], json_term, parallel=True)


PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 6},
        "flag": {"type": ["boolean", "null"]},
        "kind": {"enum": ["a'b", 'c"d', None, 2]},
        "many": {
            "type": "array",
            "maxItems": 2,
            "items": {"type": "object", "properties": {"é": {"type": "number"}}, "required": ["é"]},
        },
    },
    "required": ["text", "flag"],
}


@pytest.mark.parametrize("seed", range(12))
def test_what_is_drawn_from_the_grammar_is_read_back_as_valid_arguments(seed: int) -> None:
    tool, draw = Tool("f", PARAMETERS), random.Random(seed)
    matcher = COMPILER.matcher(grammar(tool))
    ids: list[int] = []
    while not matcher.is_stopped() and len(ids) < 3000:
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        closers = [i for i in allowed if TOKENIZER.token_bytes(int(i)) in (b'"', b",", b"]", b"}", b")")]
        ids.append(int(draw.choice(closers if closers and draw.random() < 0.5 else list(allowed))))
        matcher.consume_token(ids[-1])
    text = TOKENIZER.decode(ids)
    ((name, arguments),) = read(Pythonic(Marks()).reader([tool]), [text]).calls
    jsonschema.validate(json.loads(arguments), PARAMETERS)
    assert name == "f"
