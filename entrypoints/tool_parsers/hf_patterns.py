"""Regular expressions of a response_template, taken apart: to put marks in the place of tokens, and to write what they match.

Knows how patterns are spelled. It must not know regions, streams or Lark. Called by the delimiters and the grammar of `hf`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import regex

from halfbyte.entrypoints.answers.marks import Marks

_ATOM = regex.compile(
    r"""
    (?P<set>\[\^?\]?(?:\\.|[^\]\\])*\]|\\[sSdDwW]|\.)
    |(?P<same>\(\?P=\w+\))
    |(?P<open>\((?!\?)|\(\?:|\(\?P?<\w+>)
    |(?P<close>\))
    |(?P<or>\|)
    |(?P<repeat>(?:[*+?]|\{\d+(?:,\d*)?\}|\{,\d+\})[?+]?)
    |(?P<text>\\[^a-zA-Z0-9]|\\[ntrfv]|[^\\()|*+?\[\]^$.])
    |(?P<other>\(\?<?[=!>a-zA-Z#^-]*|\\.|.)
    """,
    regex.VERBOSE | regex.DOTALL,
)
_NAMED = regex.compile(r"\(\?P?<(\w+)>|\(\?P=(\w+)\)")
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_MIN_TOKEN_CHARS = 2

Kind = Literal["set", "same", "open", "close", "or", "repeat", "text", "other"]


class NotPlain(Exception):
    """A pattern is more than texts, sets, repeats and groups. The message says what."""


@dataclass(frozen=True, slots=True)
class Atom:
    """A piece of a pattern. source: as it is spelled. text: the character of a text that stands for itself. name: of a group."""

    kind: Kind
    source: str
    text: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class TagShape:
    """A tag pattern in three: what opens a value, names its key in the group `key`, and what closes it."""

    head: str
    tail: str

    def tail_of(self, key: str) -> str:
        """What closes the value of `key`."""
        return self.tail.replace("(?P=key)", regex.escape(key))


def atoms(pattern: str) -> list[Atom]:
    """The pattern's pieces in order."""
    found: list[Atom] = []
    for match in _ATOM.finditer(pattern):
        source, kind = match.group(), match.lastgroup
        if kind == "text":
            letter = source[-1]
            text = _LETTERS.get(letter, letter) if len(source) > 1 and letter.isalpha() else letter
            found.append(Atom("text", source, text))
        else:
            named = _NAMED.fullmatch(source)
            found.append(Atom(kind, source, name=named.group(1) or named.group(2) if named else ""))
    return found


def texts(pieces: list[Atom]) -> Iterator[tuple[int, str]]:
    """(where it begins, the text) of each run of atoms that stand for themselves."""
    at = 0
    while at < len(pieces):
        end = at
        while end < len(pieces) and pieces[end].kind == "text" and not _is_repeated(pieces, end):
            end += 1
        if end > at:
            yield at, "".join(piece.text for piece in pieces[at:end])
        at = max(end, at + 1)


def tokens_in(text: str, marks: Marks) -> Iterator[tuple[int, str]]:
    """(where it begins, its text) of each token of control in `text`, the longest that begins there."""
    at = 0
    while at < len(text):
        ends = range(len(text), at + _MIN_TOKEN_CHARS - 1, -1)
        token = next((text[at:end] for end in ends if text[at:end].strip() and marks.token_id(text[at:end]) is not None), "")
        if token:
            yield at, token
        at += max(len(token), 1)


def marked(text: str, marks: Marks, spelled: dict[str, str]) -> str:
    """`text` as a parser reads it. spelled: gets the tokens that it holds, by their text."""
    parts, end = [], 0
    for at, token in tokens_in(text, marks):
        spelled[token] = marks.mark(token)
        parts += [text[end:at], spelled[token]]
        end = at + len(token)
    return "".join(parts) + text[end:]


def marked_pattern(pattern: str, marks: Marks, spelled: dict[str, str]) -> str:
    """`pattern` for what a parser reads: where it spells a token, that token alone matches."""
    pieces = atoms(pattern)
    sources = [piece.source for piece in pieces]
    for start, text in texts(pieces):
        for at, token in tokens_in(text, marks):
            spelled[token] = marks.mark(token)
            sources[start + at : start + at + len(token)] = [spelled[token], *[""] * (len(token) - 1)]
    return "".join(sources)


def first_text(pattern: str) -> str:
    """The text that each match begins with, behind white space; empty where there is no such."""
    pieces = atoms(without_leading_space(pattern))
    if any(piece.kind == "or" for piece in pieces):
        return ""
    start, text = next(texts(pieces), (1, ""))
    return text if start == 0 else ""


def without_leading_space(pattern: str) -> str:
    """`pattern` less the white space that it allows in front."""
    pieces = atoms(pattern)
    while pieces and (pieces[0].source == r"\s" or pieces[0].text.isspace()):
        pieces = pieces[2:] if len(pieces) > 1 and pieces[1].kind == "repeat" else pieces[1:]
    return "".join(piece.source for piece in pieces)


def tag_shape(pattern: str) -> TagShape | None:
    """The shape of `<(?P<key>...)>(?P<value>.*?)</(?P=key)>` and its like; None where a pattern is no such."""
    pieces = atoms(pattern)
    value = next((at for at, piece in enumerate(pieces) if piece.kind == "open" and piece.name == "value"), None)
    if value is None or [piece.source for piece in pieces[value + 1 : value + 3]] not in ([".", "*?"], [".", "+?"]):
        return None
    head, tail = pieces[:value], pieces[value + 4 :]
    plain = all(piece.kind != "other" for piece in head + tail) and all(piece.kind != "open" for piece in tail)
    if not plain or pieces[value + 3].kind != "close" or not any(piece.name == "key" for piece in head) or not tail:
        return None
    if any(piece.kind == "or" for piece in pieces) or any(piece.kind == "same" and piece.name != "key" for piece in tail):
        return None
    return TagShape("".join(piece.source for piece in head), "".join(piece.source for piece in tail))


def written(pattern: str, groups: Mapping[str, str]) -> list[Atom]:
    """The pieces of `pattern` with its named groups, and what refers to them, replaced by their texts. NotPlain for more."""
    found: list[Atom] = []
    pieces = iter(atoms(pattern))
    for piece in pieces:
        if piece.kind == "other":
            raise NotPlain(f"{piece.source!r} in the pattern {pattern!r}")
        if piece.name in groups:
            own: list[str] = []
            depth = 1 if piece.kind == "open" else 0
            while depth:
                inner = next(pieces)
                depth += (inner.kind == "open") - (inner.kind == "close")
                own += [inner.source] if depth else []
            if own and regex.fullmatch("".join(own), groups[piece.name], flags=regex.DOTALL) is None:
                raise NotPlain(f"the pattern {pattern!r}, which {groups[piece.name]!r} does not fit")
            found += [Atom("text", regex.escape(char), char) for char in groups[piece.name]]
        elif piece.kind == "open":
            found.append(Atom("open", "(?:"))
        else:
            found.append(piece)
    return found


def _is_repeated(pieces: list[Atom], at: int) -> bool:
    return at + 1 < len(pieces) and pieces[at + 1].kind == "repeat"
