"""Tokenizers of single bytes with marks as tokens of their own, for tests of syntaxes and grammars."""

from __future__ import annotations

from collections.abc import Collection

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from halfbyte.engine.tokenizer import Tokenizer

EOS = "<eos>"


def tokenizer_with(*marks: str, special: bool | Collection[str] = True) -> Tokenizer:
    """A token per byte, `<eos>`, and one token for each of `marks`; special: whether they are, or which."""
    chosen = (marks if special else ()) if isinstance(special, bool) else special
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    backend.add_tokens([AddedToken(mark, special=mark in chosen, normalized=False) for mark in marks])
    return Tokenizer(backend, eos_token=EOS)
