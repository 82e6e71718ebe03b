"""Rows of grammar masks: int32 [ceil(V / 32)] (letter W), lowest bit first, 1 = allowed. The one place that knows the layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def row_of(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """The row that allows these tokens and no others."""
    bits = np.zeros(num_words(vocab_size) * 32, np.bool_)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def ids_of(row_W: np.ndarray, most: int | None = None) -> list[int]:
    """The tokens of a mask row, the first `most` of them."""
    words = np.flatnonzero(row_W)[:most]
    at = np.flatnonzero(np.unpackbits(row_W[words].view(np.uint8), bitorder="little"))[:most]
    ids: list[int] = (words[at >> 5] * 32 + (at & 31)).tolist()
    return ids


def allow(row_W: np.ndarray, token_id: int) -> None:
    row_W.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def forbid(row_W: np.ndarray, token_id: int) -> None:
    row_W.view(np.uint32)[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
