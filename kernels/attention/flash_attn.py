"""Attention by FlashAttention over the paged cache: version 2 (`flash_attn`), and 3 on compute capability 9.0.

One call takes the whole ragged batch, decodes and prefills alike, and everything it reads is on the device. K and V are written
by our own Triton writer. Version 2 reads pages of whole 256 tokens; version 3 any, and also FP8, for queries in FP8 with a scale
of 1. How a context is cut into parts depends on the batch, and so do the last bits of the outputs. Version 4 is not called.

Shape letters: T tokens, R requests, H heads, G kv heads, D head dim, B blocks, S block size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kernels.attention.base import AttentionMetadata, AttentionSpec
from halfbyte.kernels.attention.vendors import SM10X, SM90, VENDORS

if TYPE_CHECKING:
    from halfbyte.kvcache.spec import KVCacheSpec
    from halfbyte.kvcache.tensors import LayerCache
    from halfbyte.platform import Platform

_PAGE_OF_2 = 256


class FlashAttnBackend:
    """architecture: the platform's that it runs on; default: that of the GPU in use."""

    name = "flash_attn"

    def __init__(self, architecture: str | None = None) -> None:
        if architecture is None and torch.cuda.is_available():
            architecture = "sm{}{}".format(*torch.cuda.get_device_capability())
        self._is_version_3 = architecture in SM90
        self.graph_support = "decode"

    def has_reader(self, kv_format: str) -> bool:
        return kv_format in VENDORS[self.name].reads

    def arrange(self, kv_spec: KVCacheSpec) -> str:
        return kv_spec.format

    def refuse(self, spec: AttentionSpec, kv_spec: KVCacheSpec, platform: Platform) -> Refusal | None:
        architecture, use_other = platform.architecture, "use --attention-backend auto"
        if platform.device != "cuda":
            return Refusal(f"flash_attn: {platform.device} not supported", "leave --attention-backend out")
        if architecture in SM10X:
            return Refusal(f"flash_attn: version 4, which {architecture} needs, is not called by this build", use_other)
        if spec.num_heads % spec.num_kv_heads:
            return Refusal(f"{spec.num_heads} heads cannot share {spec.num_kv_heads} kv heads evenly", "")
        if spec.sinks:
            return Refusal("flash_attn: sinks not supported: its released versions have none", use_other)
        if spec.head_dim != spec.head_dim_v:
            return Refusal("flash_attn: head sizes that differ in K and V not supported", use_other)
        if kv_spec.first_tokens:
            return Refusal("flash_attn: first tokens kept apart not supported", f"use --kv-cache-first-tokens 0, or {use_other}")
        if kv_spec.first_format == "float32":
            return Refusal("flash_attn: models in float32 not supported", f"use --dtype bfloat16, or {use_other}")
        if architecture not in SM90 and kv_spec.block_size % _PAGE_OF_2:
            reason = f"flash_attn: its version 2 reads blocks of {_PAGE_OF_2} tokens and multiples, got {kv_spec.block_size}"
            return Refusal(reason, f"use --block-size {_PAGE_OF_2}, or {use_other}")
        return None

    def prepare(self, metadata: AttentionMetadata, window: int | None) -> None:
        """Where contexts begin, which version 2 wants, int32 [R + 1]; and the window as both want it."""
        starts = torch.nn.functional.pad(metadata.seq_lens.cumsum(0), (1, 0)).int()
        metadata.plan = (starts, (-1, -1) if window is None else (window - 1, 0))

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
        from halfbyte.kernels.triton.kv_write import write  # not everywhere installed

        dtype = q_THD.dtype
        if cache.turns is not None:
            q_THD, k_TGD, v_TGD = (x.to(dtype) for x in cache.turns.turn(q_THD, k_TGD, v_TGD))
        write(k_TGD, v_TGD, cache, metadata.slot_mapping)
        attend = self._attend_3 if self._is_version_3 else self._attend_2
        out_THD = attend(q_THD, cache, metadata, spec).to(dtype)
        return out_THD if cache.turns is None else cache.turns.turn_back(out_THD).to(dtype)

    def _attend_2(self, q_THD: Tensor, cache: LayerCache, metadata: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        from flash_attn import flash_attn_varlen_func

        seq_starts, window = metadata.plan
        k_BSGD, v_BSGD = (cache.planes[side].transpose(1, 2) for side in ("k", "v"))
        out: Tensor = flash_attn_varlen_func(
            q_THD.to(k_BSGD.dtype),  # 16-bit numbers are multiplied with their like
            k_BSGD,
            v_BSGD,
            cu_seqlens_q=metadata.query_start_loc,
            cu_seqlens_k=seq_starts,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=spec.scale,
            causal=True,
            window_size=window,
            softcap=spec.soft_cap or 0.0,
            block_table=metadata.block_table,
        )
        return out

    def _attend_3(self, q_THD: Tensor, cache: LayerCache, metadata: AttentionMetadata, spec: AttentionSpec) -> Tensor:
        from flash_attn_interface import flash_attn_with_kvcache

        k_BSGD, v_BSGD = (cache.planes[side].transpose(1, 2) for side in ("k", "v"))
        descales: dict[str, Tensor] = {}
        if cache.format.name == "fp8_e4m3":
            fp8, shape = torch.float8_e4m3fn, (len(metadata.seq_lens), spec.num_kv_heads)
            k_BSGD, v_BSGD = k_BSGD.view(fp8), v_BSGD.view(fp8)
            most = torch.finfo(fp8).max
            q_THD = q_THD.clamp(-most, most)  # torch's cast makes NaN of what is too great
            descales = {"k_descale": cache.scales.k_G.expand(shape), "v_descale": cache.scales.v_G.expand(shape)}
        out: Tensor = flash_attn_with_kvcache(
            q_THD.to(k_BSGD.dtype),
            k_BSGD,
            v_BSGD,
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_table,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            softmax_scale=spec.scale,
            causal=True,
            window_size=metadata.plan[1],
            softcap=spec.soft_cap or 0.0,
            **descales,
        )
        return out
