"""One layer's paged cache and a step over it, in any KV format, for the kernels to be timed on.

Numbers are random, blocks lie anywhere. Called by the measurements beside it.

Shape letters: T tokens, R requests, H heads, G kv heads, D head dim, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfbyte.kernels.attention.base import AttentionMetadata, AttentionSpec, FirstTokens
from halfbyte.kernels.triton import kv_write
from halfbyte.kernels.triton.attention import Attention, gpu_of, make_plan
from halfbyte.kernels.triton.launch import Launch
from halfbyte.kvcache.formats import get_format, page_bytes
from halfbyte.kvcache.spec import KVCacheSpec, make_layout
from halfbyte.kvcache.tensors import KVTensors, LayerCache
from halfbyte.kvcache.turns import LayerTurns, all_turns

BLOCK_SIZE = 16
WRITERS = ("write_rows",)


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests of `queries` new tokens each, with `context` tokens in all."""

    requests: int
    queries: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128


class Step:
    """A step of one layer. kv_bytes: what attention has to read of the cache at least."""

    def __init__(self, name: str, shape: Shape, device: torch.device) -> None:
        first = get_format(name).first_tokens
        spec = AttentionSpec(shape.heads, shape.kv_heads, shape.dim, shape.dim, shape.dim**-0.5)
        kv_spec = KVCacheSpec(shape.kv_heads, shape.dim, shape.dim, BLOCK_SIZE, None, name, first)
        layout = make_layout([kv_spec], page_bytes)
        [group] = layout.groups
        entries = group.num_entries(shape.context)
        tensors = KVTensors(layout, 1 + shape.requests * entries, device)
        cache = tensors.layer(0)
        generator = torch.Generator().manual_seed(0)
        ids = 1 + torch.randperm(shape.requests * entries, generator=generator)
        metadata = _metadata(shape, ids.view(shape.requests, entries).int().to(device), group.block_size)
        if first:
            empty_T = torch.full_like(metadata.slot_mapping, -1)
            metadata.first = FirstTokens(group.first_tokens, group.first_block_size, empty_T)
        self.cache = replace(cache, turns=_turns(name, kv_spec, device))
        self.kv_bytes = shape.requests * shape.context * page_bytes(kv_spec) // kv_spec.block_size
        self._spec, self._metadata = spec, metadata
        self._inputs = [
            torch.randn(shape.requests * shape.queries, heads, shape.dim, device=device).to(torch.bfloat16)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        ]
        _fill(self.cache, shape, ids.to(device))
        if self.cache.first is not None:
            for plane in self.cache.first.planes.values():  # these blocks hold other numbers, which must be some
                plane[metadata.block_table[:, : group.first_tokens // group.first_block_size].flatten().long()] = 0

    def launches(self) -> list[Launch]:
        """All of the step, in order."""
        self._metadata.plan = make_plan(self._metadata, None, 1)
        attention = Attention(self.cache, self._metadata, self._spec, None, gpu_of(self._inputs[0].device))
        return list(attention.launches(*self._inputs, torch.empty_like(self._inputs[0])))

    def attending(self) -> Callable[[], None]:
        """Runs what a layer launches but for storing K and V."""
        launches = [launch for launch in self.launches() if launch.kernel.__name__ not in WRITERS]
        return lambda: _run(launches)

    def writing(self) -> Callable[[], None]:
        """Stores K and V."""
        launches = [launch for launch in self.launches() if launch.kernel.__name__ in WRITERS][:1]
        return lambda: _run(launches)


def _run(launches: list[Launch]) -> None:
    for launch in launches:
        launch.run()


def _metadata(shape: Shape, table_RB: Tensor, block_size: int) -> AttentionMetadata:
    device = table_RB.device
    position_RQ = torch.arange(shape.context - shape.queries, shape.context, device=device).expand(shape.requests, -1)
    entry_RQ = (position_RQ // block_size).clamp(max=table_RB.shape[1] - 1)
    slots_RQ = table_RB.long().gather(1, entry_RQ) * block_size + position_RQ % block_size
    return AttentionMetadata(
        query_start_loc=torch.arange(shape.requests + 1, device=device, dtype=torch.int32) * shape.queries,
        seq_lens=torch.full((shape.requests,), shape.context, device=device, dtype=torch.int32),
        block_table=table_RB,
        slot_mapping=slots_RQ.flatten(),
        block_size=block_size,
        query_lens_host=[shape.queries] * shape.requests,
        seq_lens_host=[shape.context] * shape.requests,
        max_query_len=shape.queries,
        max_seq_len=shape.context,
        num_decodes=shape.requests if shape.queries == 1 else 0,
    )


def _turns(name: str, spec: KVCacheSpec, device: torch.device) -> LayerTurns | None:
    """As a calibrated model has them: any matrices do."""
    rotations = get_format(name).rotations
    found = None
    if rotations[0] == "calibrated":
        matrix_GDD = torch.eye(spec.head_dim).expand(spec.num_kv_heads, -1, -1).contiguous()
        found = LayerTurns(k_GDD=matrix_GDD, k_shift_GD=torch.zeros(spec.num_kv_heads, spec.head_dim), q_GDD=matrix_GDD)
    made = all_turns(found, rotations, spec)
    return None if made is None else made.to(device)


def _fill(cache: LayerCache, shape: Shape, ids: Tensor) -> None:
    """Random numbers in all blocks, through the writer: random bytes would be no numbers."""
    size, device = cache.spec.block_size, ids.device
    for part in ids.split(4096 // size):
        slots_T = (part[:, None] * size + torch.arange(size, device=device)).flatten()
        k_TGD, v_TGD = (torch.randn(len(slots_T), shape.kv_heads, shape.dim, device=device).to(torch.bfloat16) for _ in "kv")
        kv_write.write(k_TGD, v_TGD, cache, slots_T)
