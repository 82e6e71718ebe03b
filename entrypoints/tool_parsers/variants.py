"""JSON schemas taken apart at their choices, so that each part is about one type.

Knows the keywords of JSON schema that choose between others; knows no syntax. Used where a value is a plain text whose meaning,
or whose spelling, depends on its type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]


MAX_DEPTH = 32


def variants(schema: object, root: Schema) -> list[Schema]:
    """Schemas, at most one `type` (a string) in each, one of which a value of `schema` follows; in the order of the schema.

    The values of `enum` and `const` are variants of the form `{"const": ..., "type": ...}`. A schema that says nothing is one
    variant without a type. root: the schema that `$ref`s point into; a reference is followed once.
    """
    parts = _Parts(root)
    parts.take(schema, 0)
    return parts.found


class _Parts:
    def __init__(self, root: Schema) -> None:
        self.found: list[Schema] = []
        self._root = root
        self._followed: set[str] = set()

    def take(self, schema: object, depth: int) -> None:
        """Find the variants of `schema`."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            self.found.append({})
        elif isinstance(schema.get("$ref"), str):
            self._take_reference(schema, depth)
        elif (choice := next((name for name in ("anyOf", "oneOf") if _schemas(schema, name)), None)) is not None:
            rest = _without(schema, choice)
            for part in _schemas(schema, choice):
                self.take({**rest, **part}, depth + 1)
        elif schema.get("nullable") is True:
            self.take(_without(schema, "nullable"), depth + 1)
            self.found.append({"type": "null"})
        elif "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            self.found.extend({"const": value, "type": type_of(value)} for value in values)
        else:
            self._take_typed(schema, depth)

    def _take_reference(self, schema: Schema, depth: int) -> None:
        reference, rest = schema["$ref"], _without(schema, "$ref")
        if reference not in self._followed:
            self._followed.add(reference)
            target = _target(self._root, reference)
            self.take({**target, **rest} if isinstance(target, Mapping) else rest, depth + 1)

    def _take_typed(self, schema: Schema, depth: int) -> None:
        kind, parts = schema.get("type"), _schemas(schema, "allOf")
        if isinstance(kind, list):
            self.found.extend({**schema, "type": name} for name in kind if isinstance(name, str))
        elif isinstance(kind, str):
            self.found.append(schema)
        elif len(parts) == 1:
            self.take({**_without(schema, "allOf"), **parts[0]}, depth + 1)
        elif parts:  # they hold together, so one of them tells the type
            inner = _Parts(self._root)
            inner._followed = self._followed
            for part in parts:
                inner.take(part, depth + 1)
            kinds = dict.fromkeys(part["type"] for part in inner.found if "type" in part)
            self.found.extend([{**schema, "type": kind} for kind in kinds] or [schema])
        elif "properties" in schema or "items" in schema:
            self.found.append({**schema, "type": "object" if "properties" in schema else "array"})
        else:
            self.found.append(schema)


def type_of(value: object) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _schemas(schema: Schema, key: str) -> list[Schema]:
    """The list of schemas under a keyword."""
    parts = schema.get(key)
    return [part if isinstance(part, Mapping) else {} for part in parts] if isinstance(parts, list) else []


def _without(schema: Schema, key: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != key}


def _target(root: Schema, reference: str) -> object:
    """What a local reference points at; None where there is nothing."""
    if not reference.startswith("#"):
        return None
    node: object = root
    for part in reference[1:].split("/")[1:]:
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node
