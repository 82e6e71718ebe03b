"""llguidance over the 256 bytes and an end: any text is its own tokens."""

from __future__ import annotations

from functools import cache

import llguidance

EOS = 256


class Bytes:
    """What the library reads of a vocabulary."""

    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = (EOS,)
    tokens = tuple(bytes([byte]) for byte in range(256)) + (b"\xff<end>",)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def vocabulary() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), n_vocab=EOS + 1)
