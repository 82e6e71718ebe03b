"""Attention over the paged cache by our Triton kernels: every KV format, on NVIDIA and AMD.

A step's requests are of two kinds: those with few queries (decoding) are split over their context, those with many (prompts)
over their queries. Both launches read the batch from the device, so that nothing waits for it; the host only says how large they
may have to be. Knows formats through `kernels.triton`; knows nothing of requests.

Shape letters: T tokens, R requests, H heads, G kv heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kernels.attention.base import AttentionMetadata, AttentionSpec
from halfbyte.kernels.triton.limits import CODEC_NAMES, refuse
from halfbyte.kernels.triton.tiles import BUILT_IN, LayerKind, Tiles
from halfbyte.kvcache.formats import get_format

if TYPE_CHECKING:
    from halfbyte.kvcache.spec import KVCacheSpec
    from halfbyte.kvcache.tensors import LayerCache
    from halfbyte.platform import Platform

MAX_ROWS = 128  # query heads per kv head that one tile holds


class TritonBackend:
    """`max_queries`: up to so many queries of a request are decoded together. `tiles`: how the kernels are cut."""

    name = "triton"
    graph_support = "decode"

    def __init__(self, max_queries: int = 1, tiles: Tiles = BUILT_IN) -> None:
        self._max_queries = max_queries
        self._tiles = tiles

    def has_reader(self, kv_format: str) -> bool:
        sides = get_format(kv_format).sides
        return sides is not None and all(side.codec.name in CODEC_NAMES for side in sides)

    def arrange(self, kv_spec: KVCacheSpec) -> str:
        return kv_spec.format

    def refuse(self, spec: AttentionSpec, kv_spec: KVCacheSpec, platform: Platform) -> Refusal | None:
        if platform.device == "cpu":
            return Refusal("the triton attention back end runs on GPUs", "leave --attention-backend out")
        if spec.num_heads % spec.num_kv_heads:
            return Refusal(f"{spec.num_heads} heads cannot share {spec.num_kv_heads} kv heads evenly", "")
        heads = spec.num_heads // spec.num_kv_heads
        if heads * self._max_queries > MAX_ROWS:
            return Refusal(
                f"the triton attention back end has up to {MAX_ROWS} heads per kv head, got {heads}",
                "use --attention-backend reference",
            )
        return refuse(kv_spec)

    def prepare(self, metadata: AttentionMetadata, window: int | None) -> None:
        from halfbyte.kernels.triton.attention import make_plan

        metadata.plan = make_plan(metadata, window, self._max_queries)

    def forward(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        assert spec.sinks is (sinks_H is not None), "a spec with sinks comes with their values"
        from halfbyte.kernels.triton.attention import Attention, gpu_of

        out_THD = torch.empty(*q_THD.shape[:2], spec.head_dim_v, dtype=q_THD.dtype, device=q_THD.device)
        if len(q_THD):
            kind = LayerKind.of(spec, cache.spec.format, q_THD.dtype, self._max_queries)
            tuned = self._tiles.cuts.get(kind)
            attention = Attention(cache, metadata, spec, sinks_H, gpu_of(q_THD.device), tuned)
            for launch in attention.launches(q_THD, k_TGD, v_TGD, out_THD):
                launch.run()
        return out_THD
