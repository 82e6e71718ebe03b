"""Tokenizers of single bytes with marks as tokens of their own, for tests of syntaxes and grammars."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from halfbyte.engine.tokenizer import Tokenizer

EOS = "<eos>"


def tokenizer_with(*marks: str, special: bool = True) -> Tokenizer:
    """A token per byte, `<eos>`, and one token for each of `marks`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    backend.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    return Tokenizer(backend, eos_token=EOS)
