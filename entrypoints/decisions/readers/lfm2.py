"""Models in the manner of LFM2: JSON states are indented, and a label may come in other letters or behind a space."""

from __future__ import annotations

from halfbyte.entrypoints.decisions.readers.next_token import NextToken


class Lfm2(NextToken):
    state_indent = 2

    def merge(self, logprobs: list[float]) -> float:
        """A label counts with its most likely spelling."""
        return max(logprobs)

    def spellings(self, label: str) -> tuple[str, ...]:
        """As it is, capitalised and in capitals; each also behind a space."""
        letters = dict.fromkeys((label, label.capitalize(), label.upper()))
        return tuple(space + spelling for space in ("", " ") for spelling in letters)
