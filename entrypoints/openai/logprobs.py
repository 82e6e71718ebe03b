"""Log probabilities in the three shapes of the wire: chat, completions and prompt.

Token strings of generated tokens come with the deltas, so that they join to the text; those of prompts are made here, under
the same rule. -inf becomes -9999.0, which JSON can say.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints.openai.wire import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from halfbyte.types import TokenLogprobs

LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are written: as text, or as `token_id:N` where the client asked for that."""

    tokenizer: Tokenizer
    as_token_ids: bool = False

    def name(self, token_id: int, text: str | None = None) -> str:
        if self.as_token_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id) if text is None else text


def chat_logprobs(
    names: TokenNames, token_ids: Sequence[int], token_texts: Sequence[str], entries: Iterable[TokenLogprobs]
) -> ChatLogprobs:
    """`logprobs` of a chat choice or chunk: one item per token, its alternatives best first."""
    content = []
    token_bytes = names.tokenizer.token_bytes
    for token_id, text, entry in zip(token_ids, token_texts, entries, strict=True):
        top = [
            TopLogprob(names.name(other), _finite(logprob), list(token_bytes(other)))
            for other, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        ]
        content.append(TokenLogprob(names.name(token_id, text), _finite(entry.logprob), list(token_bytes(token_id)), top))
    return ChatLogprobs(content)


class CompletionLogprobsWriter:
    """Writes the logprobs of one completion choice, whole or chunk by chunk: offsets go on where the last chunk ended."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0

    def write(
        self, token_ids: Sequence[int], token_texts: Sequence[str], entries: Iterable[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """An entry is None where nothing precedes the token (the first one of an echoed prompt)."""
        written = CompletionLogprobs()
        for token_id, text, entry in zip(token_ids, token_texts, entries, strict=True):
            written.tokens.append(self._names.name(token_id, text))
            written.text_offset.append(self._offset)
            written.token_logprobs.append(None if entry is None else _finite(entry.logprob))
            written.top_logprobs.append(None if entry is None else self._top(token_id, text, entry))
            self._offset += len(text)
        return written

    def _top(self, token_id: int, text: str, entry: TokenLogprobs) -> dict[str, float]:
        top = {self._names.name(token_id, text): _finite(entry.logprob)}
        for other, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
            if other != token_id:
                top.setdefault(self._names.name(other), _finite(logprob))
        return top


def join_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )


def prompt_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs]) -> PromptLogprobs:
    """`prompt_logprobs`: one item per prompt token, null for the first, else {token id: logprob, rank, text}."""
    items: PromptLogprobs = [None]
    for entry in entries:
        item = {str(entry.token_id): PromptLogprob(_finite(entry.logprob), entry.rank, tokenizer.token_text(entry.token_id))}
        for rank, (other, logprob) in enumerate(zip(entry.top_token_ids, entry.top_logprobs, strict=True), start=1):
            item.setdefault(str(other), PromptLogprob(_finite(logprob), rank, tokenizer.token_text(other)))
        items.append(item)
    return items


def prompt_pieces(tokenizer: Tokenizer, token_ids: Sequence[int], text: str | None) -> list[str]:
    """The text of each prompt token. They join to `text` where the tokenizer kept it, else to what the tokens say.

    Bytes of a character that several tokens share belong to the last of them. Tokens that the tokenizer added itself (BOS)
    have no place in `text` and become "".
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(tokenizer.token_bytes(token_id)) for token_id in token_ids]
    if pieces:
        pieces[-1] += decoder.decode(b"", True)
    aligned = None if text is None else _align(pieces, text)
    return pieces if aligned is None else aligned


def _align(pieces: Sequence[str], text: str) -> list[str] | None:
    """`pieces` with those blanked that `text` does not have at their place; None if the rest does not join to `text`."""
    aligned = []
    offset = 0
    for piece in pieces:
        if offset == 0 and piece.startswith(" ") and not text.startswith(piece):
            piece = piece[1:]  # a space that the tokenizer put before the text
        kept = piece if text.startswith(piece, offset) else ""
        aligned.append(kept)
        offset += len(kept)
    return aligned if offset == len(text) else None


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
