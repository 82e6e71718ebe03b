"""Writes the rules of parameters that are elements: plain texts, the tool's schema enforced as far as it is about such texts.

A string is any text without a mark that would end it; other values are JSON. Knows Lark and schemas; what it says is
read back by `element_reading`. Called by the syntaxes that have such parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.tool_parsers.element_reading import is_key
from halfbyte.entrypoints.tool_parsers.element_shapes import ParameterShape, Sign
from halfbyte.entrypoints.tool_parsers.grammars import literal
from halfbyte.entrypoints.tool_parsers.protocol import JsonTerm
from halfbyte.entrypoints.tool_parsers.variants import Schema, variants
from halfbyte.errors import UserError

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "format", "deprecated", "readOnly", "writeOnly", "nullable"}
    | {"$schema", "$id", "$comment", "$defs", "definitions", "strict"}
)
_OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties", "unevaluatedProperties"})
_TEXT_KEYWORDS = frozenset({"type", "minLength", "maxLength", "pattern"})
_NOT_TEXT = "integer"  # stands for all types but strings


class ParameterRules:
    """The rules of parameters of one shape. call_ends: the marks that end a call, which no string may hold."""

    def __init__(self, shape: ParameterShape, call_ends: Sequence[Sign]) -> None:
        self._shape = shape
        self._forbidden = (shape.close.text, *dict.fromkeys(end.ending_text for end in (shape.opening, *call_ends)))

    @property
    def shared(self) -> str:
        """What the rules of all tools refer to; to stand once beside them."""
        forbidden = " | ".join(map(literal, self._forbidden))
        return f"ANYTHING: /(?s:.*)/\nPLAIN: ANYTHING & ~(ANYTHING ({forbidden}) ANYTHING)\n{self._text('plain', 'PLAIN')}\n"

    def rules(self, rule: str, tool: Tool, json_term: JsonTerm) -> str:
        """Rules that make `rule` the parameters of the tool: the required ones in the order of its schema, then the others.

        UserError when the schema asks for more than properties, or more of a string than its length and pattern.
        """
        properties, required = _properties(tool)
        written: list[str] = []
        names: list[str] = []
        for index, key in enumerate(sorted(properties, key=lambda key: key not in required)):
            name = f"{rule}_{index}"
            names.append(name if key in required else f"{name}?")
            written += self._parameter(name, tool, key, properties[key], json_term)
        return "\n".join([f"{rule}: {' '.join(names)}".rstrip(), *written]) + "\n"

    def _parameter(self, rule: str, tool: Tool, key: str, schema: object, json_term: JsonTerm) -> list[str]:
        """`rule` with a choice between the schema's variants, and the rules of these."""
        choices: list[str] = []
        extra: list[str] = []
        found = variants(schema, tool.parameters)
        if any(_is_text(variant) and not set(variant) - _ANNOTATIONS - {"type"} for variant in found):
            found = [{}]  # any text is good, also one that means something else
        for index, variant in enumerate(found):
            head = self._head(tool, key, "string" if _is_text(variant) else _NOT_TEXT)
            if "const" in variant:
                value = self._constant(tool, key, variant["const"])
            elif not _is_text(variant):
                value = self._closed(json_term(_with_definitions(variant, tool.parameters)))
            elif constraint := _constraint(tool, key, variant):
                value = f"{rule}_{index}"
                extra.append(self._text(value, f"(PLAIN{constraint})"))
            else:
                value = "plain"
            choices.append(f"{head} {value}")
        gap = f" {literal(self._shape.gap)}" if self._shape.gap else ""
        return [f"{rule}: ({' | '.join(choices)}){gap}", *extra]

    def _head(self, tool: Tool, key: str, kind: str) -> str:
        """All that stands before a value."""
        shape = self._shape
        end = next(end for end, types in shape.key_ends.items() if types is None or kind in types)
        if not is_key(key) or any(other.text in key for other in shape.key_ends):
            raise _refusal(tool, f"a parameter named {key!r} cannot be written in this model's syntax")
        pad = f" {literal(shape.pad)}" if shape.pad else ""
        if shape.value_opening is None:
            return f"{shape.opening.term} {literal(key)} {end.term}{pad}"
        gap = f" {literal(shape.gap)}" if shape.gap else ""
        return f"{shape.opening.term} {literal(key)} {end.term}{gap} {shape.value_opening.term}{pad}"

    def _constant(self, tool: Tool, key: str, value: object) -> str:
        if not isinstance(value, str):
            return self._closed(literal(json.dumps(value, ensure_ascii=False)))
        if any(mark in value for mark in self._forbidden):
            raise _refusal(tool, f"{key}: the value {value!r} cannot be written in this model's syntax")
        return self._closed(literal(value) if value else "")

    def _closed(self, term: str) -> str:
        """A value that tells its own end, and the closing mark."""
        pad = f"{literal(self._shape.pad)} " if self._shape.pad else ""
        return f"{term} {pad}{self._shape.close.term}"

    def _text(self, rule: str, term: str) -> str:
        """Make `rule` a text of the terminal's kind, and the closing mark."""
        close, pad, terminal = self._shape.close, self._shape.pad, f"{rule}_TEXT".upper()
        if close.is_token:
            return f"{rule}: {terminal} {close.term}\n{terminal}: {term}"
        return f"{rule}[lazy]: {terminal}\n{terminal}: {term} {literal(pad + close.text)}"


def _properties(tool: Tool) -> tuple[Mapping[str, object], Sequence[str]]:
    """The properties of a tool's arguments, and which are required."""
    schema = tool.parameters
    properties, required = schema.get("properties", {}), schema.get("required", [])
    strange = sorted(set(schema) - _OBJECT_KEYWORDS - _ANNOTATIONS)
    if strange:
        raise _refusal(tool, f"{strange[0]!r} of its parameters cannot be enforced in this model's syntax")
    is_object = schema.get("type", "object") == "object" and isinstance(properties, Mapping)
    if not is_object or not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise _refusal(tool, "its parameters must be an object with properties")
    return {**properties, **{key: {} for key in required if key not in properties}}, required


def _is_text(variant: Schema) -> bool:
    return variant.get("type", "string") == "string"


def _constraint(tool: Tool, key: str, variant: Schema) -> str:
    """What a string's schema demands, as Lark behind a terminal; "" for nothing. Formats are annotations."""
    strange = sorted(set(variant) - _TEXT_KEYWORDS - _ANNOTATIONS)
    if strange:
        raise _refusal(tool, f"{key}: {strange[0]!r} of a string cannot be enforced in this model's syntax")
    lengths = [variant.get(name, default) for name, default in (("minLength", 0), ("maxLength", ""))]
    pattern = variant.get("pattern", "")
    if not all(isinstance(length, int) and length >= 0 or length == "" for length in lengths) or not isinstance(pattern, str):
        raise _refusal(tool, f"{key}: minLength and maxLength must be whole numbers, pattern a regular expression")
    length = "" if lengths == [0, ""] else f" & /(?s:.{{{lengths[0]},{lengths[1]}}})/"
    return length + (f" & {_pattern(pattern)}" if pattern else "")


def _pattern(pattern: str) -> str:
    """Texts in which the expression is found."""
    import llguidance

    before, behind = "(?s:.*)", "(?s:.*)"
    if pattern.startswith("^"):
        before, pattern = "", pattern[1:]
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        behind, pattern = "", pattern[:-1]
    return f"/{before}(?:{llguidance.regex_to_lark(pattern)}){behind}/"


def _with_definitions(variant: Schema, root: Schema) -> dict[str, Any]:
    """A part of a schema with what its references point at."""
    if '"$ref"' not in json.dumps(variant):
        return dict(variant)
    return {**{name: root[name] for name in ("$defs", "definitions") if name in root}, **variant}


def _refusal(tool: Tool, reason: str) -> UserError:
    return UserError(
        f"tool {tool.name!r}: {reason}; leave strict and tool_choice as they are by default, or change the schema", param="tools"
    )
