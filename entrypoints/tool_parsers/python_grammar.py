"""Lark rules for calls in Python's syntax: a JSON schema, written with Python's literals.

Numbers and strings are written alike in both languages, so JSON's own term writes them, with all that a schema may ask of them.
True, False, None and what may hold these are written here. Knows JSON schemas and Lark; knows no mark.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.tool_parsers.grammars import literal, schema_of
from halfbyte.entrypoints.tool_parsers.protocol import JsonTerm
from halfbyte.entrypoints.tool_parsers.python_calls import is_name
from halfbyte.errors import UserError

MAX_DEPTH = 64
# What says nothing about the value, or is looked up from elsewhere.
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable"})
_NOTES |= {"$comment", "$schema", "$id", "$defs", "definitions"}
_OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_KEYWORDS = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": _OF_NUMBERS,
    "integer": _OF_NUMBERS,
    "boolean": frozenset[str](),
    "null": frozenset[str](),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
_PYTHON_TYPES = {"string": (str,), "number": (int, float), "integer": (int,), "array": (list,), "object": (dict,)}
# How true, false and null are written.
PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}
JSON_WORDS = {word: word for word in PYTHON_WORDS}


def python_call_rules(rule: str, tools: Sequence[Tool], json_term: JsonTerm, words: Mapping[str, str] = PYTHON_WORDS) -> str:
    """Rules that make `rule` a call of one of the tools. UserError when a schema asks for what cannot be held to here."""
    names = [f"{rule}_{index}" for index in range(len(tools))]
    rules = [f"{rule}: {' | '.join(names)}"]
    for name, tool in zip(names, tools, strict=True):
        if not is_name(tool.name):
            raise _refusal(tool, "a name that is none in Python")
        writer = _SchemaRules(name, tool, json_term, words)
        rules.append(f'{name}: {literal(tool.name + "(")} {writer.arguments()} ")"')
        rules += writer.rules
    return "\n".join(rules) + "\n"


class _SchemaRules:
    """The rules for one tool's arguments. Each is written once, however often a schema refers to it, so schemas may recurse."""

    def __init__(self, prefix: str, tool: Tool, json_term: JsonTerm, words: Mapping[str, str]) -> None:
        self.rules: list[str] = []
        self._prefix = prefix
        self._tool = tool
        self._json_term = json_term
        self._words = words
        self._true, self._false, self._null = (literal(words[word]) for word in ("true", "false", "null"))
        self._referred: dict[str, str] = {}
        self._any = ""
        self._num_rules = 0

    def arguments(self) -> str:
        """The term for all that is between the parentheses of a call."""
        schema = schema_of(self._tool)
        self._json_term(schema)  # it refuses what is no schema
        if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
            raise self._refuse("parameters that are no object with properties")
        self._check(schema, {"type", *_KEYWORDS["object"]})
        return self._members(schema, 0, is_call=True)

    def _value(self, schema: object, depth: int) -> str:
        """A term for the values of a schema."""
        if depth > MAX_DEPTH:
            raise self._refuse(f"more than {MAX_DEPTH} schemas inside each other")
        if not isinstance(schema, Mapping):
            if schema is True:
                return self._anything()
            raise self._refuse(f"the schema {str(schema)[:40]!r}")
        if "$ref" in schema:
            self._check(schema, {"$ref"})
            return self._reference(str(schema["$ref"]), depth)
        if "enum" in schema or "const" in schema:
            self._check(schema, {"enum", "const", "type"})
            return self._one_of(schema)
        if "anyOf" in schema:
            self._check(schema, {"anyOf"})
            return self._new(" | ".join(self._value(part, depth + 1) for part in schema["anyOf"]))
        kinds = schema.get("type", _implied_type(schema))
        if isinstance(kinds, list):
            return self._new(" | ".join(self._of_type(kind, _for_type(schema, kind), depth) for kind in kinds))
        return self._of_type(kinds, schema, depth)

    def _of_type(self, kind: object, schema: Mapping[str, Any], depth: int) -> str:
        if kind in ("string", "number", "integer"):
            return self._new(self._json_term(schema))
        self._check(schema, {"type", *_KEYWORDS.get(str(kind), ())})
        match kind:
            case "boolean":
                return f"({self._true} | {self._false})"
            case "null":
                return self._null
            case "array":
                return self._new(self._items(schema, depth))
            case "object":
                return self._new(f'"{{" {self._members(schema, depth, is_call=False)} "}}"')
            case None:
                return self._anything()
        raise self._refuse(f"the type {str(kind)[:40]!r}")

    def _items(self, schema: Mapping[str, Any], depth: int) -> str:
        low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
        if high is not None and high < low:
            raise self._refuse("minItems above maxItems")
        if high == 0:
            return '"[]"'
        item = self._value(schema.get("items", True), depth + 1)
        most = "" if high is None else int(high) - 1
        items = f'{item} (", " {item}){{{max(low - 1, 0)},{most}}}'
        return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'

    def _members(self, schema: Mapping[str, Any], depth: int, *, is_call: bool) -> str:
        """A term for an object's members, the required ones first. is_call: they are written as parameters."""
        properties, required = schema.get("properties", {}), list(schema.get("required", ()))
        rest = schema.get("additionalProperties", True)
        if "properties" not in schema and not required:
            return "" if rest is False else self._free_members(rest, depth, is_call=is_call)
        needed = [name for name in properties if name in required] + [name for name in required if name not in properties]
        optional = [name for name in properties if name not in required and properties[name] is not False]

        def term(name: str) -> str:
            return f"{self._lead(name, is_call=is_call)} {self._value(properties.get(name, rest), depth + 1)}"

        if needed:
            return ' ", " '.join(map(term, needed)) + "".join(f' (", " {term(name)})?' for name in optional)
        return self._some_of([self._new(term(name)) for name in optional])

    def _some_of(self, names: Sequence[str]) -> str:
        """Any of the members, or none, in their order, with commas between them."""
        starts: list[str] = []
        tail = ""
        for name in reversed(names):
            starts.append(f"{name} {tail}")
            tail = self._new(f'(", " {name})? {tail}')
        return f"({' | '.join(reversed(starts))})?" if starts else ""

    def _free_members(self, schema: object, depth: int, *, is_call: bool) -> str:
        """Members of any name."""
        lead = "/[a-zA-Z_][a-zA-Z0-9_]*=/" if is_call else f'{self._json_term({"type": "string"})} ": "'
        member = self._new(f"{lead} {self._value(schema, depth + 1)}")
        return f'({member} (", " {member})*)?'

    def _lead(self, name: str, *, is_call: bool) -> str:
        """What is written before the value of a member."""
        if not is_call:
            return literal(f"{json.dumps(name, ensure_ascii=False)}: ")
        if not is_name(name):
            raise self._refuse(f"the parameter {name!r}, whose name is none in Python")
        return literal(f"{name}=")

    def _one_of(self, schema: Mapping[str, Any]) -> str:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        kinds = schema.get("type", list(_KEYWORDS))
        kinds = [kinds] if isinstance(kinds, str) else kinds
        kept = [value for value in values if any(_is_of_type(value, kind) for kind in kinds)]
        if not kept:
            raise self._refuse("an enum without a value of its type")
        return self._new(" | ".join(literal(self._written(value)) for value in kept))

    def _written(self, value: object) -> str:
        """A JSON value as the model writes it."""
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {self._written(value[key])}" for key in value) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(self._written, value)) + "]"
        written = json.dumps(value, ensure_ascii=False)
        return self._words.get(written, written)

    def _reference(self, reference: str, depth: int) -> str:
        if reference not in self._referred:
            node: object = self._tool.parameters
            for part in reference.split("/")[1:]:
                node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
            if node is None or not reference.startswith("#") or reference[1:2] not in ("", "/"):
                raise self._refuse(f"the $ref {reference[:60]!r}, which leads nowhere inside of it")
            self._referred[reference] = name = f"{self._prefix}_ref{len(self._referred)}"
            self.rules.append(f"{name}: {self._value(node, depth + 1)}")
        return self._referred[reference]

    def _anything(self) -> str:
        """Any literal."""
        if not self._any:
            self._any = name = f"{self._prefix}_any"
            text, number = self._json_term({"type": "string"}), self._json_term({"type": "number"})
            words = f"{self._true} | {self._false} | {self._null}"
            self.rules.append(f"{name}: {name}_text | {name}_number | {words} | {name}_list | {name}_dict")
            self.rules.append(f"{name}_text: {text}\n{name}_number: {number}")
            self.rules.append(f'{name}_list: "[" ({name} (", " {name})*)? "]"')
            self.rules.append(f'{name}_dict: "{{" ({name}_member (", " {name}_member)*)? "}}"')
            self.rules.append(f'{name}_member: {name}_text ": " {name}')
        return self._any

    def _new(self, body: str) -> str:
        self._num_rules += 1
        name = f"{self._prefix}_{self._num_rules}"
        self.rules.append(f"{name}: {body}")
        return name

    def _check(self, schema: Mapping[str, Any], known: Collection[str]) -> None:
        """Refuse a schema with a keyword that would not be held to."""
        for keyword in schema:
            if keyword not in known and keyword not in _NOTES:
                raise self._refuse(f"the keyword {keyword!r} in its parameters")

    def _refuse(self, what: str) -> UserError:
        return _refusal(self._tool, what)


def _refusal(tool: Tool, what: str) -> UserError:
    return UserError(
        f"tools: {tool.name!r} has {what}: calls in Python's syntax cannot be held to it; take it out, use tool_choice auto"
        " without strict, or serve the model with a tool call parser that writes JSON",
        param="tools",
    )


def _implied_type(schema: Mapping[str, Any]) -> str | None:
    """The type of a schema that names none."""
    return next((kind for kind in ("object", "array") if not _KEYWORDS[kind].isdisjoint(schema)), None)


def _for_type(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """A schema for several types, as it is for one of them."""
    others = frozenset().union(*_KEYWORDS.values()) - _KEYWORDS.get(kind, frozenset())
    return {**{keyword: schema[keyword] for keyword in schema if keyword not in others}, "type": kind}


def _is_of_type(value: object, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    return isinstance(value, _PYTHON_TYPES.get(kind, ()))
