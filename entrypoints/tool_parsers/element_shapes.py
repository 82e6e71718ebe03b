"""How families write a call's parameters as elements, `<parameter=KEY>VALUE</parameter>` and its relatives: their marks.

Shared by what reads them (`element_reading`) and what writes them (`element_grammar`). Knows marks; knows no schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from halfbyte.entrypoints.answers.marks import Marks


@dataclass(frozen=True, slots=True)
class Sign:
    """A mark: as it is read, as a Lark term, and as text."""

    read: str
    term: str
    text: str

    @property
    def is_token(self) -> bool:
        return self.read != self.text

    @property
    def endings(self) -> tuple[str, ...]:
        """How it ends a value that lacks its own closing mark, as it is read: where a line begins; a token also elsewhere."""
        return ("\n" + self.read, self.read) if self.is_token else ("\n" + self.read,)

    @property
    def ending_text(self) -> str:
        """What a value must not hold, lest it end there."""
        return self.text if self.is_token else "\n" + self.text


def sign(marks: Marks, *pieces: str) -> Sign:
    """A mark made of pieces, each of which is a token of the vocabulary, or text."""
    return Sign("".join(map(marks.mark, pieces)), " ".join(map(marks.terminal, pieces)), "".join(pieces))


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """How a family writes one parameter: opening, key, the end of the key, pad, value, pad, close, gap.

    key_ends: mark -> the types of a value behind it, None where the tool's schema tells them. value_opening: one more mark behind
    the key, after a gap. pad, gap: white space, "" for none; exactly one pad on either side of a value is not the value's.
    """

    opening: Sign
    key_ends: Mapping[Sign, tuple[str, ...] | None]
    close: Sign
    pad: str
    gap: str
    value_opening: Sign | None = None
