"""One layer's paged cache and a step over it, in any KV format, for the kernels to be timed on.

Numbers are random, blocks lie anywhere. Called by the measurements beside it.

Shape letters: T tokens, R requests, H heads, G kv heads, D head dim, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.kernels.attention.base import AttentionMetadata, AttentionSpec, FirstTokens
from halfbyte.kernels.triton.attention import Attention, gpu_of, make_plan
from halfbyte.kernels.triton.launch import Launch
from halfbyte.kernels.triton.random_layer import RandomLayer
from halfbyte.kvcache.formats import get_format, page_bytes
from halfbyte.kvcache.spec import KVCacheSpec

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
        spec = AttentionSpec(shape.heads, shape.kv_heads, shape.dim, shape.dim, shape.dim**-0.5)
        kv_spec = KVCacheSpec(shape.kv_heads, shape.dim, shape.dim, BLOCK_SIZE, None, name, get_format(name).first_tokens)
        layer = RandomLayer(kv_spec, shape.requests, shape.context, torch.bfloat16, device)
        self.cache, group = layer.cache, layer.group
        metadata = _metadata(shape, layer.tables(shape.requests, shape.context), group.block_size)
        if group.first_tokens:
            empty_T = torch.full_like(metadata.slot_mapping, -1)
            metadata.first = FirstTokens(group.first_tokens, group.first_block_size, empty_T)
        self.kv_bytes = shape.requests * shape.context * page_bytes(kv_spec) // kv_spec.block_size
        self._spec, self._metadata = spec, metadata
        self._inputs = [
            torch.randn(shape.requests * shape.queries, heads, shape.dim, device=device).to(torch.bfloat16)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        ]

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
