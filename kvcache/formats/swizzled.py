"""NVFP4 as trtllm-gen reads it on compute capability 10.x: an arrangement of `nvfp4` and `nvfp4_4over6`, in as many bytes.

K is as `PlanesFormat` has it, and so are V's codes. V's block scales lie interleaved, four tokens at a time: see
`blocks.swizzle_v_scales`. FlashInfer's back end asks for it where those kernels serve it; nobody else reads it.

Shape letters: T tokens, G kv heads, B blocks, S block size, Q groups of four tokens, K block scales of a vector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kvcache.formats.base import Side
from halfbyte.kvcache.formats.blocks import BLOCK, Nvfp4Codec
from halfbyte.kvcache.formats.coded import PlanesFormat
from halfbyte.kvcache.spec import KVCacheSpec

if TYPE_CHECKING:
    from halfbyte.kvcache.tensors import LayerCache
    from halfbyte.platform import Platform

SUFFIX = "_swizzled"
GROUP = 4  # tokens, and block scales, that lie interleaved


class SwizzledFormat(PlanesFormat):
    """The codes of `PlanesFormat`, V's block scales in groups of four tokens."""

    def refuse(self, spec: KVCacheSpec, platform: Platform) -> Refusal | None:
        if spec.block_size % GROUP or spec.head_dim_v % (GROUP * BLOCK):
            return Refusal(
                f"{self.name} holds groups of {GROUP} tokens and {GROUP * BLOCK} numbers, got block size {spec.block_size} and "
                f"head dim {spec.head_dim_v}",
                "use --attention-backend triton",
            )
        return super().refuse(spec, platform)

    def put(self, cache: LayerCache, prefix: str, at: tuple[Tensor, Tensor], codes_TGD: Tensor, extra_TGE: Tensor) -> None:
        super().put(cache, prefix, at, codes_TGD, extra_TGE[..., :0] if prefix == "v" else extra_TGE)
        if prefix == "v":
            block_T, offset_T = at
            _by_token(cache)[block_T, offset_T // GROUP, offset_T % GROUP] = extra_TGE

    def get(self, cache: LayerCache, prefix: str, at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        codes, extra = super().get(cache, prefix, at)
        if prefix == "k":
            return codes, extra
        block, offset = at
        return codes, _by_token(cache)[block, offset // GROUP, offset % GROUP]


def _by_token(cache: LayerCache) -> Tensor:
    """V's block scales as [B, Q, token of the group, G, K]: a view, whose first dimensions name a token."""
    scales_BGSK = cache.planes["v_extra"]
    groups_BGQN = scales_BGSK.unflatten(2, (-1, GROUP)).flatten(3)
    return groups_BGQN.unflatten(3, (-1, GROUP)).permute(0, 2, 4, 1, 3)


def make(name: str) -> SwizzledFormat:
    codec = Nvfp4Codec(name.removesuffix(SUFFIX))
    return SwizzledFormat(name, Side(codec), Side(codec))
