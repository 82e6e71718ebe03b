"""JSON schemas without the keywords that llguidance lacks: each is said by others, or refused.

Knows what keywords mean. What is put in a keyword's place may allow less (`contains` then wants the items that match first), and
never more. It must not know the library's options or messages. Called by `json_schema` for one node at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from halfbyte.engine.grammar.schema_formats import FORMATS, REFUSED_FORMATS
from halfbyte.engine.grammar.schema_logic import DENIAL, CannotSay, are_disjoint, key_of, negate
from halfbyte.engine.grammar.schema_reader import AT, Document, Node, Schema
from halfbyte.errors import UserError

MAX_ALTERNATIVES = 64
MAX_OPTIONS = 128
# Arrays of unlike items are written out where the items are of so few values.
MAX_UNIQUE_VALUES = 8


@dataclass(slots=True)
class Rewriter:
    document: Document

    def rewrite(self, node: Node) -> Node:
        """The same with keywords of the library alone; what it holds inside is not yet rewritten."""
        node = dict(node)
        if "contains" in node and "unevaluatedItems" in node:
            raise self.fail(node, "unevaluatedItems is not enforced beside contains")
        rests = {key: node.pop(key) for key in _UNEVALUATED if key in node}
        added: list[Schema] = []
        for key, rewriting in _REWRITINGS.items():
            if key in node:
                try:
                    added += rewriting(self, node)
                except CannotSay as reason:
                    raise self.fail(node, f"{key} is not enforced here: that needs the opposite of {reason}") from None
        for key in _READ_WITH_OTHERS:
            node.pop(key, None)
        if added:
            node["allOf"] = [*node.get("allOf", []), *added]
        for key, rest in rests.items():
            if rest is True:
                node.setdefault(_UNEVALUATED[key], True)
            else:
                node = self.close(node, key, rest)
        return node

    def fail(self, node: Node, message: str) -> UserError:
        return self.document.fail(node[AT], message)

    def negate(self, schema: Schema) -> Schema:
        return negate(schema, self.document)

    def no(self, node: Node) -> list[Schema]:
        return [self.negate(node.pop("not"))]

    def condition(self, node: Node) -> list[Schema]:
        holds = node.pop("if")
        cases = ((holds, node.get("then", True)), (self.negate(holds), node.get("else", True)))
        if all(case[1] is True for case in cases):
            return []
        return [{"anyOf": [{"allOf": list(case)} for case in cases]}]

    def dependent_required(self, node: Node) -> list[Schema]:
        return [_unless(name, {"required": others}) for name, others in node.pop("dependentRequired").items() if others]

    def dependent_schemas(self, node: Node) -> list[Schema]:
        return [_unless(name, schema) for name, schema in node.pop("dependentSchemas").items() if schema is not True]

    def one_of(self, node: Node) -> list[Schema]:
        """Each option, without those that could hold beside it."""
        options = node.pop("oneOf")
        if len(options) > MAX_OPTIONS:
            raise self.fail(node, f"oneOf has {len(options)} options, the limit is {MAX_OPTIONS}")
        beside: list[list[Schema]] = [[] for _ in options]
        for (i, one), (j, other) in itertools.combinations(enumerate(options), 2):
            if not are_disjoint(one, other, self.document):
                beside[i].append(other)
                beside[j].append(one)
        cases = [
            {"allOf": [option, *map(self.negate, others)]} if others else option
            for option, others in zip(options, beside, strict=True)
        ]
        if "anyOf" in node:
            return [{"anyOf": cases}]
        node["anyOf"] = cases
        return []

    def contains(self, node: Node) -> list[Schema]:
        wanted = node.pop("contains")
        least, most = node.get("minContains", 1), node.get("maxContains")
        if most is not None and least > most:
            return [{"type": ["null", "boolean", "number", "string", "object"]}]
        if least > MAX_ALTERNATIVES:
            raise self.fail(node, f"minContains is {least}, the limit is {MAX_ALTERNATIVES}")
        first = {"minItems": least, "prefixItems": [wanted] * least}
        if most is not None:
            return [first | {"items": self.negate(wanted)}]
        return [first] if least else []

    def unique_items(self, node: Node) -> list[Schema]:
        """Arrays of few values in the order in which these are named."""
        if not node.pop("uniqueItems") or node.get("maxItems", 2) < 2 or "array" not in node.get("type", ["array"]):
            return []
        values = self.finite(node.get("items", True))
        if values is None or len(values) > MAX_UNIQUE_VALUES or "prefixItems" in node:
            raise self.fail(node, f"uniqueItems is enforced only where items has an enum of at most {MAX_UNIQUE_VALUES} values")
        arrays: list[Any] = []
        for length in range(min(len(values), node.get("maxItems", len(values))) + 1):
            arrays += [list(chosen) for chosen in itertools.combinations(values, length)]
        return [{"anyOf": [{"type": ["null", "boolean", "number", "string", "object"]}, {"enum": arrays}]}]

    def finite(self, schema: Schema) -> list[Any] | None:
        """The values that a schema names, each once."""
        while isinstance(schema, dict) and "$ref" in schema:
            schema = self.document.targets[schema["$ref"]]
        if not isinstance(schema, dict):
            return None
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is None:
            return [False, True] if schema.get("type") == ["boolean"] else None
        return list({key_of(value): value for value in values}.values())

    def property_names(self, node: Node) -> list[Schema]:
        """Names that fit become members or patterns, beside which there is nothing."""
        names = node.pop("propertyNames")
        while isinstance(names, dict) and set(names) - {AT} == {"$ref"}:
            names = self.document.targets[names["$ref"]]
        if isinstance(names, bool):
            return [] if names else [{"maxProperties": 0}]
        if "string" not in names.get("type", ["string"]):
            return [{"maxProperties": 0}]
        if set(names) - {AT, "type"} in ({"const"}, {"enum"}):
            allowed = {name: True for name in names.get("enum", [names.get("const")]) if isinstance(name, str)}
            return [{"properties": allowed, "additionalProperties": False, DENIAL: True}]
        patterns = self.name_patterns(node, names)
        return [{"patternProperties": {pattern: True}, "additionalProperties": False, DENIAL: True} for pattern in patterns]

    def name_patterns(self, node: Node, names: Node) -> list[str]:
        unknown = set(names) - {AT, "type", "pattern", "format", "minLength", "maxLength"}
        if unknown:
            known = "pattern, format and lengths, or const, or enum"
            raise self.fail(node, f"propertyNames is enforced with {known}, not with {sorted(unknown)[0]}")
        patterns = [names["pattern"]] if "pattern" in names else []
        patterns += self.format_patterns(names) if "format" in names else []
        if "minLength" in names or "maxLength" in names:
            patterns.append(f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$")
        return patterns

    def format_patterns(self, node: Node) -> list[str]:
        name = node["format"]
        if name in REFUSED_FORMATS:
            raise self.fail(node, f"format {name!r} cannot be enforced; those that can are {', '.join(FORMATS)}")
        return list(FORMATS.get(name, ()))

    def formats(self, node: Node) -> list[Schema]:
        patterns = self.format_patterns(node)
        del node["format"]
        if patterns and "pattern" not in node:
            node["pattern"] = patterns.pop(0)
        return [{"pattern": pattern} for pattern in patterns]

    def close(self, node: Node, key: str, rest: Schema) -> Node:
        """The node's alternatives, each with what is left for items or members that it does not evaluate."""
        closing = _close_items if key == "unevaluatedItems" else _close_members
        cases = [{"allOf": [*leaves, closing(leaves, rest)]} for leaves in self.alternatives(node, key, node[AT])]
        return {AT: node[AT], "anyOf": cases} if len(cases) != 1 else {AT: node[AT], **cases[0]}

    def alternatives(self, schema: Schema, key: str, at: str) -> list[list[Node]]:
        """All ways to satisfy a schema, each as nodes that hold together and apply nothing in place."""
        if isinstance(schema, bool):
            return [[]] if schema else []
        self.document.step()
        node = self.rewrite({AT: at, **schema})
        denial = {DENIAL: True} if node.pop(DENIAL, False) else {}
        parts = [self.alternatives(each, key, at) for each in node.pop("allOf", ())]
        if "$ref" in node:
            parts.append(self.alternatives(self.document.targets[node.pop("$ref")], key, at))
        if "anyOf" in node:
            parts.append([way for each in node.pop("anyOf") for way in self.alternatives(each, key, at)])
        ways: list[list[Node]] = [[node]] if set(node) != {AT} else [[]]
        for part in parts:
            if len(ways) * len(part) > MAX_ALTERNATIVES:
                raise self.document.fail(at, f"{key} is not enforced where there are more than {MAX_ALTERNATIVES} alternatives")
            ways = [one + other for one in ways for other in part]
        return [[leaf | denial for leaf in way] for way in ways]


def _unless(name: str, schema: Schema) -> Node:
    """The schema holds, and evaluates, where there is a member of that name."""
    return {"anyOf": [{"properties": {name: False}}, {"type": ["object"], "required": [name], "allOf": [schema]}]}


def _close_members(leaves: list[Node], rest: Schema) -> Schema:
    said = [leaf for leaf in leaves if DENIAL not in leaf]
    if any("additionalProperties" in leaf for leaf in said):
        return True
    closing: Node = {"additionalProperties": rest}
    for key in ("properties", "patternProperties"):
        if names := {name: True for leaf in said for name in leaf.get(key, ())}:
            closing[key] = names
    return closing


def _close_items(leaves: list[Node], rest: Schema) -> Schema:
    said = [leaf for leaf in leaves if DENIAL not in leaf]
    if any("items" in leaf for leaf in said):
        return True
    return {"prefixItems": [True] * max((len(leaf.get("prefixItems", ())) for leaf in said), default=0), "items": rest}


# Beside each, the keyword that evaluates everything.
_UNEVALUATED = {"unevaluatedItems": "items", "unevaluatedProperties": "additionalProperties"}
_REWRITINGS: dict[str, Callable[[Rewriter, Node], list[Schema]]] = {
    "format": Rewriter.formats,
    "propertyNames": Rewriter.property_names,
    "contains": Rewriter.contains,
    "uniqueItems": Rewriter.unique_items,
    "dependentRequired": Rewriter.dependent_required,
    "dependentSchemas": Rewriter.dependent_schemas,
    "oneOf": Rewriter.one_of,
    "if": Rewriter.condition,
    "not": Rewriter.no,
}
# Keywords that mean nothing but beside another one, which has read them.
_READ_WITH_OTHERS = ("then", "else", "minContains", "maxContains")
