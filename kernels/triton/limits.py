"""What the Triton kernels cannot hold, without importing triton: asked at start, and of machines that are not here.

Knows codecs and formats by name and size. Called by the Triton attention back end.
"""

from __future__ import annotations

from halfbyte.errors import Refusal
from halfbyte.kvcache.formats import get_format
from halfbyte.kvcache.formats.coded import PlanesFormat, RecordsFormat
from halfbyte.kvcache.formats.dense import DenseFormat
from halfbyte.kvcache.spec import KVCacheSpec

# Those of `codecs.CODECS`; a test compares.
CODEC_NAMES = frozenset(
    {
        *("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"),
        *("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"),
        *("nvfp4", "nvfp4_4over6", "int4", "int5", "int6"),
        *("ultraquant_4bit", "turboquant_4bit_key", "turboquant_4bit_value"),
    }
)


def refuse(spec: KVCacheSpec) -> Refusal | None:
    """Why the Triton kernels cannot hold such a cache, beside what its format refuses; None when they can."""
    kv_format = get_format(spec.format)
    if not isinstance(kv_format, PlanesFormat | RecordsFormat | DenseFormat):
        return Refusal(f"the Triton kernels hold no {spec.format} KV", "leave the arrangement to another attention back end")
    k, v = (side.codec for side in kv_format.sides)
    for codec in (k, v):
        if codec.name not in CODEC_NAMES:
            return Refusal(f"the Triton kernels hold no {codec.name} KV", "use --attention-backend reference")
    word_bytes = max(k.bits, v.bits) // 8
    if word_bytes > 1 and any(plane.bytes % word_bytes for plane in kv_format.planes(spec)):
        reason = (
            f"{spec.format} KV: the planes of a block of {spec.block_size} tokens are no whole words, as the Triton kernels read"
        )
        return Refusal(reason, "use --block-size 16")
    return None
