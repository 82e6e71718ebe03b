"""Marks: the control tokens of a model's syntax, as parsers and grammars see them.

Where a mark is one token of the vocabulary, only this token counts, not a text that is spelled like it. In what a parser reads
such a token is one character that no text holds (half of a surrogate pair); `Marks.by_token` tells the detokeniser which.
Elsewhere a mark is its own text. Knows the vocabulary; knows no syntax.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from halfbyte.errors import UserError

if TYPE_CHECKING:
    from halfbyte.engine.tokenizer import Tokenizer

_FIRST, _LAST = 0xD800, 0xDFFF
_MARK = re.compile(f"[\\u{_FIRST:x}-\\u{_LAST:x}]")


class Marks:
    """The marks of one server's syntaxes. tokenizer: None where no mark is a token, as in texts written by people.

    by_token: token id -> the character that stands for it. It grows while the syntaxes are made, then stays.
    """

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.by_token: dict[int, str] = {}
        self._tokenizer = tokenizer
        self._texts: dict[str, str] = {}
        self._ids: dict[str, int] = {}

    def token_id(self, text: str) -> int | None:
        """The id of the token that is spelled `text`, if it is one that texts are searched for as a whole."""
        if self._tokenizer is None:
            return None
        token_id = self._tokenizer.token_id(text)
        return token_id if token_id in self._tokenizer.added_ids else None

    def is_special(self, text: str) -> bool:
        """Whether `text` is a token that grammars never take for letters."""
        return self._tokenizer is not None and self.token_id(text) in self._tokenizer.special_ids

    def mark(self, text: str) -> str:
        """How the mark `text` appears in what a parser reads."""
        token_id = self.token_id(text)
        if token_id is None:
            return text
        char = self.by_token.get(token_id)
        if char is None:
            char = self.by_token[token_id] = chr(_FIRST + len(self.by_token))
            self._texts[char], self._ids[char] = text, token_id
        return char

    def require(self, syntax: str, *texts: str) -> None:
        """UserError if the vocabulary lacks a token that `syntax` (a flag and its value) is made of."""
        missing = [text for text in texts if self._tokenizer is not None and self.token_id(text) is None]
        if missing:
            raise UserError(
                f"{syntax} does not fit this model: its vocabulary has no token {' and no '.join(map(repr, missing))};"
                " choose the parser of the model's own family"
            )

    def plain(self, text: str, *, special: bool = True) -> str:
        """`text` with its marks spelled out; special=False: those that the tokenizer calls special are left out."""
        return _MARK.sub(lambda match: self._spell(match.group(), special), text) if not text.isascii() else text

    def plain_json(self, text: str) -> str:
        """A piece of JSON with its marks spelled out inside its strings."""
        if text.isascii():
            return text
        return _MARK.sub(lambda match: json.dumps(self._texts[match.group()], ensure_ascii=False)[1:-1], text)

    def terminal(self, text: str) -> str:
        """The mark `text` in a Lark grammar."""
        token_id = self.token_id(text)
        return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"

    def _spell(self, char: str, special: bool) -> str:
        assert self._tokenizer is not None, "only tokens have characters of their own"
        return self._texts[char] if special or self._ids[char] not in self._tokenizer.special_ids else ""
