"""The KV formats by name. To add one: a file in this folder and a line in `FORMATS`; the conformance suite picks it up.

Beside the names there are pairs, `k:NAME,v:NAME`: the K of one format with the V of another. Arrangements hold the numbers of a
format in another order: users name the format, a back end chooses the arrangement.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfbyte.kvcache.formats.base import KVFormat
    from halfbyte.kvcache.spec import KVCacheSpec

FORMATS: dict[str, str] = {
    "bfloat16": "halfbyte.kvcache.formats.dense:DenseFormat",
    "float16": "halfbyte.kvcache.formats.dense:DenseFormat",
    "float32": "halfbyte.kvcache.formats.dense:DenseFormat",
    "fp8_e4m3": "halfbyte.kvcache.formats.fp8:make",
    "fp8_e5m2": "halfbyte.kvcache.formats.fp8:make",
    "fp8_per_token_head": "halfbyte.kvcache.formats.per_token_head:make",
    "int8_per_token_head": "halfbyte.kvcache.formats.per_token_head:make",
    "int4_per_token_head": "halfbyte.kvcache.formats.per_token_head:make",
    "nvfp4": "halfbyte.kvcache.formats.blocks:make",
    "nvfp4_4over6": "halfbyte.kvcache.formats.blocks:make",
    "ultraquant_4bit": "halfbyte.kvcache.formats.ultraquant:make",
    "turboquant_k8v4": "halfbyte.kvcache.formats.turboquant:make",
    "turboquant_4bit_nc": "halfbyte.kvcache.formats.turboquant:make",
    "kv4": "halfbyte.kvcache.formats.calibrated:make",
    "kv4_e2m1": "halfbyte.kvcache.formats.calibrated:make",
    "kv5": "halfbyte.kvcache.formats.calibrated:make",
    "kv6": "halfbyte.kvcache.formats.calibrated:make",
    "fp8_ds_mla": "halfbyte.kvcache.formats.mla:make",
    "nvfp4_ds_mla": "halfbyte.kvcache.formats.mla:make",
}
ARRANGEMENTS: dict[str, str] = {
    "bfloat16_pairs": "halfbyte.kvcache.formats.pairs:PairFormat",
    "nvfp4_swizzled": "halfbyte.kvcache.formats.swizzled:make",
    "nvfp4_4over6_swizzled": "halfbyte.kvcache.formats.swizzled:make",
}
ALIASES: dict[str, str] = {"fp8": "fp8_e4m3"}


@cache
def get_format(name: str) -> KVFormat:
    """The format, pair or arrangement called `name`, made once: formats hold no state. KeyError when there is none."""
    if name.endswith("@tiles"):
        from halfbyte.kvcache.formats.tiles import TilesFormat

        return TilesFormat(get_format(name.removesuffix("@tiles")))
    if sides := split_pair(name):
        from halfbyte.kvcache.formats.coded import PlanesFormat

        key, value = map(get_format, sides)
        if key.sides is None or value.sides is None:
            raise KeyError(name)
        return PlanesFormat(name, key.sides[0], value.sides[1], first_tokens=max(key.first_tokens, value.first_tokens))
    module, _, attribute = {**FORMATS, **ARRANGEMENTS}[ALIASES.get(name, name)].partition(":")
    made: KVFormat = getattr(import_module(module), attribute)(ALIASES.get(name, name))
    return made


def page_bytes(spec: KVCacheSpec) -> int:
    """The bytes of one block of one layer."""
    return sum(plane.bytes for plane in get_format(spec.format).planes(spec))


def split_pair(name: str) -> tuple[str, str] | None:
    """("fp8_e4m3", "nvfp4") for "k:fp8,v:nvfp4", in either order; None for a plain name."""
    parts = dict(part.strip().partition(":")[::2] for part in name.split(","))
    if set(parts) != {"k", "v"}:
        return None
    return ALIASES.get(parts["k"], parts["k"]), ALIASES.get(parts["v"], parts["v"])
