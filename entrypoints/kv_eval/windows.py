"""Texts that are scored: which files, and which tokens of them.

Knows files and a tokenizer; knows no model. Called by `evaluate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.errors import UserError
from halfbyte.model_runner.texts import read_text

# The least that has a position with a next token and something to attend to
_MIN_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens of one text, after the special tokens that begin a prompt. length: what was asked for; there may be fewer."""

    name: str
    length: int
    token_ids: list[int]


def cut_windows(files: Sequence[Path], tokenizer: Tokenizer, lengths: Sequence[int]) -> list[Window]:
    """The last tokens of each text, once per length; one that is shorter than several lengths is used once."""
    first_ids = tokenizer.encode("")
    windows = []
    for path in files:
        token_ids = tokenizer.encode(read_text(path), add_special_tokens=False)
        num_known = len(first_ids) + len(token_ids)
        if num_known < _MIN_TOKENS:
            raise UserError(f"the text {path} has {num_known} tokens, {_MIN_TOKENS} are the least", param="text")
        used = set()
        for length in sorted(set(lengths)):
            num_tokens = min(length, num_known)
            if num_tokens not in used:
                used.add(num_tokens)
                windows.append(Window(path.stem, length, first_ids + token_ids[num_known - num_tokens :]))
    return windows
