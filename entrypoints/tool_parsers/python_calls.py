"""Calls as Python writes them: `f(a=1, b="x")`, with literals as arguments, told as JSON while they are read.

Reads literals and nothing else: nothing is evaluated. Lenient where models are: JSON's words for true, false and null, hyphens in
names, words without quotes. Knows Python's syntax and JSON's; knows no mark. Used by the syntaxes of `pythonic`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container

from halfbyte.entrypoints.answers.reading import MAX_NAME_CHARS, NotACall, Sink, Steps, Text, limited

MAX_SCALAR_CHARS = 4096
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_OCTAL, _HEX = "01234567", "0123456789abcdefABCDEF"
_NUM_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_QUOTES = ('"""', "'''", '"', "'")
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_SCALAR_ENDS = (*",)]}:([{=\"'", " ", "\t", "\r", "\n")
_INTEGER = re.compile(r"([+-]?)0*([0-9](?:_?[0-9])*)")
_BASED = re.compile(r"([+-]?)(0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+)")
_FLOAT = re.compile(r"([+-]?)([0-9][0-9_]*)?(?:\.([0-9][0-9_]*)?)?([eE][+-]?[0-9][0-9_]*)?")
_WORD = re.compile(r"[^\W\d](?:\w|[.-])*|\d+(?:[-/]\d+)+")


def is_name(text: str) -> bool:
    """Whether `text` can be the name of a function or of a parameter in this syntax."""
    return 0 < len(text) <= MAX_NAME_CHARS and all(map(_is_of_name, text))


def python_calls(text: Text, *, is_list: bool, names: Container[str] | None = None) -> Steps[None]:
    """Read calls with commas, lines or nothing between them, behind what `Text.open_call` was told. NotACall if there is none.

    is_list: a bracket was read, and one closes the calls. names: where no mark says that a call begins, only these are functions.
    """
    while True:
        yield from text.skip_space()
        yield from _call(text, names)
        yield from text.skip_space()
        yield from text.accepts(",")
        yield from text.skip_space()
        if is_list and (yield from text.accepts("]")) is not None:
            return
        if not _is_of_name((yield from text.peek())):
            return
        text.open_call("")


def python_value(text: Text, sink: Sink) -> Steps[None]:
    """Read one literal and pass it on as JSON: strings as they come, other scalars once they are complete.

    Behind a number or a word one character must be there to tell its end. NotACall where something else stands.
    """
    inside: list[_Container] = []
    while True:
        opening = yield from text.accepts(*_CLOSING)
        if opening is None:
            yield from _scalar(text, sink)
        else:
            inside.append(_Container(opening, sink))
            sink = inside[-1].sink
        while inside and not (yield from _next_item(text, inside[-1])):
            sink = inside.pop().close()
        if not inside:
            return


class _Container:
    """A list, tuple or dict that is being read. A tuple is kept until its end: one value in parentheses is none."""

    def __init__(self, opening: str, sink: Sink) -> None:
        self.closing = _CLOSING[opening]
        self.num_items = 0
        self.has_comma = False
        self._outer = sink
        self._held: list[str] = []
        self.sink: Sink = self._held.append if opening == "(" else sink
        if opening != "(":
            self.sink(opening)

    def close(self) -> Sink:
        """Its last item is complete. Returns where to go on."""
        if self.closing != ")":
            self.sink(self.closing)
        elif self.num_items == 1 and not self.has_comma:
            self._outer("".join(self._held))
        else:
            self._outer(f"[{''.join(self._held)}]")
        return self._outer


def _next_item(text: Text, container: _Container) -> Steps[bool]:
    """Read what is before the next item's value. False behind the last one: the closing bracket is read."""
    yield from text.skip_space()
    container.has_comma = container.num_items > 0 and (yield from text.accepts(",")) is not None
    yield from text.skip_space()
    if (yield from text.accepts(container.closing)) is not None:
        return False
    if container.num_items:
        if not container.has_comma:
            raise NotACall
        container.sink(", ")
    container.num_items += 1
    if container.closing == "}":
        container.sink((yield from _dict_key(text)) + ": ")
    return True


def _dict_key(text: Text) -> Steps[str]:
    """A key with its colon, as a JSON string."""
    found: list[str] = []
    yield from _scalar(text, limited(found, MAX_SCALAR_CHARS))
    yield from text.skip_space()
    yield from text.expect(":")
    yield from text.skip_space()
    key = "".join(found)
    return key if key.startswith('"') else json.dumps(key)


def _call(text: Text, names: Container[str] | None) -> Steps[None]:
    name = yield from _name(text)
    if names is not None and name not in names:
        raise NotACall
    yield from text.skip_space()
    yield from text.expect("(")
    num_parameters = 0
    while (parameter := (yield from _next_parameter(text, is_first=num_parameters == 0))) is not None:
        if num_parameters == 0:
            text.start_call(name)
        text.arguments(("{" if num_parameters == 0 else ", ") + f"{json.dumps(parameter, ensure_ascii=False)}: ")
        num_parameters += 1
        yield from text.skip_space()
        yield from python_value(text, text.arguments)
    if num_parameters:
        text.arguments("}")
    else:
        text.start_call(name)
    text.end_call()


def _next_parameter(text: Text, *, is_first: bool) -> Steps[str | None]:
    """Read up to a parameter's value. None behind the last one, with the closing bracket read."""
    yield from text.skip_space()
    has_comma = is_first or (yield from text.accepts(",")) is not None
    yield from text.skip_space()
    if (yield from text.accepts(")")) is not None:
        return None
    if not has_comma:
        raise NotACall
    parameter = yield from _name(text)
    yield from text.skip_space()
    yield from text.expect("=")
    return parameter


def _name(text: Text) -> Steps[str]:
    name = ""
    while _is_of_name((yield from text.peek())):
        name += text.take(1)
        if len(name) > MAX_NAME_CHARS:
            raise NotACall
    if not name:
        raise NotACall
    return name


def _is_of_name(char: str) -> bool:
    return char.isalnum() or char in "_.-"


def _scalar(text: Text, sink: Sink) -> Steps[None]:
    quote = yield from text.accepts(*_QUOTES)
    if quote is not None:
        yield from _string(text, quote, sink)
        return
    found: list[str] = []
    mark = yield from text.until(*_SCALAR_ENDS, sink=limited(found, MAX_SCALAR_CHARS))
    text.put_back(mark)
    if mark in ("(", "[", "{", "=", '"', "'"):
        raise NotACall
    sink(_scalar_as_json("".join(found)))


def _string(text: Text, quote: str, sink: Sink) -> Steps[None]:
    """The rest of a string whose opening quote was read; its content goes on byte for byte."""
    sink('"')
    while True:
        mark = yield from text.until(quote, "\\", sink=lambda piece: sink(_inside_json(piece)))
        if mark == quote:
            sink('"')
            return
        sink((yield from _escape(text)))


def _escape(text: Text) -> Steps[str]:
    """What an escape means, inside a JSON string; its backslash was read. What is no escape stays as it is written."""
    kind = yield from text.peek()
    text.take(1)
    if kind in _ESCAPES:
        return _inside_json(_ESCAPES[kind])
    if kind in _OCTAL:
        return json.dumps(chr(int(kind + (yield from _digits(text, _OCTAL, 2)), 8)))[1:-1]
    num_digits = _NUM_HEX_DIGITS.get(kind, 0)
    digits = yield from _digits(text, _HEX, num_digits)
    if not digits or len(digits) < num_digits or int(digits, 16) > 0x10FFFF:
        return _inside_json(f"\\{kind}{digits}")
    if kind == "u":
        return f"\\u{digits}"  # halves of a surrogate pair stay what they are: JSON puts them together
    return json.dumps(chr(int(digits, 16)))[1:-1]


def _digits(text: Text, allowed: str, max_digits: int) -> Steps[str]:
    digits = ""
    while len(digits) < max_digits and (yield from text.peek()) in allowed:
        digits += text.take(1)
    return digits


def _inside_json(piece: str) -> str:
    return json.dumps(piece, ensure_ascii=False)[1:-1]


def _scalar_as_json(word: str) -> str:
    """A number, True, False, None, or a word that lacks its quotes. NotACall for anything else."""
    if (known := _WORDS.get(word)) is not None:
        return known
    if (match := _INTEGER.fullmatch(word)) is not None:
        return _signed(match[1], match[2])
    if (match := _BASED.fullmatch(word)) is not None:
        return _signed(match[1], _decimal(match[2]))
    if _WORD.fullmatch(word) is not None:
        return json.dumps(word, ensure_ascii=False)
    if (match := _FLOAT.fullmatch(word)) is not None and (match[2] or match[3]):
        point = f".{match[3] or 0}" if "." in word else ""
        return _signed(match[1], f"{(match[2] or '0').lstrip('0_') or '0'}{point}{match[4] or ''}")
    raise NotACall


def _signed(sign: str, digits: str) -> str:
    return ("-" if sign == "-" else "") + digits.replace("_", "")


def _decimal(digits: str) -> str:
    """An integer with a prefix of its base, in the base of JSON."""
    try:
        return str(int(digits, 0))
    except ValueError:
        raise NotACall from None
