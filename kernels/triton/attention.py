"""The launches of one layer's attention, in order: from queries, keys and values of a step to its outputs.

Says which kernels a batch needs and how large their grids may have to be; what is computed is theirs. The list of work of a
step and KV group is made on the device by the first layer and kept in the plan. Called by the Triton attention back end.

Shape letters: T tokens, R requests, H heads, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.attention.base import AttentionMetadata, AttentionSpec
from halfbyte.kernels.triton import kv_write
from halfbyte.kernels.triton.decode import Batch, Found, Kind, attend_parts, merge_parts, plan_batch
from halfbyte.kernels.triton.launch import Launch
from halfbyte.kernels.triton.prefill import attend_prompts
from halfbyte.kernels.triton.sides import KVSide, view_sides
from halfbyte.kernels.triton.targets import Cut, Cuts, decode_cut, num_programs, part_tokens, prompt_cut
from halfbyte.kernels.triton.turns import turn_launch
from halfbyte.kernels.triton.vectors import vectors
from halfbyte.kvcache.tensors import LayerCache
from halfbyte.kvcache.turns import LayerTurns

# K and V, and those of the first tokens (the same again where these are kept like others).
Sides = tuple[KVSide, KVSide, KVSide, KVSide]

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class GPU:
    """What launches depend on. architecture: as `Platform.architecture` names it."""

    architecture: str
    num_multiprocessors: int


@cache
def gpu_of(device: torch.device) -> GPU:
    if device.type != "cuda":
        return GPU(device.type, 1)
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return GPU(found.gcnArchName.split(":")[0], found.multi_processor_count)
    return GPU(f"sm{found.major}{found.minor}", found.multi_processor_count)


@dataclass(slots=True)
class TritonPlan:
    """What the host knows of a step and KV group. Lengths may be upper bounds, where a graph serves many steps.

    batches: the list of work, by the query heads of a kv head and the queries of a tile, once it is made.
    """

    max_queries: int
    query_lens: list[int]
    part_tokens: int
    max_parts: int
    batches: dict[tuple[int, int], Batch] = field(default_factory=dict)

    @property
    def has_decodes(self) -> bool:
        return any(0 < num <= self.max_queries for num in self.query_lens)

    def num_tiles(self, tile_queries: int) -> int:
        return sum(-(-num // tile_queries) for num in self.query_lens if num > self.max_queries)


def make_plan(metadata: AttentionMetadata, window: int | None, max_queries: int) -> TritonPlan:
    lens = zip(metadata.query_lens_host, metadata.seq_lens_host, strict=True)
    seen = (length if window is None else min(length, window + num) for num, length in lens if 0 < num <= max_queries)
    # A window begins and ends within a part, and first tokens are a part of their own.
    size = part_tokens(metadata.max_context_len)
    max_parts = sum(-(-num_tokens // size) + 2 for num_tokens in seen)
    return TritonPlan(max_queries, metadata.query_lens_host, size, max_parts)


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer in one step. sinks_H: float32, or None. tuned: cuts that were measured; None: the built-in ones."""

    cache: LayerCache
    metadata: AttentionMetadata
    spec: AttentionSpec
    sinks_H: Tensor | None
    gpu: GPU
    tuned: Cuts | None = None

    def launches(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_THD: Tensor) -> Iterator[Launch]:
        """K and V are stored, and `out_THD`, in q's dtype, is filled in for all tokens of requests."""
        sides = self.sides(q_THD.dtype)
        cuts = self.tuned or self.built_in_cuts(*sides[:2])
        kind = self._kind(q_THD.dtype, cuts.prompt)
        plan, turns = self.metadata.plan, self.cache.turns or LayerTurns()
        yield from self._write(k_TGD, v_TGD)
        if turns.q_GDD is not None:
            turned_THD = _floats_like(q_THD)
            yield turn_launch(q_THD, turns.q_GDD, turned_THD)
            q_THD = turned_THD
        if (work := _work(kind)) not in plan.batches:
            plan.batches[work] = _batch(self.metadata)
            yield self._plan(kind)
        found_THD = out_THD if turns.out_GDD is None else _floats_like(out_THD)
        if plan.has_decodes:
            yield from self._decode(q_THD, found_THD, kind, cuts.decode, sides)
        if num_tiles := plan.num_tiles(kind.tile_queries.value):
            yield self._prompts(q_THD, found_THD, kind, cuts.prompt, sides, num_tiles)
        if turns.out_GDD is not None:
            yield turn_launch(found_THD, turns.out_GDD, out_THD)

    def sides(self, dtype: torch.dtype) -> Sides:
        """As queries of this dtype meet them."""
        k, v = view_sides(self.cache, by_word=dtype != torch.float32)
        return (k, v, k, v) if self.cache.first is None else (k, v, *view_sides(self.cache.first))

    def built_in_cuts(self, k: KVSide, v: KVSide) -> Cuts:
        spec, architecture = self.spec, self.gpu.architecture
        heads = spec.num_heads // spec.num_kv_heads
        num_rows = triton.next_power_of_2(heads * self.metadata.plan.max_queries)
        width, bits = max(k.width.value, v.width.value), (k.bits.value, v.bits.value)
        is_easy = all(side.is_packed.value or side.bits.value == 16 for side in (k, v))
        decode = decode_cut(architecture, num_rows, width, bits, is_easy)
        return Cuts(decode, prompt_cut(architecture, heads, width))

    def _write(self, k_TGD: Tensor, v_TGD: Tensor) -> Iterator[Launch]:
        cache, metadata = self.cache, self.metadata
        yield kv_write.launch_of(k_TGD, v_TGD, cache, metadata.slot_mapping, cache.turns)
        if cache.first is not None and metadata.first is not None:
            yield kv_write.launch_of(k_TGD, v_TGD, cache.first, metadata.first.slot_mapping, cache.turns)

    def _plan(self, kind: Kind) -> Launch:
        num_requests = len(self.metadata.seq_lens)
        arguments = (self._batch(kind), num_requests, kind, triton.next_power_of_2(num_requests))
        return Launch((1,), plan_batch, arguments)

    def _decode(self, q_THD: Tensor, out_THD: Tensor, kind: Kind, cut: Cut, sides: Sides) -> Iterator[Launch]:
        spec, metadata = self.spec, self.metadata
        batch, num_requests = self._batch(kind), len(metadata.seq_lens)
        num_rows = kind.heads.value * kind.max_queries.value
        found = _found(metadata.plan.max_parts, spec.num_kv_heads, num_rows, spec.head_dim_v, q_THD.device)
        programs = min(num_programs(self.gpu.num_multiprocessors), metadata.plan.max_parts * spec.num_kv_heads)
        what = (vectors(q_THD), batch, *sides, found, spec.scale, num_requests, spec.num_kv_heads, kind)
        yield Launch((programs,), attend_parts, (*what, cut.rows, cut.tile, cut.stages), cut.num_warps, is_exact=False)
        sizes = (spec.head_dim_v, sides[1].width.value, self.sinks_H is not None)
        sinks = found.most if self.sinks_H is None else self.sinks_H
        arguments = (vectors(out_THD), batch, found, sinks, num_requests, spec.num_kv_heads, kind, cut.rows, *sizes)
        yield Launch((num_requests, spec.num_kv_heads), merge_parts, arguments, is_exact=False)

    def _prompts(self, q_THD: Tensor, out_THD: Tensor, kind: Kind, cut: Cut, sides: Sides, num_tiles: int) -> Launch:
        spec, metadata = self.spec, self.metadata
        sinks = sides[0].scale if self.sinks_H is None else self.sinks_H
        what = (vectors(q_THD), vectors(out_THD), self._batch(kind), *sides, sinks, spec.scale, len(metadata.seq_lens), kind)
        arguments = (*what, cut.rows, cut.tile, cut.stages, self.sinks_H is not None)
        return Launch((num_tiles, spec.num_kv_heads), attend_prompts, arguments, cut.num_warps, is_exact=False)

    def _kind(self, dtype: torch.dtype, prompt: Cut) -> Kind:
        spec, metadata = self.spec, self.metadata
        heads = spec.num_heads // spec.num_kv_heads
        first = metadata.first
        constants = (
            heads,
            metadata.plan.max_queries,
            prompt.rows // heads,
            metadata.plan.part_tokens,
            spec.sliding_window or 0,
            spec.soft_cap or 0.0,
            metadata.block_size,
            0 if first is None else first.count,
            1 if first is None else first.block_size,
            _DTYPES[dtype],
        )
        return Kind(*map(tl.constexpr, constants))

    def _batch(self, kind: Kind) -> Batch:
        found: Batch = self.metadata.plan.batches[_work(kind)]
        return found


def _work(kind: Kind) -> tuple[int, int]:
    """Layers for which this is the same share a list of work."""
    return kind.heads.value, kind.tile_queries.value


def _batch(metadata: AttentionMetadata) -> Batch:
    parts, tiles = torch.empty(2, len(metadata.seq_lens) + 1, dtype=torch.int32, device=metadata.seq_lens.device)
    table = metadata.block_table
    return Batch(metadata.query_start_loc, metadata.seq_lens, table, table.stride(0), parts, tiles)


def _found(num_parts: int, num_kv_heads: int, num_rows: int, dim: int, device: torch.device) -> Found:
    sums = torch.empty(num_parts, num_kv_heads, num_rows, dim, dtype=torch.float32, device=device)
    most, totals = torch.empty(2, num_parts, num_kv_heads, num_rows, dtype=torch.float32, device=device)
    return Found(sums, most, totals)


def _floats_like(x_THD: Tensor) -> Tensor:
    return torch.empty(x_THD.shape, dtype=torch.float32, device=x_THD.device)
