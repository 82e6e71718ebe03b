"""Grammars for llguidance, compiled and kept: the one place that knows its limits, and how its errors are worded.

Knows the vocabulary. It must not know requests, tensors or HTTP. The API process checks grammars here before a request is
admitted; the engine makes its matchers here. What is asked becomes Lark in `source_forms`, whose `lark_of` is named here too.

The library lets go of the interpreter's lock while it compiles and while it fills masks; all else it does takes microseconds.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from halfbyte.engine.grammar.json_schema import GrammarOptions
from halfbyte.engine.grammar.source_forms import lark_of
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.errors import UserError
from halfbyte.log import one_line

if TYPE_CHECKING:
    import llguidance

__all__ = ["GrammarCompiler", "GrammarOptions", "lark_of"]

MAX_KEPT = 64
MAX_KEPT_CHARS = 4 << 20
MAX_MESSAGE_CHARS = 500
MAX_SHOWN_CHARS = 40
# A state of the lexer takes 1 to 2 kB; the library's default would be half a gigabyte for one grammar.
MAX_LEXER_STATES = 50_000
_SPECIAL = b"\xff"  # in no UTF-8 text
_NO_ANSWER = re.compile(r"NoExtension(Bias)?")
# What the library puts around its reasons: places in the Lark text that was made, and names of its own.
_PADDING = re.compile(
    r"^at \d+\(\d+\): |failed to compile JSON schema: | while processing json-schema:\S*|<non-verbose/>| \d+ \| .*", re.DOTALL
)


class GrammarCompiler:
    """Makes matchers for one vocabulary. Safe to use from several threads.

    vocab_size: the width of the logits, which may differ from the tokenizer's. eos_token_ids: what ends an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(set(eos_token_ids))
        self._lock = threading.Lock()
        self._library: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._kept_chars = 0

    @property
    def library_tokenizer(self) -> llguidance.LLTokenizer:
        """The vocabulary as llguidance wants it. Made at first use, which takes 0.1 s per 50 000 tokens."""
        with self._lock:
            if self._library is None:
                self._library = _library_tokenizer(self._tokenizer, self.vocab_size, self._eos_token_ids)
            return self._library

    def check(self, lark: str, param: str) -> None:
        """UserError, naming `param`, unless the library takes the grammar and has tokens for how each answer begins."""
        matcher = self.matcher(lark)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise UserError(f"{param} cannot be used: {_reason(matcher.get_error())}", param=param)
        if not self._writable_bytes.issuperset(beginning := matcher.compute_ff_bytes()):
            text = beginning.decode(errors="replace")[:MAX_SHOWN_CHARS]
            raise UserError(f"{param} cannot be used: this model has no tokens for its text {text!r}", param=param)

    @cached_property
    def _writable_bytes(self) -> frozenset[int]:
        """The bytes that tokens are made of, and the one that begins special tokens. Some vocabularies lack rare ones."""
        ordinary = set(range(min(self.vocab_size, self._tokenizer.vocab_size))) - self._tokenizer.special_ids
        return frozenset(chain(_SPECIAL, *map(self._tokenizer.token_bytes, ordinary)))

    def matcher(self, lark: str) -> llguidance.LLMatcher:
        """A fresh matcher at the beginning of the grammar. For a grammar that `check` refuses, one with `is_error()`."""
        import llguidance

        vocabulary = self.library_tokenizer
        with self._lock:
            kept = self._kept.get(lark)
            if kept is not None:
                self._kept.move_to_end(lark)
                return kept.deep_copy()
        limits = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
        made = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)
        if not made.is_error():
            self._keep(lark, made)
        return made.deep_copy()

    def _keep(self, lark: str, matcher: llguidance.LLMatcher) -> None:
        with self._lock:
            if lark not in self._kept:
                self._kept[lark] = matcher
                self._kept_chars += len(lark)
            while len(self._kept) > MAX_KEPT or self._kept_chars > MAX_KEPT_CHARS:
                dropped, _ = self._kept.popitem(last=False)
                self._kept_chars -= len(dropped)


def _library_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> llguidance.LLTokenizer:
    import llguidance

    ends = [token_id for token_id in eos_token_ids if token_id < vocab_size]
    if not ends:
        ends = [tokenizer.eos_token_id or 0]
    wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, ends[0]))
    return llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=ends)


class _Vocabulary:
    """What `llguidance.TokenizerWrapper` reads. Special tokens begin with a byte of their own: no text spells them."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        size = min(vocab_size, tokenizer.vocab_size)
        special = tokenizer.special_ids
        self.eos_token_id = eos_token_id
        self.special_token_ids = sorted(token_id for token_id in special if token_id < size)
        self.tokens = [_SPECIAL * (token_id in special) + tokenizer.token_bytes(token_id) for token_id in range(size)]
        self._tokenizer = tokenizer
        # Some tokenizers put a space before a text. What follows a control character has none.
        self._before = "\x02"
        self._num_before = len(tokenizer.encode(self._before, False))

    def __call__(self, text: bytes) -> list[int]:
        """How the model would spell a text that stands behind others."""
        return self._tokenizer.encode(self._before + text.decode(), False)[self._num_before :]


def _reason(message: str) -> str:
    """The library's words in one line, without the grammar that it quotes."""
    text = _PADDING.sub("", " ".join(message.split())).strip()
    return "no answer satisfies it" if _NO_ANSWER.fullmatch(text) else one_line(text)[:MAX_MESSAGE_CHARS]
