"""Arguments that a model writes as plain texts, one per parameter, told as the text of a JSON object.

What a text means follows from the tool's schema: a string streams as it comes, byte for byte; any other value waits until it is
complete. Knows JSON schemas as `variants` takes them apart; knows no syntax. Used by those with one element per parameter.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.reading import Sink
from halfbyte.entrypoints.tool_parsers.variants import variants

MAX_LITERAL_CHARS = 10_000
# Clients written in Python read no whole number that is much longer.
_MAX_DIGITS = 4000
_INTEGER = re.compile(r"([+-]?[0-9]+)(?:\.0*)?", re.ASCII)
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", re.ASCII)


def types_of(tool: Tool | None, name: str) -> tuple[str, ...]:
    """The JSON types that a parameter may have, in the order of its schema; () where nothing is known of it."""
    properties = tool.parameters.get("properties") if tool is not None else None
    if tool is None or not isinstance(properties, Mapping) or name not in properties:
        return ()
    return tuple(dict.fromkeys(v["type"] for v in variants(properties[name], tool.parameters) if v.get("type") in _TYPES))


class ArgumentsWriter:
    """Writes one call's arguments to `sink`: parameters in the order of the model. tool: None where the function is unknown."""

    def __init__(self, tool: Tool | None, sink: Sink) -> None:
        self._tool = tool
        self._sink = sink
        self._names: set[str] = set()
        self._held: list[str] | None = None
        self._types: tuple[str, ...] = ()
        self._quote = ""  # the quote that is open in what is held, and a backslash if the next character is escaped

    def begin(self, name: str, types: tuple[str, ...] | None = None) -> None:
        """A parameter begins. types: what it may be, where the model itself says so; else the schema does."""
        self._sink(("{" if not self._names else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._names.add(name)
        self._types = types_of(self._tool, name) if types is None else types
        self._held = None if set(self._types) <= {"string"} else []
        self._quote = ""
        if self._held is None:
            self._sink('"')

    def feed(self, piece: str) -> None:
        """More of its text."""
        if self._held is not None:
            self._held.append(piece)
            self._quote = _quote_behind(piece, self._quote)
        elif piece:
            self._sink(json.dumps(piece, ensure_ascii=False)[1:-1])

    def end(self) -> None:
        """The parameter is complete."""
        self._sink('"' if self._held is None else as_json("".join(self._held), self._types))

    @property
    def is_in_quotes(self) -> bool:
        """Whether the text so far is a list or an object, and ends within one of its strings."""
        if not self._quote or self._held is None or "string" in self._types:
            return False
        self._held = ["".join(self._held)]
        return self._held[0].lstrip().startswith(("{", "["))

    @property
    def has_required(self) -> bool:
        """Whether the tool is known, and nothing that it requires is missing."""
        if self._tool is None:
            return False
        required = self._tool.parameters.get("required")
        return all(name in self._names for name in required if isinstance(name, str)) if isinstance(required, list) else True

    def close(self) -> None:
        """The call is complete."""
        self._sink("}" if self._names else "{}")


def as_json(text: str, types: tuple[str, ...]) -> str:
    """The value that `text` means, as JSON. types: what it may be.

    JSON of one of the types stays as it is written. Else it is the first type that it can be with good will: space around it,
    `True`, `None`, `1` for true, `+5` or `5.0` for 5, Python's lists and dicts. Where a string is among the types, all others go
    before it, but a text with space around it is a string. A null is understood even where none is allowed, unless it may be a
    string. What fits nothing is told as a string, so that no text is lost.
    """
    value = text.strip()
    is_exact = "string" not in types or value == text
    if is_exact and _json_type(value) & set(types):
        return value
    for kind in types if is_exact else ():
        read = _READERS.get(kind)
        if read is not None and (found := read(value)) is not None:
            return found
    if "string" not in types and _null(value) is not None:
        return "null"
    return json.dumps(text, ensure_ascii=False)


def _quote_behind(text: str, quote: str) -> str:
    """The quote that is open behind `text` if `quote` is before it."""
    for char in text:
        if quote.endswith("\\"):
            quote = quote[0]
        elif not quote:
            quote = char if char in "\"'" else ""
        elif char == "\\":
            quote += char
        elif char == quote:
            quote = ""
    return quote


def _json_type(text: str) -> set[str]:
    """The types of the JSON that `text` is, strings apart; none if it is not JSON."""
    if text[:1] in ("{", "["):
        try:
            json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return set()
        return {"object" if text[0] == "{" else "array"}
    if text in ("true", "false"):
        return {"boolean"}
    if text == "null":
        return {"null"}
    if len(text) > _MAX_DIGITS or _JSON_NUMBER.fullmatch(text) is None:
        return set()
    return {"number"} if "." in text or "e" in text.lower() else {"integer", "number"}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _integer(text: str) -> str | None:
    found = _INTEGER.fullmatch(text)
    return None if found is None or len(text) > _MAX_DIGITS else str(int(found[1]))


def _number(text: str) -> str | None:
    if "." not in text and (whole := _integer(text)) is not None:
        return whole
    try:
        value = float(text) if "_" not in text else math.nan
    except ValueError:
        return None
    return json.dumps(value) if math.isfinite(value) else None


def _boolean(text: str) -> str | None:
    return {"true": "true", "1": "true", "false": "false", "0": "false"}.get(text.lower())


def _null(text: str) -> str | None:
    return "null" if text in ("null", "None") else None


def _of_kind(*kinds: type) -> Callable[[str], str | None]:
    """Reads what is nearly JSON (bare control characters in strings), or a literal of Python."""

    def read(text: str) -> str | None:
        if text[:1] not in ("{", "[", "("):
            return None
        for load in (_loose_json, _python_literal):
            try:
                value = load(text)
                if isinstance(value, kinds):
                    return json.dumps(value, ensure_ascii=False, allow_nan=False)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue
        return None

    return read


def _loose_json(text: str) -> Any:
    return json.loads(text, strict=False)


def _python_literal(text: str) -> Any:
    if len(text) > MAX_LITERAL_CHARS:
        raise ValueError("too long")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a wrong escape in the model's text
        return ast.literal_eval(text)


_READERS: dict[str, Callable[[str], str | None]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
    "array": _of_kind(list, tuple),
    "object": _of_kind(dict),
}
_TYPES = frozenset(_READERS) | {"string"}
