"""Regular expressions as people write them, in the dialect that llguidance takes (that of Rust's regex crate).

Knows ECMA-262, which JSON schemas use and Python mostly shares: where the two dialects differ, the text is rewritten so that it
means the same, or refused. It must not know JSON schemas or grammars. Called by `json_schema` and `source_forms`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_CHARS = 10_000
MAX_DEPTH = 50
# How many symbols the expression has with its counted repeats written out.
MAX_SYMBOLS = 20_000

# What ECMA-262 calls white space and line ends; Rust's `\s` and `.` are other sets.
_SPACE = r"\t\n\x0B\f\r \x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
# In JSON these cannot be written without `\\u`, which is not used: each text has one spelling.
UNWRITABLE = r"\x00-\x07\x0B\x0E-\x1F\x7F"
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACE}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_LINE_ENDS = r"\n\r\x{2028}\x{2029}"
_NOTHING = r"[^\x{0}-\x{10FFFF}]"
_REPEAT = re.compile(r"\{(\d{1,9})(?:(,)(\d{1,9})?)?\}")
_PROPERTY = re.compile(r"\{[A-Za-z0-9_=]{1,64}\}")


class RegexError(ValueError):
    """An expression that cannot be taken, and why."""


@dataclass(slots=True)
class _Group:
    """An open group. symbols, last: of the branch at hand, and of its last atom. first: nothing stands before this place.

    ends: a `$` has closed the branch at hand, any_ends: or an earlier one. anchored: the group holds an anchor.
    """

    first: bool
    symbols: int = 0
    last: int = 0
    starts_first: bool = True
    ends: bool = False
    any_ends: bool = False
    anchored: bool = False
    done: int = 0


@dataclass(slots=True)
class _Reader:
    """Walks over one expression. whole: it must match all of a text, so that anchors are certain or impossible."""

    text: str
    whole: bool
    at: int = 0
    out: list[str] = field(default_factory=list)
    groups: list[_Group] = field(default_factory=lambda: [_Group(first=True)])

    def read(self) -> str:
        while self.at < len(self.text):
            char = self.text[self.at]
            self.at += 1
            match char:
                case "(":
                    self.open_group()
                case ")":
                    self.close_group()
                case "|":
                    self.next_branch()
                case "*" | "+" | "?" | "{":
                    self.repeat(char)
                case "^" | "$":
                    self.anchor(char)
                case "[":
                    self.atom(self.bracket())
                case ".":
                    self.atom(self.char_class(_LINE_ENDS, negated=True))
                case "\\":
                    self.atom(self.escape())
                case _:
                    self.atom(self.one(char))
        if len(self.groups) > 1:
            raise RegexError("a group is not closed")
        return "".join(self.out)

    def atom(self, translated: str, symbols: int = 1) -> None:
        group = self.groups[-1]
        if group.ends:
            raise RegexError("'$' stands before something: nothing can follow the end")
        group.symbols += symbols
        group.last = symbols
        group.first = False
        self.out.append(translated)

    def open_group(self) -> None:
        if self.text.startswith("?", self.at):
            found = re.compile(r"\?(?::|P?<([A-Za-z_]\w*)>)").match(self.text, self.at)
            if found is None:
                raise RegexError(f"'({self.text[self.at : self.at + 3]}' is not supported: no lookaround, flags or conditions")
            self.at = found.end()
        if self.groups[-1].ends:
            raise RegexError("'$' stands before something: nothing can follow the end")
        if len(self.groups) > MAX_DEPTH:
            raise RegexError(f"groups are nested more than {MAX_DEPTH} deep")
        first = self.groups[-1].first
        self.groups.append(_Group(first=first, starts_first=first))
        self.out.append("(?:")

    def close_group(self) -> None:
        if len(self.groups) == 1:
            raise RegexError("')' closes nothing")
        group = self.groups.pop()
        self.atom(")", group.done + group.symbols + 1)
        outer = self.groups[-1]
        outer.ends = group.ends or group.any_ends
        if group.anchored:
            outer.anchored = True
            outer.last = -outer.last  # an anchored group must not be repeated

    def next_branch(self) -> None:
        group = self.groups[-1]
        group.done += group.symbols + 1
        group.symbols = group.last = 0
        group.any_ends |= group.ends
        group.ends, group.first = False, group.starts_first
        self.out.append("|")

    def anchor(self, char: str) -> None:
        group = self.groups[-1]
        group.last = 0
        if not self.whole:
            self.out.append(char)
            return
        group.anchored = True
        if char == "^" and not group.first:
            raise RegexError("'^' stands behind something: it can only be where the expression begins")
        group.ends |= char == "$"

    def repeat(self, char: str) -> None:
        times = 1
        if char == "{":
            found = _REPEAT.match(self.text, self.at - 1)
            if found is None:
                if self.text.startswith(",", self.at):
                    raise RegexError("'{,' is not supported: write {0,")
                self.atom(r"\{")
                return
            self.at = found.end()
            low = int(found[1])
            high = low if found[2] is None or found[3] is None else int(found[3])
            if high < low:
                raise RegexError(f"{found[0]} counts backwards")
            times, char = max(low, high, 1), found[0]
        group = self.groups[-1]
        if group.last == 0 or (group.last < 0 and char != "?"):
            raise RegexError(f"{char!r} repeats nothing that can be repeated")
        group.symbols += abs(group.last) * (times - 1)
        if sum(each.symbols + each.done for each in self.groups) > MAX_SYMBOLS:
            raise RegexError(f"it has more than {MAX_SYMBOLS} symbols when its counted repeats are written out")
        if self.text.startswith("?", self.at):
            self.at += 1  # lazy or greedy, the texts that match are the same
        group.last = 0
        self.out.append(char)

    def escape(self) -> str:
        char = self._next()
        if char.lower() in _CLASSES:
            return self.char_class(_CLASSES[char.lower()], negated=char.isupper())
        if char in "bB":
            raise RegexError(f"'\\{char}' (a border of words) is not supported")
        if char in "pP":
            return self.char_class(self._property(char))
        return self.one(self._character(char))

    def one(self, char: str) -> str:
        """A character. One that cannot be written must not be left out by the library: nothing matches in its place."""
        return _NOTHING if not self.whole and _is_unwritable(char) else _literal(char)

    def char_class(self, items: str, *, negated: bool = False) -> str:
        if self.whole:
            return f"[{'^' if negated else ''}{items}]"
        return f"[^{items}{UNWRITABLE}]" if negated else f"[{items}&&[^{UNWRITABLE}]]"

    def bracket(self) -> str:
        """A class of characters, up to its bracket."""
        negated = self.text.startswith("^", self.at)
        self.at += negated
        if self.text.startswith("]", self.at):
            raise RegexError("'[]' and '[^]' are not supported: write [\\s\\S] for any character")
        items: list[str] = []
        while (char := self._next()) != "]":
            if char == "[" and self.text[self.at : self.at + 1] in (":", ".", "="):
                raise RegexError("'[:...:]' is not supported: write the characters out")
            item, low = self._class_item(char)
            if low is not None and self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                item, high = self._class_item(self._next())
                if high is None or ord(high) < ord(low):
                    raise RegexError(f"a range of characters from {low!r} leads nowhere")
                item = f"{_literal(low)}-{_literal(high)}"
            items.append(item)
        return self.char_class("".join(items), negated=negated)

    def _class_item(self, char: str) -> tuple[str, str | None]:
        """An item, and the character that it is, if it is one."""
        if char != "\\":
            return _literal(char), char
        char = self._next()
        if char in _CLASSES:
            return _CLASSES[char], None
        if char.lower() in _CLASSES:
            return f"[^{_CLASSES[char.lower()]}]", None
        if char in "pP":
            return self._property(char), None
        found = "\b" if char == "b" else self._character(char)
        return _literal(found), found

    def _property(self, char: str) -> str:
        if (found := _PROPERTY.match(self.text, self.at)) is None:
            raise RegexError(f"'\\{char}' needs the name of a property, such as \\p{{L}}")
        self.at = found.end()
        return f"\\{char}{found[0]}"

    def _character(self, char: str) -> str:
        """The character that an escape stands for."""
        if char in _CONTROLS and not (char == "0" and self.text[self.at : self.at + 1].isdigit()):
            return _CONTROLS[char]
        if char == "c" and (found := re.compile("[A-Za-z]").match(self.text, self.at)):
            self.at += 1
            return chr(ord(found[0]) % 32)
        if char == "x" and (found := re.compile("[0-9A-Fa-f]{2}").match(self.text, self.at)):
            self.at += 2
            return chr(int(found[0], 16))
        if char == "u":
            return self._code_point()
        if char.isalnum():
            raise RegexError(f"'\\{char}' is not supported")
        return char

    def _code_point(self) -> str:
        pair = re.compile(r"([dD][89abAB][0-9A-Fa-f]{2})\\u([dD][c-fC-F][0-9A-Fa-f]{2})").match(self.text, self.at)
        if pair is not None:
            self.at = pair.end()
            return bytes.fromhex(pair[1] + pair[2]).decode("utf-16-be")
        found = re.compile(r"([0-9A-Fa-f]{4})|\{([0-9A-Fa-f]{1,6})\}").match(self.text, self.at)
        code = -1 if found is None else int(found[1] or found[2], 16)
        if found is None or 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise RegexError("'\\u' needs the code of a character")
        self.at = found.end()
        return chr(code)

    def _next(self) -> str:
        if self.at >= len(self.text):
            raise RegexError("it ends in the middle of a class or an escape")
        self.at += 1
        return self.text[self.at - 1]


def _literal(char: str) -> str:
    """One character, in a class or outside, in a way that is safe between slashes too."""
    if char.isalnum() and char.isascii() or char == "_":
        return char
    return f"\\x{{{ord(char):X}}}"


def _is_unwritable(char: str) -> bool:
    return (char < " " and char not in "\b\t\n\f\r") or char == "\x7f"


def translate(pattern: str, *, whole: bool) -> str:
    """The expression in Rust's dialect. whole: it matches all of a text, else a part of what a JSON string holds.

    RegexError says what is not supported, or which limit is exceeded.
    """
    if len(pattern) > MAX_CHARS:
        raise RegexError(f"it has {len(pattern)} characters, the limit is {MAX_CHARS}")
    return _Reader(pattern, whole).read()
