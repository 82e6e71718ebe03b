"""Attention over the paged cache by the C++ kernels: ragged prefill and decode, the bits of a row independent of its batch.

A model that runs as a program (`kernels.cpu.program`) has its attention inside it; `forward` here is the same kernels for one
layer at a time. Knows formats only by the readers that the library has.

Shape letters: T tokens, H heads, G kv heads, D head dim.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kernels.attention.base import AttentionMetadata, AttentionSpec
from halfbyte.kernels.cpu.abi import CACHE_FORMATS, CODECS, MAX_HEAD_DIM, MAX_HEADS_PER_KV_HEAD, PAIR_BLOCK, PAIR_DIMS, TILE
from halfbyte.kernels.cpu.library import CpuEngine
from halfbyte.kernels.cpu.program import INPUT, NO_ROTATION, OUTPUT, Program
from halfbyte.kvcache.formats import get_format
from halfbyte.kvcache.formats.coded import CodedFormat
from halfbyte.kvcache.formats.tiles import SUFFIX
from halfbyte.platform import granted_threads

if TYPE_CHECKING:
    from halfbyte.kvcache.spec import KVCacheSpec
    from halfbyte.kvcache.tensors import LayerCache
    from halfbyte.platform import Platform


@cache
def _engine(num_threads: int) -> CpuEngine:
    return CpuEngine(num_threads)


class CpuBackend:
    """Tiles of keys, an online softmax in float32; long contexts are spread over the threads."""

    name = "cpu"
    graph_support = "none"

    def has_reader(self, kv_format: str) -> bool:
        found = get_format(kv_format)
        if not isinstance(found, CodedFormat):
            return kv_format in CACHE_FORMATS
        return all(side.codec.name in CODECS for side in (found.k, found.v))

    def arrange(self, kv_spec: KVCacheSpec) -> str:
        """Codes in tiles. bfloat16 in pairs where blocks and heads fill the vectors (kv_pairs.h), to be read without turning or
        widening; in tiles too where the first tokens are kept apart."""
        if kv_spec.format not in CACHE_FORMATS or kv_spec.first_tokens:
            return kv_spec.format + SUFFIX if self._fits_tiles(kv_spec) else kv_spec.format
        fits = kv_spec.block_size % PAIR_BLOCK == 0 and kv_spec.head_dim % 2 == 0 and kv_spec.head_dim_v % PAIR_DIMS == 0
        return "bfloat16_pairs" if kv_spec.format == "bfloat16" and fits else kv_spec.format

    def _fits_tiles(self, kv_spec: KVCacheSpec) -> bool:
        sizes = (kv_spec.block_size, kv_spec.head_dim, kv_spec.head_dim_v)
        return self.has_reader(kv_spec.format) and not any(size % TILE for size in sizes)

    def refuse(self, spec: AttentionSpec, kv_spec: KVCacheSpec, platform: Platform) -> Refusal | None:
        if platform.device != "cpu":
            return Refusal(f"the cpu attention back end does not run on {platform.device}", "leave --attention-backend out")
        if spec.num_heads % spec.num_kv_heads:
            return Refusal(f"{spec.num_heads} heads cannot share {spec.num_kv_heads} kv heads evenly", "")
        use_reference = "use --attention-backend reference"
        if not kv_spec.format.endswith(SUFFIX) and (kv_spec.format not in CACHE_FORMATS or kv_spec.first_tokens):
            if not self.has_reader(kv_spec.format):
                return Refusal(f"the cpu attention back end does not read {kv_spec.format} KV", use_reference)
            return Refusal(
                f"the cpu attention back end reads {kv_spec.format} KV in tiles of {TILE}: block size {kv_spec.block_size} and "
                f"head dim {kv_spec.head_dim} must be multiples of it",
                f"use --block-size {TILE} or a multiple, or --attention-backend reference",
            )
        if max(spec.head_dim, spec.head_dim_v) > MAX_HEAD_DIM or spec.head_dim % 2:
            return Refusal(
                f"the cpu attention back end has even head dims up to {MAX_HEAD_DIM}, got {spec.head_dim}", use_reference
            )
        if spec.num_heads // spec.num_kv_heads > MAX_HEADS_PER_KV_HEAD:
            return Refusal(
                f"the cpu attention back end has up to {MAX_HEADS_PER_KV_HEAD} heads per kv head, "
                f"got {spec.num_heads // spec.num_kv_heads}",
                use_reference,
            )
        return None

    def prepare(self, metadata: AttentionMetadata, window: int | None) -> None:
        """Nothing: the library plans each slice of a step itself."""

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
        qkv = torch.cat([q_THD.flatten(1), k_TGD.flatten(1), v_TGD.flatten(1)], 1).float()
        program = Program(_engine(granted_threads()))
        program.attention(INPUT, OUTPUT, NO_ROTATION, spec, cache, 0, sinks_H=sinks_H)
        out = program.run(qkv.shape[0], input_TE=qkv, metadata=[metadata])
        return out.to(q_THD.dtype).view(-1, spec.num_heads, spec.head_dim_v)
