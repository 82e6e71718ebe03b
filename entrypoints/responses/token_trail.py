"""Which tokens a piece of an answer's text came from: log probabilities belong to what the user reads, not to thoughts and calls.

A reader of answers tells texts, not tokens. It tells them in order and leaves out only marks and white space between them, so
that each piece is found where the one before it ended.
"""

from __future__ import annotations

from collections import deque

from halfbyte.engine.output_processor import SequenceDelta
from halfbyte.entrypoints.openai.logprobs import TokenNames, chat_logprobs
from halfbyte.entrypoints.openai.wire import TokenLogprob


class TokenTrail:
    """The tokens of one answer that no told text has reached yet, each with its place in the text."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._tokens: deque[tuple[int, int, TokenLogprob]] = deque()  # start, end, token
        self._length = 0
        self._text = ""  # what was not told, or left out; it begins at `_told`
        self._told = 0

    def add(self, delta: SequenceDelta) -> None:
        if delta.logprobs is None:
            return
        found = chat_logprobs(self._names, delta.token_ids, delta.token_texts, delta.logprobs).content
        for text, token in zip(delta.token_texts, found, strict=True):
            self._tokens.append((self._length, self._length + len(text), token))
            self._length += len(text)
            self._text += text

    def take(self, text: str) -> list[TokenLogprob]:
        """The tokens that this text came from, without those that were taken before; none if it is nowhere."""
        at = self._text.find(text)
        if at < 0:
            return []
        start, end = self._told + at, self._told + at + len(text)
        taken = []
        while self._tokens and self._tokens[0][0] < end:
            begins, ends, token = self._tokens.popleft()
            if begins >= start or ends > start:
                taken.append(token)
        self._text, self._told = self._text[at + len(text) :], end
        return taken
