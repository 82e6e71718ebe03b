"""How many of an answer's tokens are thoughts: token by token, as the engine sees them, so that no cut of the text matters."""

from __future__ import annotations

from collections.abc import Iterable

from halfbyte.engine.grammar.thoughts import EndOfThought, TokenBytes
from halfbyte.types import Thinking


class ThoughtTokens:
    """Counts the tokens of one answer that stand inside its thought, with the marks around it."""

    def __init__(self, thinking: Thinking, token_bytes: TokenBytes | None = None) -> None:
        self._start, self._end = thinking.start_ids, EndOfThought(thinking.end_ids, token_bytes)
        self._is_open = thinking.is_open
        self._num_opened = 0

    def count(self, token_ids: Iterable[int]) -> int:
        return sum(map(self._take, token_ids))

    def _take(self, token_id: int) -> int:
        """How many thought tokens this one settles."""
        if self._is_open is False:
            return 0
        if self._is_open is None:
            if self._num_opened < len(self._start) and token_id == self._start[self._num_opened]:
                self._num_opened += 1
                self._is_open = True if self._num_opened == len(self._start) else None
                return self._num_opened if self._is_open else 0
            self._is_open = False
            return 0
        if self._end.follow(token_id):
            self._is_open = False
        return 1
