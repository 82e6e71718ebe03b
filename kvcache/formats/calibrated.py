"""`kv4`, `kv5` and `kv6`: K centred and turned by a matrix calibrated for the model, in blocks of whole numbers.

The matrix balances the noise of the logits over K's directions (`kvcache.turns`), after which K is close to normal in every
block of 16 and whole numbers err less than E2M1. V is turned within its blocks of 16, which makes these close to normal, too,
whatever the model. The first tokens of a sequence, on which attention leans, stay in the model's dtype. Bits per number, over K
and V: 4.5, 5 and 6. `kv4_e2m1` has E2M1 keys, for hardware that multiplies them, and V as it is.
"""

from __future__ import annotations

from halfbyte.kvcache.formats.base import Side
from halfbyte.kvcache.formats.blocks import IntCodec, Nvfp4Codec
from halfbyte.kvcache.formats.coded import PlanesFormat

FIRST_TOKENS = 16


def make(name: str) -> PlanesFormat:
    key, value = {
        "kv4": (IntCodec("int4"), IntCodec("int4")),
        "kv4_e2m1": (Nvfp4Codec("nvfp4_4over6"), Nvfp4Codec("nvfp4_4over6")),
        "kv5": (IntCodec("int5"), IntCodec("int4")),
        "kv6": (IntCodec("int6"), IntCodec("int5")),
    }[name]
    is_whole = isinstance(value, IntCodec)
    turned = Side(value, "block_hadamard" if is_whole else "none")
    return PlanesFormat(name, Side(key, "calibrated"), turned, first_tokens=FIRST_TOKENS)
