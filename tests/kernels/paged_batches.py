"""Batches over one layer's paged cache, for tests that compare a back end with the law.

Shape letters: T tokens, L context, G kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfbyte.kernels.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from halfbyte.kvcache.formats import page_bytes
from halfbyte.kvcache.scales import LayerScales
from halfbyte.kvcache.spec import KVCacheSpec
from halfbyte.kvcache.tensors import LayerCache, view_layer
from halfbyte.kvcache.turns import LayerTurns

# query length and context of each request
BATCHES = {
    "decodes": ((1, 40), (1, 1), (1, 64), (1, 17)),
    "prefills": ((5, 5), (20, 50), (2, 33)),
    "mixed": ((1, 40), (20, 20), (1, 16), (1, 31), (7, 64)),
}


@dataclass
class Run:
    """A batch over the cache of one back end, K and V of earlier steps written by the law."""

    cache: LayerCache
    metadata: AttentionMetadata
    slots: list[Tensor]  # of each request's whole context


def make_run(
    backend: AttentionBackend,
    spec: AttentionSpec,
    name: str,
    batch: str,
    parts: tuple[LayerScales, LayerTurns | None],
    block_size: int = 16,
) -> Run:
    """The cache as the back end arranges it, full of NaN but for the null block."""
    requests = BATCHES[batch]
    kv_spec = KVCacheSpec(spec.num_kv_heads, spec.head_dim, spec.head_dim_v, block_size, spec.sliding_window, name)
    kv_spec = replace(kv_spec, format=backend.arrange(kv_spec))
    counts = [-(-context // block_size) for _, context in requests]
    ids = iter((1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1))).tolist())
    pages = torch.full((1 + sum(counts), page_bytes(kv_spec)), 0xFF, dtype=torch.uint8)
    pages[0] = 0
    cache = view_layer(pages, kv_spec, parts[0], parts[1])
    table = torch.zeros(len(requests), max(counts) + 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([next(ids) for _ in range(count)])
    positions = [torch.arange(context) for _, context in requests]
    slots = [table[row, at // block_size].long() * block_size + at % block_size for row, at in enumerate(positions)]
    if spec.sliding_window is not None:  # what slid out of the window is the null block
        for row, (num, context) in enumerate(requests):
            table[row, : max(0, context - num + 1 - spec.sliding_window) // block_size] = 0
    queries = [num for num, _ in requests]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *queries]).cumsum(0).int(),
        seq_lens=torch.tensor([context for _, context in requests], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.cat([one[-num:] for one, num in zip(slots, queries, strict=True)]),
        block_size=block_size,
        query_lens_host=queries,
        seq_lens_host=[context for _, context in requests],
        max_query_len=max(queries),
        max_seq_len=max(context for _, context in requests),
        num_decodes=queries.count(1),
    )
    return Run(cache, metadata, slots)


def history(spec: AttentionSpec, batch: str) -> list[list[Tensor]]:
    """K and V of each request's whole context, [L, G, D]."""
    generator = torch.Generator().manual_seed(3)
    shape = (spec.num_kv_heads, spec.head_dim)
    return [[torch.randn(context, *shape, generator=generator).bfloat16() for _ in "kv"] for _, context in BATCHES[batch]]


def fill(run: Run, kv: list[list[Tensor]]) -> list[Tensor]:
    """What earlier steps wrote; returns K and V of this step, [T, G, D]."""
    for (k_LGD, v_LGD), num, slots_L in zip(kv, run.metadata.query_lens_host, run.slots, strict=True):
        if run.cache.turns is not None:
            _, k_LGD, v_LGD = run.cache.turns.turn(k_LGD, k_LGD, v_LGD)
        run.cache.format.write(k_LGD[:-num], v_LGD[:-num], run.cache, slots_L[:-num])
    lens = run.metadata.query_lens_host
    return [torch.cat([one[side][-num:] for one, num in zip(kv, lens, strict=True)]) for side in (0, 1)]


def scales_of(spec: AttentionSpec, kind: str) -> LayerScales:
    """kind: "ones", as where nobody measured any; "shared" by all kv heads; "per head"."""
    if kind == "ones":
        return LayerScales.ones(spec.num_kv_heads)
    head_G = torch.arange(spec.num_kv_heads) if kind == "per head" else torch.zeros(spec.num_kv_heads)
    return LayerScales(0.01 + 0.03 * head_G, 0.05 / (1 + head_G), calibrated=True)


def e4m3(x: Tensor) -> Tensor:
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
