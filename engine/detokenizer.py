"""From token ids to text, token by token: no character is given out before all its bytes are there.

Knows what bytes each token stands for and how UTF-8 is put together. Knows no requests and no stop strings. Called by the
output processor; one instance per generated sequence. The state is at most three bytes, so a token costs the same at any
length, and the text does not depend on how the ids are cut into pieces.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Final
from weakref import WeakKeyDictionary

from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.types import SamplingParams

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes, so at most three of the prompt's belong to the first character of the output.
_MAX_CHAR_BYTES = 4


class TokenPieces:
    """What each token adds to a running text: a str if it is whole characters, else its bytes. Filled as tokens appear."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces: dict[int, str | bytes] = {}
        self._tokenizer = tokenizer
        # Some decoders drop the space that a first token begins with, so a token is decoded behind another one.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = tokenizer.decode(self._anchor, skip_special_tokens=False)

    def __getitem__(self, token_id: int) -> str | bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make(token_id)
        return piece

    def opens_text(self, token_id: int) -> str | bytes:
        """The piece of a token that nothing visible precedes: without the space that some vocabularies put before words."""
        piece = self[token_id]
        space = " " if isinstance(piece, str) else b" "
        if piece[:1] == space and not self._tokenizer.decode([token_id], skip_special_tokens=False).startswith(" "):
            return piece[1:]
        return piece

    def _make(self, token_id: int) -> str | bytes:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            return raw
        if not self._anchor or REPLACEMENT in text:
            return text
        behind = self._tokenizer.decode([*self._anchor, token_id], skip_special_tokens=False)
        if not behind.startswith(self._anchor_text) or REPLACEMENT in behind:
            return text
        return behind[len(self._anchor_text) :]


_pieces_of: WeakKeyDictionary[Tokenizer, TokenPieces] = WeakKeyDictionary()


def token_pieces(tokenizer: Tokenizer) -> TokenPieces:
    """The table of a tokenizer, shared by all its sequences."""
    pieces = _pieces_of.get(tokenizer)
    if pieces is None:
        pieces = _pieces_of[tokenizer] = TokenPieces(tokenizer)
    return pieces


class IncrementalDetokenizer:
    """The text of one generated sequence as it grows.

    The pieces that `feed` returns, and then `finish`, join to what the output adds to the prompt's text. U+FFFD appears only
    for bytes that form no character, and at the end when the generation ends inside one. A character that the prompt began
    and the output completes belongs to the output.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._pieces = token_pieces(tokenizer)
        self._skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside_char = False
        self._opens_text, tail = self._prompt_tail(prompt_token_ids)
        self._decoder.decode(tail)
        self._is_inside_char = self._prompt_is_open = self._num_pending > 0

    @property
    def _num_pending(self) -> int:
        return len(self._decoder.getstate()[0])

    def feed(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        return "".join([self.feed_token(token_id) for token_id in token_ids])

    def feed_token(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._pieces[token_id]
        if self._opens_text and piece:
            piece = self._pieces.opens_text(token_id)
            self._opens_text = False
        if isinstance(piece, str):
            if not self._is_inside_char:
                return piece
            piece = piece.encode()
        text = self._without_prompts_share(self._decoder.decode(piece))
        self._is_inside_char = self._num_pending > 0
        return text

    def finish(self) -> str:
        """The rest: U+FFFD if the generation ended inside a character. Nothing may be fed afterwards."""
        return self._without_prompts_share(self._decoder.decode(b"", final=True))

    def _without_prompts_share(self, text: str) -> str:
        """`text` without the U+FFFD of a character that the prompt left open and the output did not complete."""
        if self._prompt_is_open and text:
            self._prompt_is_open = False
            return text.removeprefix(REPLACEMENT)
        return text

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> tuple[bool, bytes]:
        """(whether the output opens the text, the prompt's last bytes: enough to see whether it ends inside a character)."""
        tail = b""
        opens_text = True
        for token_id in reversed(prompt_token_ids):
            if token_id in self._skipped:
                continue
            piece = self._pieces[token_id]
            opens_text = opens_text and not piece
            tail = (piece.encode() if isinstance(piece, str) else piece) + tail
            if isinstance(piece, str) and piece or len(tail) >= _MAX_CHAR_BYTES:
                break
        return opens_text, tail
