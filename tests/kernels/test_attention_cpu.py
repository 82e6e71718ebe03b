"""The compiled attention back end against the law, over every arrangement of the cache that it asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfbyte.kernels.attention import get_backend
from halfbyte.kernels.attention.base import AttentionMetadata, AttentionSpec
from halfbyte.kernels.cpu.library import KernelsMissing, instruction_sets
from halfbyte.kvcache.formats import get_format
from halfbyte.kvcache.spec import KVCacheSpec
from halfbyte.kvcache.tensors import LayerCache, view_layer
from halfbyte.platform import detect_platform

try:
    instruction_sets()
except KernelsMissing as reason:
    pytest.skip(str(reason), allow_module_level=True)

# query length and context of each request
REQUESTS = ((1, 150), (37, 37), (1, 1), (5, 90), (1, 16), (2, 131))


def _cache(spec: AttentionSpec, name: str, block_size: int, backend: str, num_blocks: int) -> LayerCache:
    """A layer's cache as `backend` arranges it, every number NaN but the null block's."""
    kv_spec = KVCacheSpec(spec.num_kv_heads, spec.head_dim, spec.head_dim_v, block_size, spec.sliding_window, name)
    kv_spec = replace(kv_spec, format=get_backend(backend).arrange(kv_spec))
    assert get_format(kv_spec.format).refuse(kv_spec, detect_platform("cpu")) is None
    page_bytes = sum(plane.bytes for plane in get_format(kv_spec.format).planes(kv_spec))
    cache = view_layer(torch.zeros(num_blocks, page_bytes, dtype=torch.uint8), kv_spec)
    for plane in cache.planes.values():
        plane[1:] = torch.nan
    return cache


def _metadata(block_size: int, seed: int) -> tuple[AttentionMetadata, list[torch.Tensor]]:
    """The batch, and the slots of each request's whole context."""
    counts = [-(-context // block_size) for _, context in REQUESTS]
    ids = iter((1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))).tolist())
    table = torch.zeros(len(REQUESTS), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([next(ids) for _ in range(count)])
    positions = [torch.arange(context) for _, context in REQUESTS]
    slots = [table[row, at // block_size].long() * block_size + at % block_size for row, at in enumerate(positions)]
    queries = [num for num, _ in REQUESTS]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor([context for _, context in REQUESTS], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.cat([one[-num:] for one, num in zip(slots, queries, strict=True)]),
        block_size=block_size,
        query_lens_host=queries,
        seq_lens_host=[context for _, context in REQUESTS],
        max_query_len=max(queries),
        max_seq_len=max(context for _, context in REQUESTS),
        num_decodes=queries.count(1),
    )
    return metadata, slots


@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(9, 3, 64, 64, 0.125),
        AttentionSpec(4, 4, 80, 96, 0.1, sliding_window=40),
        AttentionSpec(8, 1, 128, 128, 0.08, soft_cap=20.0),
        AttentionSpec(6, 2, 24, 20, 0.2),
        AttentionSpec(8, 2, 64, 64, 0.125, sliding_window=100, sinks=True),
    ],
    ids=["grouped", "window", "capped", "narrow", "sinks"],
)
def test_outputs_and_cache_are_those_of_the_law(spec: AttentionSpec, name: str, block_size: int) -> None:
    metadata, slots = _metadata(block_size, seed=block_size)
    generator = torch.Generator().manual_seed(3)
    history = [
        [torch.randn(context, spec.num_kv_heads, dim, generator=generator) for dim in (spec.head_dim, spec.head_dim_v)]
        for _, context in REQUESTS
    ]
    q_THD = torch.randn(sum(metadata.query_lens_host), spec.num_heads, spec.head_dim, generator=generator)
    sinks_H = torch.randn(spec.num_heads, generator=generator) if spec.sinks else None
    outputs, caches = [], []
    for backend in (get_backend("reference"), get_backend("cpu")):
        cache = _cache(spec, name, block_size, backend.name, 1 + metadata.block_table.max().item())
        for (num, _), (k_LGD, v_LGD), slots_L in zip(REQUESTS, history, slots, strict=True):
            cache.format.write(k_LGD[:-num], v_LGD[:-num], cache, slots_L[:-num])
        k_TGD, v_TGD = (torch.cat([one[i][-num:] for one, (num, _) in zip(history, REQUESTS, strict=True)]) for i in (0, 1))
        backend.prepare(metadata, spec.sliding_window)
        outputs.append(backend.forward(q_THD, k_TGD, v_TGD, cache, metadata, spec, sinks_H))
        caches.append(cache)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=2e-5, atol=2e-5)
    for slots_L in slots:
        read = [cache.format.read(cache, slots_L[None]) for cache in caches]
        assert torch.equal(read[0][0], read[1][0]) and torch.equal(read[0][1], read[1][1])


def test_pairs_are_asked_for_where_they_fill_vectors() -> None:
    spec = KVCacheSpec(2, 64, 64, 16, None, "bfloat16")
    arrange = get_backend("cpu").arrange
    assert arrange(spec) == "bfloat16_pairs"
    for other in (replace(spec, block_size=8), replace(spec, head_dim_v=80), replace(spec, format="float16")):
        assert arrange(other) == other.format
    assert get_backend("reference").arrange(spec) == "bfloat16"
