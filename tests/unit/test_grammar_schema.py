"""JSON schemas as grammars: what can be said, what cannot, and what is refused with a pointer to the bad node."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import pytest

from halfbyte.engine.grammar import json_schema, schema_rewrites, source_forms, source_lark, source_regex, source_tags
from halfbyte.engine.grammar.json_schema import GrammarOptions, prepare
from halfbyte.engine.grammar.schema_formats import FORMATS, REFUSED_FORMATS
from halfbyte.engine.grammar.schema_reader import KEYWORDS, MAX_DEPTH, MAX_NODES, MAX_PROPERTIES
from halfbyte.errors import UserError
from tests.unit.byte_vocabulary import vocabulary


def start_of(schema: Any, **options: Any) -> llguidance.LLMatcher:
    prepared = prepare(schema, options=GrammarOptions(**options), param="schema")
    grammar = llguidance.LLMatcher.grammar_from_lark(f"start: %json {json.dumps(prepared)}")
    start = llguidance.LLMatcher(vocabulary(), grammar, log_level=0, limits=llguidance.LLParserLimits(verbose_errors=False))
    assert not start.is_error(), start.get_error()
    return start


def says(start: llguidance.LLMatcher, text: str | bytes) -> bool:
    matcher = start.deep_copy()
    tokens = list(text if isinstance(text, bytes) else text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def refusal(schema: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        prepare(schema, options=GrammarOptions(**options), param="schema")
    assert caught.value.param == "schema"
    return str(caught.value)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
UNION = {
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"propertyName": "kind"},
    "$defs": {
        "Cat": {
            "type": "object",
            "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
            "required": ["kind", "lives"],
        },
        "Dog": {
            "type": "object",
            "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}},
            "required": ["kind", "name"],
        },
    },
}
TREE = {
    "$ref": "#/$defs/T",
    "$defs": {"T": {"type": "object", "properties": {"t": {"type": "array", "items": {"$ref": "#/$defs/T"}}}, "required": ["t"]}},
}

# schema, texts that can be said, texts that cannot
CASES: list[tuple[Any, list[str], list[str]]] = [
    (
        PERSON,
        ['{"name":"é","age":1}', '{"name": "x", "age": 150, "born": "2024-02-29", "tags": ["a"]}'],
        ['{"name":"","age":1}', '{"name":"x"}'],
    ),
    (PERSON, [], ['{"name":"x","age":151}', '{"name":"x","age":1,"born":"2023-02-29"}', '{"name":"x","age":1,"more":1}']),
    (UNION, ['{"kind":"cat","lives":9}', '{"kind":"dog","name":"x"}'], ['{"kind":"cat","name":"x"}', '{"kind":"cow"}']),
    (TREE, ['{"t":[]}', '{"t":[{"t":[]},{"t":[{"t":[]}]}]}'], ['{"t":[{}]}', "{}"]),
    ({"type": "object", "required": ["a"]}, ['{"a":1}', '{"a":{"b":[]},"c":1}'], ["{}", '{"b":1}']),
    ({"type": "object"}, ["{}", '{"x":[1,{"y":null}]}'], ["[]"]),
    ({"type": "array"}, ["[]", '[1,"x"]'], ["{}"]),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 8}, ['"abcdefgh"'], ['"abcdefghi"', '"A"', '""']),
    ({"type": "string", "pattern": "b"}, ['"abc"', '"b"'], ['"ac"']),
    ({"type": "string"}, ['"\\n\\t\\"\\\\"', '"é🐲"'], ['"\n"', '"\t"', '"\x01"', '"\\u0061"']),
    ({"properties": {"a": {"type": "integer"}}}, ['{"a":1}', '{"b":"x"}'], ['{"\\u0061":"x"}', '{"a":"x"}']),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.25"], ["0", "0.0", "0.5"]),
    ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, ["-1.5", "-1.25"], ["-1", "-1.0"]),
    ({"const": 0.1}, ["0.1"], ["0.2", "0"]),
    ({"type": "number", "minimum": 0.30000000000000004, "maximum": 0.4}, ["0.35", "0.4"], ["0.3", "0.41"]),
    ({"type": "number", "minimum": 5e-324, "maximum": 0.5}, ["0.5"], ["0", "0.0"]),
    ({"type": "integer", "exclusiveMinimum": 0, "maximum": 2**63 - 1}, ["1", "9007199254740991"], ["0", "9007199254740993"]),
    ({"not": {"type": ["object", "string"]}}, ["1", "[]"], ['"x"', "{}"]),
    ({"type": "string", "not": {"enum": ["ab", "a"]}}, ['""', '"abc"', '"b"'], ['"ab"', '"a"']),
    ({"type": "integer", "not": {"const": 3}}, ["2", "4"], ["3"]),
    ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}, ["[1]", "[1,2]"], ["[]", "[2]"]),
    ({"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True}, ["[]", '["x","y"]'], ['["x","x"]']),
    ({"type": "object", "propertyNames": {"pattern": "^k"}}, ['{"k1":1}', "{}"], ['{"x":1}']),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, ['{"a":1}'], ['{"c":1}']),
    (
        {"type": "object", "dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
        ["{}", '{"a":1,"b":2}'],
        ['{"a":1}', '{"c":1}'],
    ),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ["{}", '{"a":1,"b":2}', '{"b":1}'], ['{"a":1}']),
    (
        {
            "type": "object",
            "properties": {"k": {"enum": [1, 2]}, "v": {}},
            "if": {"properties": {"k": {"const": 1}}},
            "then": {"required": ["v"]},
        },
        ['{"k":1,"v":0}', '{"k":2}'],
        ['{"k":1}'],
    ),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}, ['{"a":1}', '{"b":1}'], ["{}", '{"a":1,"b":1}']),
    (
        {
            "allOf": [{"$ref": "#/$defs/base"}],
            "properties": {"x": {}},
            "unevaluatedProperties": False,
            "$defs": {"base": {"properties": {"y": {}}}},
        },
        ['{"x":1,"y":1}', "{}"],
        ['{"z":1}'],
    ),
    ({"items": [{"type": "integer"}], "additionalItems": False, "type": "array"}, ["[1]", "[]"], ['["x"]', "[1,1]"]),
    ({"$ref": "#node", "$defs": {"n": {"$anchor": "node", "type": "null"}}}, ["null"], ["1"]),
    ({"$id": "https://x.org/a", "$ref": "https://x.org/a#/$defs/n", "$defs": {"n": {"type": "null"}}}, ["null"], ["1"]),
    (
        {"enum": [None, True, 1.5, "x", [1, {"a": "b"}], {}]},
        ["null", "true", "1.5", '"x"', '[1,{"a":"b"}]', "{}"],
        ["false", "1", "[]"],
    ),
    (True, ["1", '{"a":[null]}'], ["", "{} "]),
]


@pytest.mark.parametrize(("schema", "sayable", "unsayable"), CASES)
def test_what_is_valid_can_be_said_and_nothing_else(schema: Any, sayable: list[str], unsayable: list[str]) -> None:
    start = start_of(schema)
    assert [text for text in sayable if not says(start, text)] == []
    assert [text for text in unsayable if says(start, text)] == []


def test_a_schema_may_come_as_text() -> None:
    assert says(start_of('{"type": "null"}'), "null")


def nested(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return schema


def test_schemas_nest_as_deep_as_is_said() -> None:
    start = start_of(nested(MAX_DEPTH))
    assert says(start, '{"x":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH)
    assert not says(start, '{"x":' * MAX_DEPTH + '"s"' + "}" * MAX_DEPTH)
    assert f"nested more than {MAX_DEPTH} deep" in refusal(nested(MAX_DEPTH + 1))


@pytest.mark.parametrize("levels", [1_000, 60_000])
def test_schemas_that_are_far_too_deep_are_refused_before_anything_recurses(levels: int) -> None:
    deep: Any = {}
    for _ in range(levels):
        deep = {"items": deep}
    assert "nested too deep" in refusal(deep)
    assert "nested too deep" in refusal('{"items":' * levels + "{}" + "}" * levels)


def chain(length: int) -> Any:
    links = {f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {"type": "null"}}}


def test_a_long_chain_of_references_is_refused_before_the_library_follows_it() -> None:
    assert says(start_of(chain(200)), '{"x":{"x":{}}}')
    assert "too many schemas refer to one another" in refusal(chain(900))


def doubling(key: str, number: int = 30, **also: Any) -> Any:
    """Each definition leads twice to the next."""

    def twice(i: int) -> Any:
        next_one = {"$ref": f"#/$defs/d{i + 1}"}
        return {"x": next_one, "y": next_one} if key == "properties" else [next_one, next_one]

    links = {f"d{i}": {key: twice(i)} for i in range(number)}
    return {**also, "$defs": links | {f"d{number}": {"type": "integer"}}}


@pytest.mark.parametrize("key", ["properties", "allOf", "anyOf", "oneOf"])
@pytest.mark.parametrize("use", ["not", "oneOf", "unevaluatedProperties", "uniqueItems", "if"])
def test_references_that_double_take_no_time(key: str, use: str) -> None:
    first = {"$ref": "#/$defs/d0"}
    also = (
        {"oneOf": [first, {"$ref": "#/$defs/d1"}]}
        if use == "oneOf"
        else {**first, use: False}
        if use.startswith("un")
        else {use: first}
    )
    schema = doubling(key, **also, then=False)
    began = time.process_time()
    with contextlib.suppress(UserError):
        prepare(schema, options=GrammarOptions(disable_additional_properties=True), param="schema")
    assert time.process_time() - began < 5


REFUSED: list[tuple[Any, str]] = [
    ({"properties": {"foo": "bar"}}, "#/properties/foo: a schema must be an object or a boolean, got 'bar'"),
    ([], "#: a schema must be an object or a boolean"),
    ("{", "is not a JSON schema"),
    ({"type": "str"}, "#/type: must be one or several of null"),
    ({"items": {"type": []}}, "#/items/type: must be"),
    ({"$ref": "#/$defs/no"}, "#/$ref: '#/$defs/no' leads nowhere"),
    ({"properties": {"a/b": {"$ref": "https://x.org/y"}}}, "#/properties/a~1b/$ref: 'https://x.org/y' leads out of this schema"),
    ({"$ref": "#"}, "#: its references lead back to it"),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
        "lead back to it",
    ),
    ({"pattern": "("}, "#/pattern: the regular expression '(' cannot be used: a group is not closed"),
    ({"pattern": "a{1,1000}{1,1000}"}, "#/pattern"),
    ({"pattern": "(a{1,1000}){1,1000}"}, "symbols when its counted repeats are written out"),
    ({"pattern": "(?=a)"}, "no lookaround"),
    ({"patternProperties": {"[": {}}}, "#/patternProperties: the regular expression"),
    ({"minimum": "1"}, "#/minimum: must be a number"),
    ({"minLength": -1}, "#/minLength: must be a whole number"),
    ({"minLength": True}, "#/minLength: must be a whole number"),
    ({"minimum": float("nan")}, "#/minimum: must be a number"),
    ({"multipleOf": 0}, "#/multipleOf: must be a number above 0"),
    ({"required": "a"}, "#/required: must be an array of texts"),
    ({"enum": []}, "#/enum: must be an array of values, not empty"),
    ({"const": float("inf")}, "#/const"),
    ({"const": 2**53}, "#/const: 9007199254740992 is beyond"),
    ({"minimum": 1e300}, "#/minimum"),
    ({"const": -3.9166138568957076}, "#/const: -3.9166138568957076 has more than 15 digits"),
    ({"multipleOf": 1e-300}, "#/multipleOf"),
    ({"const": "a\x00b"}, "control character"),
    ({"anyOf": []}, "#/anyOf: must be an array of schemas and not empty"),
    ({"items": [{}], "prefixItems": [{}]}, "#/items: must be a schema beside prefixItems"),
    ({"dependencies": {"a": ["b"]}, "dependentRequired": {"a": ["c"]}}, "#/dependencies/a: comes twice"),
    ({"propertyNames": {"enum": ["a"], "pattern": "b"}}, "propertyNames is enforced with pattern"),
    (
        {"type": "object", "minProperties": 2, "patternProperties": {"^a": {}}, "additionalProperties": False},
        "#/minProperties: more than one member",
    ),
    ({"patternProperties": {"^a": {}, "^\\x61": {}}}, "#/patternProperties: two patterns are the same"),
    ({"$ref": "http://[::1"}, "leads out of this schema"),
    ({"contains": {}, "minContains": 10**9}, "minContains is 1000000000, the limit is 64"),
    ({"minimum": 10**4000}, "#/minimum"),
    ({"x-guidance": {"lenient": True}}, "#: x-guidance is not supported"),
    ({"$schema": "http://json-schema.org/draft-04/schema#"}, "#: $schema is"),
    ({"$recursiveRef": "#"}, "$recursiveRef is not supported"),
    (False, "no value satisfies it"),
    ({"type": "string", "format": "regex"}, "format 'regex' cannot be enforced"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems is enforced only where"),
    ({"not": {"pattern": "a"}}, "not is not enforced here: that needs the opposite of pattern"),
    ({"type": "object", "minProperties": 2}, "#/minProperties: more than one member"),
    ({"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}}, "#/properties: has 1001 members"),
    ({"anyOf": [{}] * (MAX_NODES + 1)}, "holds more than 10000 schemas"),
    (
        {
            "$defs": {"a": {"properties": {"k": {"$ref": "#/$defs/a", "unevaluatedProperties": False}}}},
            "$ref": "#/$defs/a",
            "unevaluatedProperties": False,
        },
        "nested",
    ),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED)
def test_what_is_wrong_is_refused_with_its_place(schema: Any, said: str) -> None:
    message = refusal(schema)
    assert said in message and len(message) < 500 and "\n" not in message


def test_whitespace_is_bounded() -> None:
    start = start_of({"type": "object", "properties": {"a": {"type": "array"}}})
    for text in ('{"a":[1,2]}', '{ "a" : [ 1 , 2 ] }', '{\n  "a": [\n\t1\n  ]\n}', "{ }", "{\n" + " " * 20 + '"a":[]}'):
        assert says(start, text), text
    for text in (
        '{  "a":[]}',
        '{"a":  []}',
        '{\n\n"a":[]}',
        '{ \n"a":[]}',
        "{\n" + " " * 21 + '"a":[]}',
        ' {"a":[]}',
        '{"a":[]} ',
        '{"a":[]}\n',
    ):
        assert not says(start, text), text


def test_whitespace_can_be_forbidden() -> None:
    start = start_of({"type": "array"}, disable_any_whitespace=True)
    assert says(start, '[1,{"a":2}]') and not says(start, "[1, 2]") and not says(start, "[ ]")


@pytest.mark.parametrize(
    ("pattern", "sayable", "unsayable"), [(" ?", '{ "a": 1}', '{  "a":1}'), (r"[\s]{0,3}", '{\n\t "a":1}', '{    "a":1}')]
)
def test_a_pattern_of_whitespace_is_kept(pattern: str, sayable: str, unsayable: str) -> None:
    start = start_of({"type": "object"}, whitespace_pattern=pattern)
    assert says(start, sayable) and says(start, '{"a":1}') and not says(start, unsayable)


@pytest.mark.parametrize("pattern", ["x", r"[^a]", ".", r"\S", "[[ ]", "[ -a]", "( ", r" {1,99999}{1,99999}", r"[\s"])
def test_a_pattern_of_anything_but_whitespace_is_refused(pattern: str) -> None:
    assert "whitespace_pattern" in refusal({}, whitespace_pattern=pattern)


def test_objects_can_be_closed() -> None:
    closed = {"disable_additional_properties": True}
    start = start_of({"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}, **closed)
    assert says(start, '{"a":{"b":1}}') and not says(start, '{"c":1}') and not says(start, '{"a":{"c":1}}')
    assert says(start_of({"type": "object"}, **closed), '{"any":1}')
    assert says(start_of({"properties": {"a": {}}, "additionalProperties": True}, **closed), '{"any":1}')
    joined = {"allOf": [{"$ref": "#/$defs/b"}], "properties": {"x": {}}, "$defs": {"b": {"properties": {"y": {}}}}}
    assert says(start_of(joined, **closed), '{"x":1,"y":1}') and not says(start_of(joined, **closed), '{"z":1}')
    assert says(start_of(TREE, **closed), '{"t":[{"t":[]}]}') and not says(start_of(TREE, **closed), '{"t":[{"t":[],"u":1}]}')


def test_the_schema_of_the_request_stays_as_it_is() -> None:
    before = json.dumps(UNION)
    prepare(UNION, options=GrammarOptions(disable_additional_properties=True), param="schema")
    assert json.dumps(UNION) == before


def section(title: str) -> str:
    text = (Path(__file__).resolve().parents[2] / "docs/structured_outputs.md").read_text(encoding="utf-8")
    return re.split(r"^##+ ", text.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.M)[0]


def first_cells(title: str) -> set[str]:
    return {name for row in re.findall(r"^\| (`[^|]*) \|", section(title), re.M) for name in re.findall(r"`([^`]+)`", row)}


def test_the_page_names_every_keyword_and_format() -> None:
    assert first_cells("JSON schemas: what is enforced") == set(KEYWORDS)
    assert first_cells("Formats") == {*FORMATS, *REFUSED_FORMATS}
    assert first_cells("Structural tags") == set(source_tags.KINDS)


def test_the_page_states_the_limits() -> None:
    stated = [int(number) for number in re.findall(r"\| (\d+) \|", section("Limits"))]
    schema = [MAX_DEPTH, MAX_NODES, MAX_PROPERTIES, schema_rewrites.MAX_OPTIONS, json_schema.MAX_TEXT_BYTES]
    regex = [source_regex.MAX_CHARS, source_regex.MAX_DEPTH, source_regex.MAX_SYMBOLS]
    grammar = [source_lark.MAX_CHARS, source_lark.MAX_RULES, source_lark.MAX_DEPTH, source_tags.MAX_RULES]
    assert stated == [*schema, *regex, source_forms.MAX_CHOICE_CHARS, *grammar]


class Random:
    """Random schemas, and random answers that their grammars allow."""

    values = (None, True, False, 0, 1, -1, 1.5, 10, "a", "ab", "", [], [1], {}, {"a": 1}, {"b": "a"})

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def schema(self, depth: int) -> Any:
        choose, number = self.chance.choice, self.chance.random
        if number() < 0.05:
            return choose([True, False])
        names = self.chance.sample(list(self.keywords(depth)), choose([1, 2, 2, 3, 4]))
        found = {name: make() for name, make in ((name, self.keywords(depth)[name]) for name in names)}
        return (
            {"type": choose(["object", "object", "array", "string", "number", "integer"]), **found} if number() < 0.7 else found
        )

    def keywords(self, depth: int) -> dict[str, Any]:
        choose, sample = self.chance.choice, self.chance.sample
        plain = {
            "enum": lambda: sample(self.values, 3),
            "const": lambda: choose(self.values),
            "minimum": lambda: choose([0, -3, 1.5, 0.1]),
            "exclusiveMinimum": lambda: choose([0, -1, 1]),
            "exclusiveMaximum": lambda: choose([1, 0.5, 5]),
            "multipleOf": lambda: choose([2, 0.5]),
            "pattern": lambda: choose(["^a", "b$", "^[ab]+$", "^.{1,3}$", "^[^a]*$"]),
            "minLength": lambda: choose([0, 1, 2]),
            "maxLength": lambda: choose([1, 2, 3]),
            "required": lambda: sample("abc", 1),
            "minItems": lambda: choose([0, 1, 2]),
            "maxItems": lambda: choose([1, 2, 3]),
            "maxProperties": lambda: choose([1, 2]),
            "dependentRequired": lambda: {choose("abc"): sample("abc", 1)},
            "propertyNames": lambda: choose([{"pattern": "^a"}, {"enum": ["a", "b"]}, {"maxLength": 1}]),
        }
        if depth == 0:
            return plain

        def inner() -> Any:
            return self.schema(depth - 1)

        one = (
            "additionalProperties",
            "items",
            "contains",
            "not",
            "if",
            "then",
            "else",
            "unevaluatedProperties",
            "unevaluatedItems",
        )
        several = {name: lambda: [inner(), inner()] for name in ("allOf", "anyOf", "oneOf", "prefixItems")}
        named = {name: lambda: {choose("abc"): inner(), "a": inner()} for name in ("properties", "dependentSchemas")}
        return (
            plain | dict.fromkeys(one, inner) | several | named | {"patternProperties": lambda: {choose(["^a", "c$"]): inner()}}
        )

    def answers(self, start: llguidance.LLMatcher, number: int) -> Iterator[bytes]:
        for _ in range(number):
            matcher, answer = start.deep_copy(), bytearray()
            while len(answer) < 80 and not matcher.is_stopped():
                if matcher.is_accepting() and self.chance.random() < 0.35:
                    break
                mask = int.from_bytes(matcher.compute_bitmask(), "little")
                allowed = [byte for byte in range(256) if mask >> byte & 1]
                usual = [
                    byte for byte in allowed if chr(byte) in '{}[]":,abc015.-tfn ' and (len(answer) < 40 or chr(byte) in '}]"')
                ]
                if not allowed or not matcher.consume_token(byte := self.chance.choice(usual or allowed)):
                    break
                answer.append(byte)
            if matcher.is_accepting():
                yield bytes(answer)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_grammar_says_is_valid(seed: int) -> None:
    maker, num_answers = Random(seed), 0
    for _ in range(60):
        schema = maker.schema(2)
        try:
            start = start_of(schema)
        except (UserError, AssertionError):
            continue
        validator = jsonschema.Draft202012Validator(schema)
        for answer in maker.answers(start, 8):
            num_answers += 1
            assert validator.is_valid(json.loads(answer)), (schema, answer)
    assert num_answers > 100
