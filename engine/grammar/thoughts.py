"""Where a thought ends: by the token that closes it, or where a vocabulary has no such token, by the text that does.

Knows token ids and the bytes of tokens; knows no grammar and no request. Followed by the constraint of a request in the engine,
and by the count of its thoughts' tokens in the API process.

Letter W: words of a mask row, see `rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from halfbyte.engine.grammar.rows import row_of

TokenBytes = Callable[[int], bytes]


class EndOfThought:
    """Follows one thought, token by token. token_bytes: what tokens add to a text; None: only the ids of the mark count.

    overlong: see `overlong_tokens`; they would end the thought in the middle of a token, where no grammar can begin.
    """

    def __init__(
        self, end_ids: Sequence[int], token_bytes: TokenBytes | None = None, overlong: Mapping[int, np.ndarray] | None = None
    ) -> None:
        self._end_ids = list(end_ids)
        self._last: list[int] = []
        # One token is a mark by itself; several may be others that spell the same.
        self._token_bytes = token_bytes if len(end_ids) > 1 else None
        self._text = mark_text(end_ids, self._token_bytes) if self._token_bytes is not None else b""
        self._tail = b""
        self._overlong = overlong or {}

    def follow(self, token_id: int) -> bool:
        """Take a token. Whether the thought ends with it."""
        if self._token_bytes is None:
            self._last = [*self._last, token_id][-len(self._end_ids) :] if self._end_ids else []
            return bool(self._end_ids) and self._last == self._end_ids
        self._tail = (self._tail + self._token_bytes(token_id))[-len(self._text) :]
        return self._tail == self._text

    def barred_W(self) -> np.ndarray | None:
        """The tokens that may not come next, as a mask row; None where all may."""
        begun = [self._overlong[count] for count in self._overlong if self._tail.endswith(self._text[:count])]
        return np.bitwise_or.reduce(begun) if begun else None


def mark_text(end_ids: Sequence[int], token_bytes: TokenBytes) -> bytes:
    return b"".join(map(token_bytes, end_ids))


def overlong_tokens(mark: bytes, token_bytes: TokenBytes, vocab_size: int) -> dict[int, np.ndarray]:
    """Number of the mark's bytes that are out -> the tokens that complete it and go on, as a mask row; without empty ones."""
    texts = [token_bytes(token_id) for token_id in range(vocab_size)]
    rows: dict[int, np.ndarray] = {}
    for count in range(len(mark)):
        rest = mark[count:]
        longer = [i for i, text in enumerate(texts) if len(text) > len(rest) and text.startswith(rest)]
        if longer:
            rows[count] = row_of(longer, vocab_size)
    return rows
