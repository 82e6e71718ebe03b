"""What two JSON schemas have to do with each other: the negation of one, and whether two can hold for the same value.

Knows the meaning of keywords. Both answers are on the safe side: a negation may allow less than it could, and two schemas count
as disjoint only when that is certain. It must not know the library. Called by `schema_rewrites`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from halfbyte.engine.grammar.schema_reader import TYPES, Document, Node, Schema

# Marks what came out of a negation: the properties and items that it names do not count as evaluated.
DENIAL = "$denial"
MAX_DEPTH = 32
MAX_DENIED_CHARS = 40
_JSON_TYPES = ("null", "boolean", "number", "string", "array", "object")
# A number is a whole one or not; no type names the second kind.
_KINDS = {name: frozenset({name}) for name in TYPES} | {"number": frozenset({"integer", "fraction"})}
_ALL_KINDS = frozenset().union(*_KINDS.values())


class CannotSay(Exception):
    """Nothing says the opposite of this keyword."""


def key_of(value: Any) -> str:
    """Equal for values that JSON schemas take for equal: 1 and 1.0, objects in any order; not true and 1."""
    return json.dumps(plain(value), sort_keys=True)


def plain(value: Any) -> Any:
    """The value with whole numbers as such."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value


def kind_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == int(value) else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def negate(schema: Schema, document: Document, depth: int = 0) -> Schema:
    """A schema for values that `schema` refuses. CannotSay names the keyword for which there is none."""
    if isinstance(schema, bool):
        return not schema
    document.step()
    if depth > MAX_DEPTH:
        raise CannotSay("a schema that refers to itself")
    parts: list[Schema] = []
    for key, value in schema.items():
        if key in _WITHOUT_EFFECT or (key in ("then", "else") and "if" not in schema):
            continue
        if key not in _NEGATIONS:
            raise CannotSay(key)
        parts += _NEGATIONS[key](value, schema, lambda inner: negate(inner, document, depth + 1), document)
    parts = [part for part in parts if part is not False]
    return {DENIAL: True, "anyOf": parts} if parts else False


_Negate = Callable[[Schema], Schema]
_WITHOUT_EFFECT = frozenset({"$at", DENIAL, "minContains", "maxContains"})


def _values(values: list[Any]) -> list[Schema]:
    """Anything but these."""
    kinds = {kind_of(value) for value in values}
    others = [name for name in _JSON_TYPES if not _KINDS[name] & kinds]
    parts: list[Schema] = [{"type": others}] if others else []
    if texts := [value for value in values if isinstance(value, str)]:
        parts.append({"type": ["string"], "pattern": f"^(?:{none_of(texts)})$"})
    numbers = sorted({value for value in values if kind_of(value) in ("integer", "fraction")})
    if numbers:
        for low, high in itertools.pairwise([None, *numbers, None]):
            gap: Node = {"type": ["number"]}
            gap |= {} if low is None else {"exclusiveMinimum": low}
            parts.append(gap | ({} if high is None else {"exclusiveMaximum": high}))
    flags = {value for value in values if isinstance(value, bool)}
    parts += [{"const": flag} for flag in (False, True) if flags and flag not in flags]
    for value, nonempty in (([], "minItems"), ({}, "minProperties")):
        if kind_of(value) in kinds:
            if any(each != value for each in values if isinstance(each, type(value))):
                raise CannotSay("an array or object in const or enum")
            parts.append({"type": [kind_of(value)], nonempty: 1})
    return parts


def none_of(texts: list[str]) -> str:
    """A regular expression for all texts but these."""
    if max(map(len, texts)) > MAX_DENIED_CHARS or sum(map(len, texts)) > 20 * MAX_DENIED_CHARS:
        raise CannotSay(f"texts of more than {MAX_DENIED_CHARS} characters in const or enum")
    branches = [] if "" in texts else [""]
    heads = sorted({text[0] for text in texts if text})
    codes = {head: f"\\u{{{ord(head):x}}}" for head in heads}
    branches.append(f"[^{''.join(codes.values())}][\\s\\S]*" if heads else "[\\s\\S]+")
    for head in heads:
        tails = [text[1:] for text in texts if text[:1] == head]
        rest = none_of(tails)
        branches.append(f"{codes[head]}(?:{rest})")
    return "|".join(branches)


def _type(value: list[str], *_: Any) -> list[Schema]:
    covered = frozenset().union(*(_KINDS[name] for name in value))
    others = [name for name in (*_JSON_TYPES, "integer") if not _KINDS[name] & covered]
    return [{"type": [name for name in others if not (name == "integer" and "number" in others)]}] if others else []


def _items(value: Schema, node: Node, negated: _Negate, _: Any) -> list[Schema]:
    before = len(node.get("prefixItems", ()))
    return [{"type": ["array"], "minItems": before + 1, "prefixItems": [True] * before + [negated(value)]}]


def _prefix(value: list[Schema], _: Node, negated: _Negate, __: Any) -> list[Schema]:
    opposites = [negated(each) for each in value]
    return [
        {"type": ["array"], "minItems": at + 1, "prefixItems": [True] * at + [opposite]}
        for at, opposite in enumerate(opposites)
        if opposite is not False
    ]


def _properties(value: dict[str, Schema], _: Node, negated: _Negate, __: Any) -> list[Schema]:
    opposites = {name: negated(each) for name, each in value.items()}
    return [
        {"type": ["object"], "required": [name], "properties": {name: opposite}}
        for name, opposite in opposites.items()
        if opposite is not False
    ]


def _additional(value: Schema, *_: Any) -> list[Schema]:
    if value is not True:
        raise CannotSay("additionalProperties")
    return []


def _bound(kind: str, opposite: str, change: int = 0) -> Callable[..., list[Schema]]:
    def negation(value: Any, *_: Any) -> list[Schema]:
        return [] if value + change < 0 and kind != "number" else [{"type": [kind], opposite: value + change}]

    return negation


_NEGATIONS: dict[str, Callable[..., list[Schema]]] = {
    "$ref": lambda value, node, negated, document: [negated(document.targets[value])],
    "allOf": lambda value, node, negated, document: [negated(each) for each in value],
    "anyOf": lambda value, node, negated, document: [{DENIAL: True, "allOf": [negated(each) for each in value]}],
    "not": lambda value, *_: [value],
    "const": lambda value, *_: _values([value]),
    "enum": lambda value, *_: _values(value),
    "type": _type,
    "required": lambda value, *_: [{"type": ["object"], "properties": {name: False}} for name in value],
    "properties": _properties,
    "additionalProperties": _additional,
    "items": _items,
    "prefixItems": _prefix,
    "minimum": _bound("number", "exclusiveMaximum"),
    "maximum": _bound("number", "exclusiveMinimum"),
    "exclusiveMinimum": _bound("number", "maximum"),
    "exclusiveMaximum": _bound("number", "minimum"),
    "minLength": _bound("string", "maxLength", -1),
    "maxLength": _bound("string", "minLength", 1),
    "minItems": _bound("array", "maxItems", -1),
    "maxItems": _bound("array", "minItems", 1),
    "minProperties": _bound("object", "maxProperties", -1),
    "maxProperties": _bound("object", "minProperties", 1),
}


def facts(schema: Schema, document: Document, depth: int = 0) -> Iterator[Node]:
    """Nodes that all hold for each value that `schema` takes: itself, and what `$ref` and `allOf` bring."""
    if isinstance(schema, dict) and depth <= MAX_DEPTH:
        document.step()
        yield schema
        for inner in schema.get("allOf", ()):
            yield from facts(inner, document, depth + 1)
        if "$ref" in schema:
            yield from facts(document.targets[schema["$ref"]], document, depth + 1)


def kinds(schema: Schema, document: Document, depth: int = 0) -> frozenset[str]:
    """The kinds of values that a schema may take."""
    if isinstance(schema, bool):
        return _ALL_KINDS if schema else frozenset()
    found = _ALL_KINDS
    for node in facts(schema, document):
        if "type" in node:
            found &= frozenset().union(*(_KINDS[name] for name in node["type"]))
        for values in ([node["const"]] if "const" in node else None, node.get("enum")):
            if values is not None:
                found &= {kind_of(value) for value in values}
        for key in ("anyOf", "oneOf"):
            if key in node and depth <= MAX_DEPTH:
                found &= frozenset().union(*(kinds(each, document, depth + 1) for each in node[key]))
    return found


def are_disjoint(left: Schema, right: Schema, document: Document, depth: int = 0) -> bool:
    """Whether no value can satisfy both. False also when that is not known."""
    document.step()
    common = kinds(left, document) & kinds(right, document)
    if not common:
        return True
    if depth > MAX_DEPTH:
        return False
    for one, other in ((left, right), (right, left)):
        for node in facts(one, document):
            for key in ("anyOf", "oneOf"):
                if key in node and all(are_disjoint(each, other, document, depth + 1) for each in node[key]):
                    return True
    lefts, rights = list(facts(left, document)), list(facts(right, document))
    if _values_differ(lefts, rights):
        return True
    if common <= {"integer", "fraction"}:
        return _ranges_differ(lefts + rights)
    if common == {"object"}:
        return _members_differ(lefts, rights, document, depth)
    return False


def _values_differ(lefts: list[Node], rights: list[Node]) -> bool:
    sets = [
        [
            {key_of(value) for value in ([node["const"]] if "const" in node else node["enum"])}
            for node in nodes
            if {"const", "enum"} & set(node)
        ]
        for nodes in (lefts, rights)
    ]
    return any(not one & other for one in sets[0] for other in sets[1])


def _ranges_differ(nodes: list[Node]) -> bool:
    """Whether the bounds of all these leave no number."""
    least = max((node[key] for node in nodes for key in ("minimum", "exclusiveMinimum") if key in node), default=None)
    most = min((node[key] for node in nodes for key in ("maximum", "exclusiveMaximum") if key in node), default=None)
    if least is None or most is None or least < most:
        return False
    excluded = any(node.get("exclusiveMinimum") == least or node.get("exclusiveMaximum") == most for node in nodes)
    return bool(least > most or excluded)


def _members_differ(lefts: list[Node], rights: list[Node], document: Document, depth: int) -> bool:
    """Whether a member that one side requires cannot satisfy both."""
    names = {name for node in lefts + rights for name in node.get("required", ())}
    for name in names:
        sides = [[node["properties"][name] for node in nodes if name in node.get("properties", {})] for nodes in (lefts, rights)]
        if any(are_disjoint(one, other, document, depth + 1) for one in sides[0] for other in sides[1]):
            return True
        if False in sides[0] + sides[1] or any(_excludes(node, name) for node in lefts + rights):
            return True
    return False


def _excludes(node: Node, name: str) -> bool:
    """Whether a node lets no member of that name be."""
    return (
        node.get("additionalProperties") is False and name not in node.get("properties", {}) and not node.get("patternProperties")
    )
