"""Finding what opens and closes the regions of an answer that comes in pieces.

Knows texts and regular expressions; knows no template and no calls. A delimiter is found at the same place however the answer is
cut: what may become one is held back, and one that is longer than MAX_DELIMITER_CHARS is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import regex

from halfbyte.entrypoints.answers.reading import EndOfText, Sink, Steps, Text
from halfbyte.entrypoints.tool_parsers.hf_patterns import atoms

MAX_DELIMITER_CHARS = 512
# Patterns see this much at a time: a search costs little, whatever the model writes.
_WINDOW_CHARS = 1024
# Of the processor, for one look at one window: a pattern that takes more is given up, and with it the rest of the answer.
_TIMEOUT_S = 1.0

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Found:
    """A delimiter in a text, from `start` to `end`. is_whole: False while it may still become another or none."""

    start: int
    end: int
    is_whole: bool
    text: str
    groups: dict[str, str]


class Pattern:
    """A delimiter. source: as a regular expression. crosses: whether one of no length, as `(?=x)` is, counts."""

    def __init__(self, source: str, *, crosses: bool = False) -> None:
        self._found, self._alive, self._is_lazy = _compiled(source)
        self._crosses = crosses

    def find(self, buffer: str, at: int, stop: int, ended: bool) -> Found | None:
        """The first one that begins between `at` and `stop`, or what may become one."""
        is_final = ended and stop == len(buffer)
        while at < stop or (at == stop == len(buffer)):
            whole = self._found.search(buffer, at, stop, timeout=_TIMEOUT_S)
            alive = None if is_final else self._alive.search(buffer, at, stop, partial=True, timeout=_TIMEOUT_S)
            starts = [match.start() for match in (whole, alive) if match is not None and match.start() < len(buffer)]
            at = min([*starts, stop])
            if (found := self.match(buffer, at, ended)) is not None:
                return found
            at += 1
        return None

    def match(self, buffer: str, at: int, ended: bool) -> Found | None:
        """The one at `at`, or what may become one there."""
        edge = len(buffer)
        fits = edge - at >= MAX_DELIMITER_CHARS
        stop = at + MAX_DELIMITER_CHARS if fits else edge
        is_final = fits or ended
        match = self._found.match(buffer, at, stop, partial=not is_final, timeout=_TIMEOUT_S)
        if match is None or (match.start() == match.end() and not self._crosses and not match.partial):
            return None
        is_whole = is_final or not (match.partial or self._may_change(buffer, at, match.end(), edge))
        groups = {name: value for name, value in match.groupdict().items() if value is not None}
        return Found(at, match.end(), is_whole, match.group(), groups)

    def _may_change(self, buffer: str, at: int, end: int, edge: int) -> bool:
        """Whether more text can make another match of the one from `at` to `end`."""
        if at == end == edge:
            return True
        if self._is_lazy:  # its longer matches stay possible for ever, and never count
            return end == edge
        return self._alive.match(buffer, at, edge, partial=True, timeout=_TIMEOUT_S) is not None


class Delimiters(Generic[Key]):
    """Delimiters that are watched together: the one that begins first counts, of several there the longest, then the first."""

    def __init__(self, watched: Sequence[tuple[Key, Pattern]]) -> None:
        self._watched = watched

    def until(self, text: Text, sink: Sink) -> Steps[tuple[Key, Found]]:
        """Pass text to `sink` up to the first delimiter and read that. EndOfText, after all was passed on, if there is none."""
        while True:
            buffer, at = text.unread
            try:
                found, hold = self._first(buffer, at, text.ended)
            except TimeoutError:
                raise EndOfText from None
            end = hold if found is None else found[1].start
            if end > at:
                sink(text.take(end - at))
            if found is not None:
                text.take(found[1].end - found[1].start)
                return found
            yield from text.more()

    def _first(self, buffer: str, at: int, ended: bool) -> tuple[tuple[Key, Found] | None, int]:
        """(the first delimiter from `at` on, where what may become one begins)."""
        edge = len(buffer)
        while True:
            stop = edge if edge - at <= _WINDOW_CHARS + MAX_DELIMITER_CHARS else at + _WINDOW_CHARS
            found = [(key, one) for key, pattern in self._watched if (one := pattern.find(buffer, at, stop, ended)) is not None]
            hold = min((one.start for _, one in found if not one.is_whole), default=edge)
            whole = [(key, one) for key, one in found if one.is_whole and (one.start < hold or ended)]
            if whole:
                return min(whole, key=lambda pair: (pair[1].start, -pair[1].end)), hold
            if hold < edge or stop == edge:
                return None, hold
            at = stop

    def accepts(self, text: Text) -> Steps[bool]:
        """Read a delimiter if one comes next. At the end of the text there is none."""
        while True:
            buffer, at = text.unread
            all_found = [found for _, pattern in self._watched if (found := pattern.match(buffer, at, text.ended)) is not None]
            whole = [found for found in all_found if found.is_whole]
            if all_found and len(whole) == len(all_found):
                text.take(max(found.end for found in whole) - at)
                return True
            if not all_found:
                return False
            yield from text.more()


@lru_cache(maxsize=1024)
def _compiled(source: str) -> tuple[regex.Pattern[str], regex.Pattern[str], bool]:
    """(the pattern, one that never matches but in part: where more text may bring a match, whether it prefers short matches)."""
    is_lazy = any(piece.kind == "repeat" and piece.source[1:].endswith("?") for piece in atoms(source))
    return regex.compile(source, regex.DOTALL), regex.compile(f"(?:{source})(?!)", regex.DOTALL), is_lazy
