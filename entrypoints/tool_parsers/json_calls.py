"""JSON inside of calls: values that stream as they are written, and objects that name a function and its arguments.

Lenient where models are: what is told is the model's own text, valid JSON if it wrote valid JSON. Used by the syntaxes whose
calls are JSON objects, or have JSON arguments.
"""

from __future__ import annotations

import json
from collections.abc import Container

from halfbyte.entrypoints.answers.reading import NotACall, Sink, Steps, Text, limited

NAME_KEYS = frozenset({"name", "tool_name", "function_name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters", "args"})
_EARLY_KEYS = NAME_KEYS | {"type", "id"}  # of a call that no mark opens, up to its name
_SCALAR_ENDS = frozenset(",}] \t\r\n")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def json_value(text: Text, sink: Sink, *ends: str) -> Steps[None]:
    """Read one JSON value and pass its text on as it comes. `ends`: marks that end it too, outside of strings.

    Behind a number or a word one character must be there to tell its end, or the end of the text.
    """
    first = yield from text.peek()
    if first == '"':
        yield from _quoted(text, sink)
    elif first in "{[":
        yield from _nested(text, sink, ends)
    else:
        yield from _scalar(text, sink, ends)


def json_string(text: Text, sink: Sink) -> Steps[None]:
    """Read a JSON string and pass its characters on, decoded."""
    yield from text.expect('"')
    while True:
        mark = yield from text.until('"', "\\", sink=sink)
        if mark == '"':
            return
        sink((yield from _escape(text)))


def arguments_value(text: Text, *ends: str) -> Steps[None]:
    """Read a call's arguments: an object, or a string that holds one, or null, or nothing before one of `ends`."""
    if ends and (mark := (yield from text.accepts(*ends, drops_cut=True))) is not None:
        text.put_back(mark)
        return
    first = yield from text.peek()
    if first == '"':
        yield from json_string(text, text.arguments)
    elif first == "n":
        yield from json_value(text, lambda piece: None, *ends)  # null: no arguments
    else:
        yield from json_value(text, text.arguments, *ends)


def call_object(text: Text, *ends: str) -> Steps[None]:
    """Read `{"name": ..., "arguments": {...}}`, keys in any order, and tell the call. NotACall if it names nothing.

    ends: marks behind which nothing of the object can be, outside of strings.
    """
    yield from opened_calls(text, (yield from text.expect("{")), *ends)


def opened_calls(text: Text, bracket: str, *ends: str, names: Container[str] | None = None) -> Steps[None]:
    """Read a call object behind its `{`, or an array of them behind its `[`, as `bracket` says, and tell the calls.

    NotACall if the first of them is none, or there is none. names: where no mark says that a call begins, only these are names of
    functions, and they come before the arguments.
    """
    if bracket == "{":
        yield from _members(text, ends, names)
        return
    num_calls = text.num_calls
    while True:
        yield from text.skip_space()
        if (yield from text.accepts("]")) is not None:
            break
        if text.num_calls > num_calls:
            if ends and (end := (yield from text.accepts(*ends))) is not None:
                text.put_back(end)
                return
            text.open_call((yield from text.accepts(",")) or "")
            yield from text.skip_space()
        yield from text.expect("{")
        yield from _members(text, ends, names)
    if text.num_calls == num_calls:
        raise NotACall


def _members(text: Text, ends: tuple[str, ...], names: Container[str] | None) -> Steps[None]:
    name: str | None = None
    early: list[str] | None = None  # arguments that came before the name
    is_first = True
    while True:
        yield from text.skip_space()
        if (yield from text.accepts("}")) is not None:
            break
        if not is_first:
            yield from text.expect(",")
            yield from text.skip_space()
        is_first = False
        key = yield from _short_string(text)
        if names is not None and name is None and key not in _EARLY_KEYS:
            raise NotACall
        yield from text.skip_space()
        yield from text.expect(":")
        yield from text.skip_space()
        if key in NAME_KEYS and name is None:
            name = yield from _short_string(text)
            if names is not None and name not in names:
                raise NotACall
            text.start_call(name)
            text.arguments(_as_object("".join(early or ())))
        elif key in ARGUMENT_KEYS and name is not None and early is None:
            early = []
            yield from arguments_value(text, *ends)
        elif key in ARGUMENT_KEYS and name is None:
            early = []
            yield from json_value(text, early.append, *ends)
        else:
            yield from json_value(text, lambda piece: None, *ends)
    if name is None:
        raise NotACall
    text.end_call()


def _as_object(written: str) -> str:
    """Arguments that are there as a whole, as `arguments_value` would have told them."""
    if written.startswith('"'):
        try:
            return str(json.loads(written, strict=False))
        except ValueError:
            return written
    return "" if written == "null" else written


def _short_string(text: Text) -> Steps[str]:
    """A string as a key or a name may be."""
    found: list[str] = []
    yield from json_string(text, limited(found))
    return "".join(found)


def _escape(text: Text) -> Steps[str]:
    """The character of an escape whose backslash was read; what is no escape stays as it is."""
    kind = yield from text.peek()
    if kind != "u":
        text.take(1)
        return _ESCAPES.get(kind, kind)
    digits = yield from text.peek(5)
    text.take(5)
    first = _code(digits[1:])
    if not 0xD800 <= first < 0xDC00:
        return chr(first) if not 0xDC00 <= first < 0xE000 else "\N{REPLACEMENT CHARACTER}"
    if (yield from text.accepts("\\u")) is None:
        return "\N{REPLACEMENT CHARACTER}"
    second = _code((yield from text.peek(4)))
    text.take(4)
    if not 0xDC00 <= second < 0xE000:
        return "\N{REPLACEMENT CHARACTER}"
    return chr(0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00))


def _code(digits: str) -> int:
    try:
        return int(digits, 16)
    except ValueError:
        return 0xFFFD


def _quoted(text: Text, sink: Sink) -> Steps[None]:
    """A string with its quotes, as it is written."""
    sink(text.take(1))
    while True:
        mark = yield from text.until('"', "\\", sink=sink)
        sink(mark)
        if mark == '"':
            return
        yield from text.peek()
        sink(text.take(1))


def _nested(text: Text, sink: Sink, ends: tuple[str, ...]) -> Steps[None]:
    depth = 0
    while True:
        mark = yield from text.until('"', "{", "[", "}", "]", *ends, sink=sink)
        if mark == '"':
            text.put_back(mark)
            yield from _quoted(text, sink)
            continue
        if mark in ends:
            text.put_back(mark)
            return
        sink(mark)
        depth += 1 if mark in "{[" else -1
        if depth == 0:
            return


def _scalar(text: Text, sink: Sink, ends: tuple[str, ...]) -> Steps[None]:
    """A number or a word: what stands before the next separator."""
    stops = tuple(_SCALAR_ENDS) + ends
    mark = yield from text.until(*stops, sink=sink)
    text.put_back(mark)
