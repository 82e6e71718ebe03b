"""What vendors' attention kernels read, as data: one row per vendor, one `Limit` per thing that a row cannot do.

A row says nothing about this build: it may hold such a back end (`kernels.attention.BACKENDS`) or not. The rows were written
down from the vendors' own checks and from what users of vLLM were refused. Knows names, layers and platforms by name; no
formats, no torch. Called by `selection`, and shown by `halfbyte support`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from halfbyte.errors import Refusal

if TYPE_CHECKING:
    from halfbyte.kernels.attention.base import AttentionSpec
    from halfbyte.platform import Platform

_AMPERE = frozenset({"sm80", "sm86", "sm89"})
SM90 = frozenset({"sm90"})
SM10X = frozenset({"sm100", "sm103"})
SM12X = frozenset({"sm120", "sm121"})
_CUDA = _AMPERE | SM90 | SM10X | SM12X
_CDNA3 = frozenset({"gfx942", "gfx950"})

_ANY: frozenset[str] = frozenset()
_NVFP4 = frozenset({"nvfp4", "nvfp4_4over6"})
_FP8 = "fp8_e4m3"
_DENSE16 = ("bfloat16", "float16")

_LATENT_DIM = 576
_USE_OTHER = "use --attention-backend auto or another --kv-cache-dtype"


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What a layer asks of attention: its numbers, the tokens per KV block, and which kind of attention it is.

    is_mla: the cache holds one latent per token, of which V is a part (then attention has one kv head). is_causal: a query
    sees no later key. first_tokens: so many at the beginning of each sequence are kept in `first_format` instead.
    """

    attention: AttentionSpec
    block_size: int
    is_mla: bool = False
    is_causal: bool = True
    first_tokens: int = 0
    first_format: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class Limit:
    """`applies` says of a layer that the kernels cannot run it, on `platforms` and with one of `formats` (empty: all).

    In `reason` stand {format}, {platform}, {head_dim} and {block_size}.
    """

    applies: Callable[[LayerFacts], bool]
    reason: str
    platforms: frozenset[str] = _ANY
    formats: frozenset[str] = _ANY
    fix: str = _USE_OTHER

    def holds(self, platform: str, kv_format: str) -> bool:
        return (not self.platforms or platform in self.platforms) and (not self.formats or kv_format in self.formats)


@dataclass(frozen=True, slots=True)
class Vendor:
    """reads: KV format -> the platforms on which it is read. why_not: format -> what the other platforms lack."""

    title: str
    reads: Mapping[str, frozenset[str]]
    limits: tuple[Limit, ...]
    why_not: Mapping[str, str] = field(default_factory=dict)

    @property
    def platforms(self) -> frozenset[str]:
        return frozenset().union(*self.reads.values())


def _heads_other_than(*dims: int) -> Limit:
    return Limit(lambda layer: layer.attention.head_dim not in dims, "head size {head_dim} not supported")


def _blocks_other_than(*sizes: int, platforms: frozenset[str] = _ANY) -> Limit:
    fix = f"use --block-size {sizes[0]}"
    return Limit(lambda layer: layer.block_size not in sizes, "block size {block_size} not supported", platforms, fix=fix)


_NO_MLA = Limit(lambda layer: layer.is_mla, "MLA not supported")
_ONLY_MLA = Limit(lambda layer: not layer.is_mla, "attention without MLA not supported")

VENDORS: Mapping[str, Vendor] = {
    "flashinfer": Vendor(
        "FlashInfer 0.7: fa2, XQA and trtllm-gen",
        dict.fromkeys((*_DENSE16, _FP8, "fp8_e5m2", "nvfp4"), _CUDA) | {"nvfp4_4over6": SM10X},
        (
            _NO_MLA,
            _heads_other_than(64, 128, 256, 512),
            _blocks_other_than(16, 32, 64, platforms=_CUDA - SM10X),
            _blocks_other_than(16, 32, 64, 128, 256, 512, 1024, platforms=SM10X),
            Limit(
                lambda layer: layer.attention.head_dim == 64,
                "head size 64 not supported with {format} on {platform}: its fa2 prefill misreads such blocks",
                _CUDA - SM10X,
                _NVFP4,
            ),
            Limit(
                lambda layer: layer.attention.sinks,
                "sinks not supported with {format} on {platform}: its prefill with sinks takes no block scales",
                _CUDA - SM10X,
                _NVFP4,
            ),
            Limit(lambda layer: not layer.is_causal, "non-causal not supported with {format}", formats=_NVFP4),
            Limit(
                lambda layer: layer.attention.head_dim != layer.attention.head_dim_v,
                "head sizes that differ in K and V not supported with {format}",
                formats=_NVFP4,
            ),
            Limit(lambda layer: layer.attention.sinks, "sinks not supported on {platform}", _AMPERE),
        ),
        {"nvfp4_4over6": "its writer off SM10x has one scale per block and tries no second"},
    ),
    "flash_attn": Vendor(
        "FlashAttention 2, 3 (SM90) and 4 (SM10x)",
        dict.fromkeys(_DENSE16, _CUDA) | {_FP8: SM90 | SM10X},
        (
            _NO_MLA,
            Limit(
                lambda layer: layer.attention.head_dim > 256 or bool(layer.attention.head_dim % 8),
                "head size {head_dim} not supported",
            ),
            Limit(lambda layer: bool(layer.block_size % 16), "block size {block_size} not supported", fix="use --block-size 16"),
            Limit(lambda layer: layer.attention.sinks, "sinks not supported on {platform}", _AMPERE | SM12X),
        ),
        {_FP8: "FP8 KV needs its version 3 (SM90) or 4 (SM10x)"},
    ),
    "flashinfer_mla": Vendor(
        "FlashInfer's MLA kernels of SM10x",
        dict.fromkeys((*_DENSE16, _FP8), SM10X),
        (_ONLY_MLA, _heads_other_than(_LATENT_DIM), _blocks_other_than(32, 64)),
    ),
    "flashmla": Vendor(
        "FlashMLA, dense and sparse",
        dict.fromkeys((*_DENSE16, _FP8, "fp8_ds_mla"), SM90 | SM10X) | {"nvfp4_ds_mla": SM10X},
        (_ONLY_MLA, _heads_other_than(_LATENT_DIM), _blocks_other_than(64)),
    ),
    "aiter": Vendor(
        "AITER, AMD's kernels for CDNA 3 and later",
        dict.fromkeys((*_DENSE16, _FP8, "fp8_e5m2"), _CDNA3),
        (_NO_MLA, _heads_other_than(64, 128, 256), _blocks_other_than(16, 32)),
    ),
    "flydsl": Vendor(
        "FlyDSL, AMD's decode kernel for UltraQuant",
        {"ultraquant_4bit": frozenset({"gfx950"})},
        (
            _NO_MLA,
            _heads_other_than(256),
            _blocks_other_than(64),
            Limit(lambda layer: layer.attention.sinks, "sinks not supported"),
            Limit(lambda layer: layer.attention.sliding_window is not None, "sliding window not supported"),
            Limit(
                lambda layer: layer.attention.num_heads not in {ratio * layer.attention.num_kv_heads for ratio in (6, 8, 16)},
                "heads per kv head other than 6, 8 and 16 not supported",
            ),
        ),
    ),
}

# The order in which `auto` asks the back ends of a platform, by its architecture or else its device; a reader made for the format
# comes before the law in PyTorch whatever the order.
_ON_CUDA = ("flash_attn", "flashinfer", "triton", "reference")
PRIORITIES: Mapping[str, tuple[str, ...]] = {
    "cpu": ("cpu", "reference"),
    "rocm": ("triton", "reference"),
    "cuda": _ON_CUDA,
    **dict.fromkeys(SM10X, ("flashinfer", "flash_attn", "triton", "reference")),
}


def priority(platform: Platform) -> tuple[str, ...]:
    """The back ends that may run there, the best first."""
    return PRIORITIES.get(platform.architecture, PRIORITIES[platform.device])


def vendor_refusal(name: str, platform: str, kv_format: str, layer: LayerFacts) -> Refusal | None:
    """Why the vendor's kernels cannot run such a layer, whether this build has them or not; None when they can.

    platform: its `architecture`. kv_format: the name of a format, not an alias.
    """
    vendor = VENDORS[name]
    if platform not in vendor.platforms:
        return Refusal(f"{name}: {platform} not supported", _USE_OTHER)
    if platform not in vendor.reads.get(kv_format, ()):
        where = f" on {platform}" if kv_format in vendor.reads else ""
        why = vendor.why_not.get(kv_format)
        return Refusal(f"{name}: kv_cache_dtype {kv_format} not supported{where}{f': {why}' if why else ''}", _USE_OTHER)
    for limit in vendor.limits:
        if limit.holds(platform, kv_format) and limit.applies(layer):
            facts = {"format": kv_format, "platform": platform, "head_dim": layer.attention.head_dim}
            return Refusal(f"{name}: {limit.reason.format(**facts, block_size=layer.block_size)}", limit.fix)
    return None
