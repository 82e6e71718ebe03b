"""Which of FlashInfer's kernels serve which platform, as data, and what these cannot do.

fa2: its wrappers, which plan on the host, so that no graph can hold them. xqa: decode on compute capability 12.x. trtllm:
NVIDIA's finished kernels (cubins) for 10.x, for both phases. Where decode has kernels that graphs can hold, what only fa2 could
do is refused: others do it. Knows names and numbers; no tensors, no package. Called by `backend`; what a vendor's kernels cannot
read at all stands in `vendors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from halfbyte.errors import Refusal
from halfbyte.kernels.attention.vendors import SM10X, SM12X
from halfbyte.kvcache.formats.swizzled import SUFFIX

if TYPE_CHECKING:
    from halfbyte.kernels.attention.base import AttentionSpec
    from halfbyte.kvcache.spec import KVCacheSpec

Kernel = Literal["fa2", "xqa", "trtllm"]

NVFP4 = frozenset({"nvfp4", "nvfp4_4over6"})
# The formats whose queries trtllm-gen takes in E4M3; NVFP4's outputs are E4M3, too.
FP8_QUERIES = NVFP4 | {"fp8_e4m3"}

_USE_TRITON = "use --attention-backend triton"
# Heads of more numbers than the first may be as many per kv head as the second.
_XQA_WIDE = (256, 16)


@dataclass(frozen=True, slots=True)
class Route:
    """The kernels of the two phases."""

    prefill: Kernel
    decode: Kernel

    @property
    def graph_support(self) -> str:
        """See `AttentionBackend`."""
        return "none" if self.decode == "fa2" else "decode"


ROUTES = dict.fromkeys(SM10X, Route("trtllm", "trtllm")) | dict.fromkeys(SM12X, Route("fa2", "xqa"))
_ELSEWHERE = Route("fa2", "fa2")


def route(architecture: str) -> Route:
    return ROUTES.get(architecture, _ELSEWHERE)


def arrangement(architecture: str, kv_format: str) -> str:
    """trtllm-gen reads V's block scales interleaved, the others as they are."""
    return kv_format + SUFFIX if route(architecture).decode == "trtllm" and kv_format in NVFP4 else kv_format


def refuse(architecture: str, spec: AttentionSpec, kv_spec: KVCacheSpec) -> Refusal | None:
    """What the platform's kernels cannot do with such a layer, beside the limits of `vendors`."""
    if spec.num_heads % spec.num_kv_heads:
        return Refusal(f"{spec.num_heads} heads cannot share {spec.num_kv_heads} kv heads evenly", "")
    if spec.head_dim != spec.head_dim_v:
        return Refusal("flashinfer: head sizes that differ in K and V not supported", _USE_TRITON)
    if kv_spec.first_tokens:
        return Refusal("flashinfer: first tokens kept apart not supported", f"use --kv-cache-first-tokens 0, or {_USE_TRITON}")
    if kv_spec.first_format == "float32":
        return Refusal("flashinfer: models in float32 not supported", f"use --dtype bfloat16, or {_USE_TRITON}")
    decode = route(architecture).decode
    if decode == "fa2":
        return None
    if spec.soft_cap is not None:
        return Refusal(f"flashinfer: capped scores not supported on {architecture}: {decode} has no cap", _USE_TRITON)
    if kv_spec.format == "fp8_e5m2":
        return Refusal(f"flashinfer: kv_cache_dtype fp8_e5m2 not supported on {architecture}: {decode} reads E4M3", _USE_TRITON)
    dim, most = _XQA_WIDE
    if decode == "xqa" and spec.head_dim > dim and spec.num_heads > most * spec.num_kv_heads:
        return Refusal(f"flashinfer: heads of more than {dim} on {architecture} are at most {most} per kv head", _USE_TRITON)
    return None
