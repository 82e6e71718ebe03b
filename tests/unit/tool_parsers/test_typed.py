"""What a parameter's text means by its schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.tool_parsers.typed import ArgumentsWriter, as_json, types_of

ROOT = {
    "$defs": {
        "Day": {"type": "integer"},
        "Maybe": {"anyOf": [{"$ref": "#/$defs/Day"}, {"$ref": "#/$defs/Maybe"}, {"type": "null"}]},
    },
    "properties": {"a/b": {"type": "array"}},
}


def types(schema: Any) -> tuple[str, ...]:
    return types_of(Tool("f", {**ROOT, "properties": {**ROOT["properties"], "x": schema}}), "x")


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, ("string",)),
        ({"type": ["string", "null"]}, ("string", "null")),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ("integer", "null")),
        ({"oneOf": [{"type": "number"}, {"enum": ["auto"]}]}, ("number", "string")),
        ({"allOf": [{"type": "integer"}]}, ("integer",)),
        ({"allOf": [{"minimum": 1}, {"type": "integer"}]}, ("integer",)),
        ({"$ref": "#/$defs/Day"}, ("integer",)),
        ({"$ref": "#/$defs/Maybe"}, ("integer", "null")),
        ({"$ref": "#/properties/a~1b"}, ("array",)),
        ({"type": "integer", "nullable": True}, ("integer", "null")),
        ({"enum": [1, 2.5, "a", None, True, [], {}]}, ("integer", "number", "string", "null", "boolean", "array", "object")),
        ({"const": "a"}, ("string",)),
        ({"properties": {}}, ("object",)),
        ({"items": {}}, ("array",)),
        ({}, ()),
        (True, ()),
        ({"type": "money"}, ()),
        ({"enum": 5}, ()),
        ({"$ref": "#/nowhere"}, ()),
        ({"$ref": "https://example.com/x"}, ()),
        ({"anyOf": []}, ()),
    ],
)
def test_the_types_of_a_schema(schema: Any, expected: tuple[str, ...]) -> None:
    assert types(schema) == expected


def test_nothing_is_known_of_an_unknown_parameter_or_tool() -> None:
    assert types_of(None, "x") == types_of(Tool("f"), "x") == types_of(Tool("f", {"properties": 3}), "x") == ()


def test_a_schema_whose_references_multiply_is_taken_apart_at_once() -> None:
    doubling = {f"D{n}": {"anyOf": [{"$ref": f"#/$defs/D{n + 1}"}] * 2} for n in range(60)}
    root = {"$defs": {**doubling, "D60": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/D0"}}}
    assert types_of(Tool("f", root), "x") in {("integer",), ()}


@pytest.mark.parametrize(
    ("text", "kinds", "expected"),
    [
        # whole numbers and numbers
        ("5", ["integer"], "5"),
        (" -5\n", ["integer"], "-5"),
        ("+05", ["integer"], "5"),
        ("5.0", ["integer"], "5"),
        ("5.5", ["integer"], '"5.5"'),
        ("1_000", ["integer"], '"1_000"'),
        ("٣", ["integer"], '"٣"'),
        ("9" * 5000, ["integer"], f'"{"9" * 5000}"'),
        ("5", ["number"], "5"),
        ("1.50", ["number"], "1.50"),
        ("-2e-3", ["number"], "-2e-3"),
        (".5", ["number"], "0.5"),
        ("NaN", ["number"], '"NaN"'),
        ("inf", ["number"], '"inf"'),
        ("-Infinity", ["number"], '"-Infinity"'),
        ("1e999", ["number"], "1e999"),
        (".1e999", ["number"], '".1e999"'),
        ("1_0.5", ["number"], '"1_0.5"'),
        ("1.0", ["integer", "number"], "1.0"),
        # booleans and null
        ("true", ["boolean"], "true"),
        ("True", ["boolean"], "true"),
        ("FALSE", ["boolean"], "false"),
        ("1", ["boolean"], "true"),
        ("0", ["boolean"], "false"),
        ("yes", ["boolean"], '"yes"'),
        ("1", ["boolean", "integer"], "1"),
        ("null", ["integer", "null"], "null"),
        ("None", ["integer", "null"], "null"),
        ("None", ["integer"], "null"),
        ("", ["integer"], '""'),
        # a string among the types
        ("null", ["string", "null"], "null"),
        ("None", ["string", "null"], "null"),
        (" null", ["string", "null"], '" null"'),
        ("5", ["string", "integer"], "5"),
        ("5 ", ["string", "integer"], '"5 "'),
        ("five", ["string", "integer"], '"five"'),
        ("null", ["string", "integer"], '"null"'),
        ("{}", ["string", "object"], "{}"),
        # objects and arrays
        ('{"a": [1.10, "\\u00e9"]}', ["object"], '{"a": [1.10, "\\u00e9"]}'),
        ("\n[\n  1\n]\n", ["array"], "[\n  1\n]"),
        ('{"a": "x\ny"}', ["object"], '{"a": "x\\ny"}'),
        ("{'a': 1, 'b': [True, None, (1,)], 2: 'é'}", ["object"], '{"a": 1, "b": [true, null, [1]], "2": "é"}'),
        ("('a', 'b')", ["array"], '["a", "b"]'),
        ("['\\d']", ["array"], '["\\\\d"]'),
        ("[NaN]", ["array"], '"[NaN]"'),
        ("[1e999]", ["array"], "[1e999]"),
        ("[.1, 1e999,]", ["array"], '"[.1, 1e999,]"'),
        ("{1, 2}", ["object"], '"{1, 2}"'),
        ("{'a': open('x')}", ["object"], "\"{'a': open('x')}\""),
        ("{'a': b'x'}", ["object"], "\"{'a': b'x'}\""),
        ("[1]", ["object"], '"[1]"'),
        ("[" * 5000, ["array"], f'"{"[" * 5000}"'),
        (f"['{'a' * 10_000}']", ["array"], f"\"['{'a' * 10_000}']\""),
    ],
)
def test_what_a_text_means(text: str, kinds: list[str], expected: str) -> None:
    assert as_json(text, tuple(kinds)) == expected
    json.loads(expected)


def write(tool: Tool | None, *parameters: tuple[str, list[str]], closed: bool = True) -> list[str]:
    told: list[str] = []
    writer = ArgumentsWriter(tool, told.append)
    for name, pieces in parameters:
        writer.begin(name)
        for piece in pieces:
            writer.feed(piece)
        writer.end()
    if closed:
        writer.close()
    return told


def test_a_string_is_told_as_it_comes_and_other_values_when_they_are_complete() -> None:
    tool = Tool("f", {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}})
    told = write(tool, ("s", [' "a', "\n", "é\\ "]), ("n", ["1", "2 "]), ("unknown", ["3"]))
    assert told == ['{"s": ', '"', ' \\"a', "\\n", "é\\\\ ", '"', ', "n": ', "12", ', "unknown": ', '"', "3", '"', "}"]


def test_no_parameters_are_an_empty_object() -> None:
    assert write(None) == ["{}"]


def test_what_the_model_says_of_a_type_goes_before_the_schema() -> None:
    told: list[str] = []
    writer = ArgumentsWriter(Tool("f", {"properties": {"s": {"type": "string"}}}), told.append)
    writer.begin("s", ("integer", "null"))
    writer.feed("5")
    writer.end()
    assert "".join(told) == '{"s": 5'


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (['{"a": "b', "c"], True),
        ([" ", "\n", '["'], True),
        (["[\"it's", "\\", '"', "x"], True),
        (["[\"it's", "\\\\", '"', "x"], False),
        (["{'say \"hi", "': 1"], False),
        (['5"'], False),
    ],
)
def test_a_list_or_an_object_is_in_quotes_or_not(pieces: list[str], expected: bool) -> None:
    writer = ArgumentsWriter(None, lambda piece: None)
    for name, types, is_held in (("a", ("object", "array"), True), ("b", ("object", "string"), False), ("c", None, False)):
        writer.begin(name, types)
        for piece in pieces:
            writer.feed(piece)
        assert writer.is_in_quotes is (expected and is_held), name


def test_all_that_is_required_is_there_or_not() -> None:
    tool = Tool("f", {"properties": {"a": {}, "b": {}}, "required": ["a"]})
    writer = ArgumentsWriter(tool, lambda piece: None)
    assert not writer.has_required
    writer.begin("a")
    assert writer.has_required
    assert not ArgumentsWriter(None, lambda piece: None).has_required
