"""Regular expressions of an operator that read the head of a call, or of a parameter, around one named group.

They meet a model's text, so they are kept harmless: one place, at most `MAX_HEAD_CHARS` characters, no repeated groups. The same
expression reads a head and, with a name in place of the group, writes it in a grammar. Used by the syntax `regex`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from halfbyte.entrypoints.answers.reading import Steps, Text

MAX_HEAD_CHARS = 160
_LEADING_SPACE = re.compile(r"(?:(?:\\s|\\n|\\t|[ \n\t])(?:[*+?]\??|\{\d*,?\d*\}\??)?)*")


class PatternError(ValueError):
    """What is wrong with an expression."""


@dataclass(frozen=True, slots=True)
class HeadPattern:
    """pattern: the expression without the white space that it begins with. before, group, behind: its parts."""

    pattern: re.Pattern[str]
    before: str
    group: str
    behind: str

    def read(self, text: Text) -> Steps[str | None]:
        """Skip white space, read the shortest text that is a head as a whole, and give its group; None, no more read, if none is.

        The shortest one is the same whatever follows, so that nothing depends on how much text has come.
        """
        yield from text.skip_space()
        for count in range(1, MAX_HEAD_CHARS + 1):
            found = self.pattern.fullmatch((yield from text.peek(count)))
            if found is not None:
                text.take(count)
                return found.group(1).strip()
        return None

    def fits(self, name: str) -> bool:
        """Whether a head can have this name."""
        return re.fullmatch(self.group, name) is not None

    @property
    def terms(self) -> tuple[str, str]:
        """What stands before and behind the name, as Lark terms, "" for nothing."""
        return _lark(self.before), _lark(self.behind)


def head_pattern(source: str, group: str) -> HeadPattern:
    """PatternError unless readers and grammars understand the expression alike, at a bounded price."""
    before, inside, behind = _parts(source, group)
    try:
        pattern = re.compile(source[_space_chars(source) :])
        for part in (before, inside, behind):
            re.compile(part)
    except re.error as error:
        raise PatternError(f"is no regular expression: {error}") from None
    if re.fullmatch(behind, "") is not None:
        raise PatternError(f"must end with what stands behind (?P<{group}>...): there is no other way to know where that ends")
    return HeadPattern(pattern, before, inside, behind)


def _space_chars(source: str) -> int:
    space = _LEADING_SPACE.match(source)
    return space.end() if space is not None else 0


def _parts(source: str, group: str) -> tuple[str, str, str]:
    """What stands before the named group, the group, and what stands behind it. It must be outside of all others."""
    opening = f"(?P<{group}>"
    start = end = None
    depth = at = 0
    while at < len(source):
        char = source[at]
        if char == "\\":
            if source[at + 1 : at + 2].isdigit():
                raise PatternError("must not refer back to what it matched")
            at += 1
        elif char == "[":
            at = _class_end(source, at)
        elif char == "(":
            if start is None and depth == 0 and source.startswith(opening, at):
                start = at
            elif not source.startswith("(?:", at):
                raise PatternError(f"may have one group {opening}...), outside of others, and besides it only (?:...)")
            depth += 1
        elif char == ")":
            depth -= 1
            if source.startswith(("*", "+", "{"), at + 1):
                raise PatternError("must not repeat a group, which can take forever")
            if depth == 0 and start is not None and end is None:
                end = at + 1
        elif char == "|" and depth == 0:
            raise PatternError("must put alternatives into (?:...)")
        at += 1
    if start is None or end is None:
        raise PatternError(f"needs a group {opening}...)")
    return source[:start], source[start:end], source[end:]


def _class_end(source: str, at: int) -> int:
    """Where the `]` is of the class of characters that begins at `at`; the end of the text if there is none."""
    at += 2 if source.startswith("[^", at) else 1
    if source.startswith("]", at):
        at += 1
    while at < len(source) and source[at] != "]":
        at += 2 if source[at] == "\\" else 1
    return at


def _lark(pattern: str) -> str:
    import llguidance

    return f"/{llguidance.regex_to_lark(pattern)}/" if pattern else ""
