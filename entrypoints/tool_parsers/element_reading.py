"""Reads the parameters of calls that write them as elements.

Values are plain texts in which nothing is quoted. One ends where a mark stands that is followed by what may follow it; what only
looks like a mark is text, and so is what stands in the strings of JSON. Knows marks; what a value means is `typed`'s. Called by
the syntaxes that have such parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from halfbyte.entrypoints.answers.reading import EndOfText, NotACall, Steps, Text, limited
from halfbyte.entrypoints.tool_parsers.element_shapes import ParameterShape, Sign
from halfbyte.entrypoints.tool_parsers.typed import ArgumentsWriter

_NO_NAME = re.compile("[\\s<>{}\"'\ud800-\udfff]")
_NO_KEY = re.compile("[\n<\ud800-\udfff]")


def is_name(text: str) -> bool:
    """Whether a function can have this name: what holds space, quotes or marks is some other text."""
    return bool(text) and _NO_NAME.search(text) is None


def is_key(text: str) -> bool:
    """Whether a parameter can have this name."""
    return bool(text) and text == text.strip() and _NO_KEY.search(text) is None


class ParameterReader:
    """Reads parameters of one shape. call_ends: the marks that end a call -> what may come behind them, () for anything."""

    def __init__(self, shape: ParameterShape, call_ends: Mapping[Sign, tuple[Sign, ...]]) -> None:
        self._opening, self._close, self._pad = shape.opening.read, shape.close.read, shape.pad
        self._key_ends = {end.read: types for end, types in shape.key_ends.items()}
        self._value_opening = shape.value_opening
        self._next = (self._opening, *(end.read for end in call_ends))
        # What may end a value, as it is looked for -> the mark that it is, and what must follow.
        ends: dict[str, tuple[str, tuple[str, ...]]] = dict.fromkeys(shape.opening.endings, (self._opening, ()))
        for end, behind in call_ends.items():
            ends |= dict.fromkeys(end.endings, (end.read, tuple(mark.read for mark in behind)))
        self._value_ends = ends | dict.fromkeys((self._close, self._pad + self._close), (self._close, self._next))
        # The strings of JSON hold no line breaks, so that these end a value also where a quote was forgotten. Tokens do, too.
        tokens = {sign.read for sign in (shape.close, shape.opening, *call_ends) if sign.is_token}
        self._ends_in_quotes = frozenset(end for end in self._value_ends if end.startswith("\n") or end in tokens)

    def read(self, text: Text, writer: ArgumentsWriter) -> Steps[str]:
        """Read all parameters of a call that has been started, and the mark that ends it. Returns that one."""
        mark = yield from self._read_next(text, writer)
        while mark == self._opening:
            mark = yield from self._parameter(text, writer)
            if mark == self._close:
                mark = yield from self._read_next(text, writer)
        writer.close()
        return mark

    def _read_next(self, text: Text, writer: ArgumentsWriter) -> Steps[str]:
        """The mark behind a parameter. If the answer ends here with all that the tool requires, so does the call."""
        try:
            yield from text.skip_space()
            return (yield from text.until(*self._next, sink=text.content, drops_cut=True))
        except EndOfText:
            if writer.has_required and not text.was_cut:
                writer.close()
            raise

    def _parameter(self, text: Text, writer: ArgumentsWriter) -> Steps[str]:
        """Read a parameter behind its opening mark, and the mark that ends it, which may not be its own. Returns that one."""
        found: list[str] = []
        try:
            end = yield from text.until(*self._key_ends, sink=limited(found))
        except NotACall:
            end = ""
        key = "".join(found).strip()
        if not end or not is_key(key):
            text.content(self._opening + "".join(found) + end)
            return self._close
        if self._value_opening is not None:
            yield from text.skip_space()
            yield from text.accepts(self._value_opening.read)
        writer.begin(key, self._key_ends[end])
        if self._pad:
            yield from text.accepts(self._pad)
        mark = yield from self._value(text, writer)
        writer.end()
        return mark

    def _value(self, text: Text, writer: ArgumentsWriter) -> Steps[str]:
        """Pass a value on, and read the mark that ends it. Returns that mark."""
        while True:
            found = yield from text.until(*self._value_ends, sink=writer.feed, drops_cut=True)
            mark, behind = self._value_ends[found]
            is_mark = found in self._ends_in_quotes or not writer.is_in_quotes
            if is_mark and (not behind or (yield from text.follows(*behind))):
                return mark
            writer.feed(found)
