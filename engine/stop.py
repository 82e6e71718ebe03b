"""Stop strings in a growing text: found as soon as they are complete, held back only while they still could be.

Knows characters; knows no tokens, requests or parsers. Called by the output processor once per token. The result does not
depend on how the text is cut into pieces.

Which match counts: the text is read character by character, and the first character that completes a stop string ends the
generation; of several strings that it completes, the longest (the one that began first) counts.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one text for any of `stops`. `include`: the text that is given out ends with the match, else before it.

    Costs O(1) per character and stop string, amortised, however long the text and the strings are.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._first_chars = {stop[0] for stop in stops}
        self._include = include
        self._held = ""
        self._done = False

    def feed(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """(what may be given out, the stop string that `text` completed or None).

        may_stop=False: a match that ends in `text` does not count, one that only begins in it does. After a match nothing
        more comes out.
        """
        if self._done:
            return "", None
        if not self._held and self._first_chars.isdisjoint(text):
            return text, None
        for index, char in enumerate(text):
            if (match := self._step(char, may_stop)) is not None:
                self._done = True
                seen = self._held + text[: index + 1]
                self._held = ""
                return seen if self._include else seen[: len(seen) - len(match)], match
        seen = self._held + text
        num_held = max(matcher.num_matched for matcher in self._matchers)
        self._held = seen[len(seen) - num_held :]
        return seen[: len(seen) - num_held], None

    def finish(self) -> str:
        """What is still held back: the text ended before it became a stop string."""
        held, self._held = self._held, ""
        self._done = True
        return held

    def _step(self, char: str, may_stop: bool) -> str | None:
        longest = ""
        for matcher in self._matchers:
            if matcher.step(char) and may_stop and len(matcher.pattern) > len(longest):
                longest = matcher.pattern
        return longest or None


class _Matcher:
    """One pattern by Knuth, Morris and Pratt. num_matched: length of the longest proper prefix that the text ends with.

    The failure table is filled as far as the text has ever matched, so a huge pattern costs nothing by itself.
    """

    __slots__ = ("_fallbacks", "num_matched", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.num_matched = 0
        self._fallbacks = [0]  # [n - 1]: longest border of the first n characters

    def step(self, char: str) -> bool:
        """Read one character. True if it completes the pattern; then matching goes on with the longest border."""
        self.num_matched = self._advance(self.num_matched, char)
        if self.num_matched < len(self.pattern):
            return False
        self.num_matched = self._border(len(self.pattern))
        return True

    def _advance(self, num_matched: int, char: str) -> int:
        while num_matched and self.pattern[num_matched] != char:
            num_matched = self._border(num_matched)
        return num_matched + (self.pattern[num_matched] == char)

    def _border(self, length: int) -> int:
        while len(self._fallbacks) < length:
            border = self._fallbacks[-1]
            char = self.pattern[len(self._fallbacks)]
            self._fallbacks.append(self._advance(border, char))
        return self._fallbacks[length - 1]
