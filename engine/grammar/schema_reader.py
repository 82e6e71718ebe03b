"""A JSON schema as it came, checked and in one form: references resolved, old spellings replaced, annotations gone.

Knows the keywords of draft 2020-12 and what their values look like; what is wrong is said with a JSON pointer to the node. It
must not know what can be enforced. Called by `json_schema`, which rewrites and emits what is read here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from halfbyte.errors import UserError
from halfbyte.log import one_line

Node = dict[str, Any]
Schema = bool | Node

MAX_DEPTH = 64
MAX_JSON_DEPTH = 160
MAX_NODES = 10_000
MAX_PROPERTIES = 1_000
MAX_STEPS = 200_000
MAX_MESSAGE_CHARS = 300
TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
DRAFTS = ("draft/2020-12", "draft/2019-09", "draft-07", "draft-06")
_TODAY = "https://json-schema.org/draft/2020-12/schema"
# Where a node keeps its own pointer, for messages. No keyword is spelled like this.
AT = "$at"

# What each keyword's value holds. Keywords that are not here say nothing about an instance: annotations, and unknown ones.
KEYWORDS: dict[str, str] = {
    **dict.fromkeys(("$ref", "$dynamicRef"), "reference"),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), "schemas"),
    **dict.fromkeys(("not", "if", "then", "else", "items", "contains", "additionalProperties"), "schema"),
    **dict.fromkeys(("propertyNames", "unevaluatedItems", "unevaluatedProperties"), "schema"),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), "schemas by name"),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), "count"),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), "count"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "number"),
    **dict.fromkeys(("pattern", "format"), "text"),
    "multipleOf": "number above zero",
    "required": "names",
    "dependentRequired": "names by name",
    "uniqueItems": "flag",
    "type": "types",
    "const": "value",
    "enum": "values",
}
_HOLDERS = {"$defs": "schemas by name", "definitions": "schemas by name"}


@dataclass(slots=True)
class Work:
    """How much was looked at for one request: references make a small schema long to look through."""

    num_steps: int = 0


@dataclass(slots=True)
class Document:
    """A schema that was read. targets: what references lead to, by the pointers that `$ref` holds now."""

    root: Schema
    targets: dict[str, Schema]
    param: str
    work: Work

    def step(self) -> None:
        """Called for each schema that is looked at. UserError when these are too many."""
        self.work.num_steps += 1
        if self.work.num_steps > MAX_STEPS:
            raise self.fail("#", "too much follows from it: fewer alternatives, or references to alternatives, may do")

    def fail(self, at: str, message: str) -> UserError:
        place = at if len(at) <= 100 else f"{at[:50]}...{at[-47:]}"
        return UserError(f"{self.param} cannot be used: {place}: {one_line(message)[:MAX_MESSAGE_CHARS]}", param=self.param)


def read(schema: Any, param: str, work: Work) -> Document:
    """UserError says what is wrong with a schema, and where."""
    return _Reader(schema, Document(True, {}, param, work)).read()


@dataclass(slots=True)
class _Reader:
    raw: Any
    document: Document
    resources: dict[str, str] = field(default_factory=dict)
    anchors: dict[tuple[str, str], str] = field(default_factory=dict)
    bases: dict[str, str] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    num_nodes: int = 0

    def read(self) -> Document:
        if json_depth(self.raw) > MAX_JSON_DEPTH:
            raise self.fail("#", f"it is nested too deep; schemas may be nested {MAX_DEPTH} deep")
        self.collect(self.raw, "#", "")
        self.document.root = self.node(self.raw, "#", 0)
        while self.waiting:
            at = self.waiting.pop()
            self.document.targets[at] = self.node(self.find(at), at, 0)
        _check_cycles(self.document)
        return self.document

    def fail(self, at: str, message: str) -> UserError:
        return self.document.fail(at, message)

    def collect(self, raw: Any, at: str, base: str) -> None:
        """Learn the names that schemas give themselves: `$id`, `$anchor`."""
        if not isinstance(raw, dict):
            return
        own = raw.get("$id")
        if isinstance(own, str):
            base = _joined(base, own)[0]
        if isinstance(own, str) or at == "#":
            if base in self.resources:
                raise self.fail(at, f"$id {own!r} is used twice")
            self.resources[base] = at
        self.bases[at] = base
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(raw.get(key), str):
                self.anchors[base, raw[key]] = at
        for child, pointer in _children(raw, at):
            self.collect(child, pointer, base)

    def node(self, raw: Any, at: str, depth: int) -> Schema:
        if isinstance(raw, bool):
            return raw
        if not isinstance(raw, dict):
            raise self.fail(at, f"a schema must be an object or a boolean, got {_short(raw)}")
        if at in self.nodes:
            return self.nodes[at]
        self.num_nodes += 1
        if depth > MAX_DEPTH:
            raise self.fail(at, f"schemas are nested more than {MAX_DEPTH} deep")
        if self.num_nodes > MAX_NODES:
            raise self.fail(at, f"it holds more than {MAX_NODES} schemas")
        self.check_dialect(raw, at)
        read: Node = {AT: at}
        self.nodes[at] = read
        for key, value in self.modern(raw, at).items():
            if key in KEYWORDS:
                read[key] = self.value(KEYWORDS[key], key, value, at, depth)
            elif key in _HOLDERS:
                self.value(_HOLDERS[key], key, value, at, depth)
        if "$dynamicRef" in read:
            read.setdefault("allOf", []).append({AT: at, "$ref": read.pop("$dynamicRef")})
        return read

    def modern(self, raw: Node, at: str) -> Node:
        """Old spellings in today's: an array in `items`, `dependencies`."""
        raw = dict(raw)
        if isinstance(raw.get("items"), list):
            if "prefixItems" in raw:
                raise self.fail(f"{at}/items", "must be a schema beside prefixItems, got an array")
            raw = {("prefixItems" if key == "items" else key): value for key, value in raw.items() if key != "items" or value}
            if "additionalItems" in raw:
                raw["items"] = raw["additionalItems"]
        if isinstance(old := raw.pop("dependencies", None), dict):
            for name, value in old.items():
                key = "dependentRequired" if isinstance(value, list) else "dependentSchemas"
                today = raw.get(key, {})
                if not isinstance(today, dict) or name in today:
                    raise self.fail(f"{at}/dependencies/{_escape(name)}", f"comes twice, in {key} as well")
                raw[key] = {**today, name: value}
        return raw

    def check_dialect(self, raw: Node, at: str) -> None:
        dialect = raw.get("$schema", _TODAY)
        if not any(f"//json-schema.org/{name}/schema" in str(dialect) for name in DRAFTS):
            raise self.fail(at, f"$schema is {_short(dialect)}; drafts 6, 7, 2019-09 and 2020-12 are read")
        for key in ("$recursiveRef", "x-guidance"):
            if key in raw:
                raise self.fail(at, f"{key} is not supported")

    def value(self, shape: str, key: str, value: Any, at: str, depth: int) -> Any:
        """A keyword's value, with the schemas in it read."""
        here = f"{at}/{key}"
        if shape == "schema":
            return self.node(value, here, depth + 1)
        if shape == "schemas":
            if not isinstance(value, list) or not value:
                raise self.fail(here, f"must be an array of schemas and not empty, got {_short(value)}")
            return [self.node(each, f"{here}/{index}", depth + 1) for index, each in enumerate(value)]
        if shape == "schemas by name":
            if not isinstance(value, dict):
                raise self.fail(here, f"must be an object of schemas, got {_short(value)}")
            if len(value) > MAX_PROPERTIES:
                raise self.fail(here, f"has {len(value)} members, the limit is {MAX_PROPERTIES}")
            return {name: self.node(each, f"{here}/{_escape(name)}", depth + 1) for name, each in value.items()}
        if shape == "reference":
            return self.reference(key, value, at)
        wanted, fits = _SHAPES[shape]
        if not fits(value):
            raise self.fail(here, f"must be {wanted}, got {_short(value)}")
        if shape == "count":
            return int(value)
        if shape == "types":
            return [value] if isinstance(value, str) else list(dict.fromkeys(value))
        return value

    def reference(self, key: str, ref: Any, at: str) -> str:
        """The pointer that a reference leads to, which will be read."""
        here = f"{at}/{key}"
        if not isinstance(ref, str):
            raise self.fail(here, f"must be a text, got {_short(ref)}")
        if key == "$dynamicRef" and len(self.resources) > 1:
            raise self.fail(here, "$dynamicRef is not supported where schemas inside have an $id of their own")
        base = self.base_of(at)
        uri, fragment = _joined(base, ref)
        if (start := self.resources.get(uri)) is None:
            raise self.fail(here, f"{_short(ref)} leads out of this schema; only references into it are followed")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self.anchors.get((uri, fragment))
        else:
            found = start + fragment
            if self.find(found) is _MISSING:
                found = None
        if found is None:
            raise self.fail(here, f"{_short(ref)} leads nowhere")
        if found not in self.document.targets:
            self.document.targets[found] = True
            self.waiting.append(found)
        return found

    def base_of(self, at: str) -> str:
        while at not in self.bases and "/" in at:
            at = at.rpartition("/")[0]
        return self.bases.get(at, "")

    def find(self, pointer: str) -> Any:
        found = self.raw
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdecimal() and part.isascii() and int(part) < len(found):
                found = found[int(part)]
            else:
                return _MISSING
        return found


_MISSING = object()


def _children(raw: Node, at: str) -> Iterator[tuple[Any, str]]:
    """What lies where schemas can be, with pointers."""
    for key, value in raw.items():
        shape = KEYWORDS.get(key) or _HOLDERS.get(key)
        if shape == "schema" and not isinstance(value, list):
            yield value, f"{at}/{key}"
        elif shape in ("schema", "schemas") and isinstance(value, list):
            yield from ((each, f"{at}/{key}/{index}") for index, each in enumerate(value))
        elif shape == "schemas by name" and isinstance(value, dict):
            yield from ((each, f"{at}/{key}/{_escape(name)}") for name, each in value.items())


def _joined(base: str, reference: str) -> tuple[str, str]:
    """Where a reference leads, seen from `base`: an address, and a fragment of what is there."""
    if reference.startswith("#"):
        return base, reference[1:]
    try:
        found = urldefrag(reference if reference.startswith("urn:") else urljoin(base, reference))
    except ValueError:  # no address at all
        return reference, ""
    return found.url, found.fragment


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False).encode()
    except ValueError:
        return False
    return True


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_SHAPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "count": ("a whole number, 0 or more", lambda value: _is_number(value) and value >= 0 and value == int(value)),
    "number": ("a number", _is_number),
    "number above zero": ("a number above 0", lambda value: _is_number(value) and value > 0),
    "text": ("a text", lambda value: isinstance(value, str)),
    "names": ("an array of texts", _are_names),
    "names by name": (
        "an object of arrays of texts",
        lambda value: isinstance(value, dict) and all(map(_are_names, value.values())),
    ),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "types": (
        f"one or several of {', '.join(TYPES)}",
        lambda value: value in TYPES if isinstance(value, str) else _are_names(value) and value and set(value) <= set(TYPES),
    ),
    "value": ("a value without NaN and infinity", _is_json),
    "values": (
        "an array of values, not empty, without NaN and infinity",
        lambda v: isinstance(v, list) and len(v) > 0 and _is_json(v),
    ),
}


def json_depth(value: Any) -> int:
    """How deep a value is nested, without recursion; counted up to one more than what may be."""
    level = [value]
    for depth in range(MAX_JSON_DEPTH + 1):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [child for children in inner for child in children]
        if not level:
            return depth
    return MAX_JSON_DEPTH + 1


def in_place(node: Schema) -> Iterator[Schema]:
    """The schemas that apply to the same value as `node` does, without following its reference."""
    if isinstance(node, dict):
        for key in ("allOf", "anyOf", "oneOf"):
            yield from node.get(key, ())
        yield from (node[key] for key in ("not", "if", "then", "else") if key in node)
        yield from node.get("dependentSchemas", {}).values()


def _check_cycles(document: Document) -> None:
    """A reference that comes back to itself without going into the value would never end."""
    leads: dict[str, set[str]] = {}
    for at, target in document.targets.items():
        leads[at] = set()
        todo = [target]
        while todo:
            node = todo.pop()
            if isinstance(node, dict) and "$ref" in node:
                leads[at].add(node["$ref"])
            todo.extend(in_place(node))
    try:
        order = tuple(TopologicalSorter(leads).static_order())
    except CycleError as error:
        raise document.fail(error.args[1][0], "its references lead back to it without going into a value") from None
    depths: dict[str, int] = {}
    for at in order:
        depths[at] = 1 + max((depths[other] for other in leads[at]), default=0)
        if depths[at] > MAX_DEPTH // 2:
            raise document.fail(at, f"more than {MAX_DEPTH // 2} references follow one another")


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
