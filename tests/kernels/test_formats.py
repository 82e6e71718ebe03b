"""The conformance suite that every KV format passes: what is written is read back, and nothing else is touched."""

from __future__ import annotations

import platform
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from halfbyte.kvcache.formats import ARRANGEMENTS, FORMATS, get_format
from halfbyte.kvcache.spec import KVCacheSpec, make_layout
from halfbyte.kvcache.tensors import KVTensors, LayerCache, view_layer
from halfbyte.platform import detect_platform

DENSE = {
    "bfloat16": torch.bfloat16,
    "bfloat16_pairs": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# kv heads, head dim of K and of V, block size
SHAPES = [
    (1, 64, 64, 16),
    (3, 64, 64, 16),
    (2, 80, 80, 16),
    (1, 256, 256, 32),
    (8, 128, 128, 1),
    (2, 192, 128, 8),
    (3, 24, 16, 5),
]
NUM_BLOCKS = 7

every_format = pytest.mark.parametrize("name", sorted({**FORMATS, **ARRANGEMENTS}))
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "G{}-D{}-Dv{}-S{}".format(*s))


def _spec(name: str, shape: tuple[int, int, int, int]) -> KVCacheSpec:
    heads, dim, dim_v, block_size = shape
    spec = KVCacheSpec(
        num_kv_heads=heads, head_dim=dim, head_dim_v=dim_v, block_size=block_size, sliding_window=None, format=name
    )
    if refusal := get_format(name).refuse(spec, detect_platform("cpu")):
        pytest.skip(refusal.reason)
    return spec


def _page_bytes(spec: KVCacheSpec) -> int:
    return sum(plane.bytes for plane in get_format(spec.format).planes(spec))


def _pages(spec: KVCacheSpec) -> tuple[Tensor, LayerCache]:
    pages = torch.zeros(NUM_BLOCKS, _page_bytes(spec), dtype=torch.uint8)
    return pages, view_layer(pages, spec)


def _random_kv(spec: KVCacheSpec, num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k_TGD = torch.randn(num_tokens, spec.num_kv_heads, spec.head_dim, generator=generator)
    return k_TGD, torch.randn(num_tokens, spec.num_kv_heads, spec.head_dim_v, generator=generator)


def _random_slots(spec: KVCacheSpec, num_tokens: int) -> Tensor:
    """Distinct slots outside the null block."""
    usable = (NUM_BLOCKS - 1) * spec.block_size
    order = torch.randperm(usable, generator=torch.Generator().manual_seed(1))
    return order[:num_tokens] + spec.block_size


@every_format
@every_shape
def test_what_is_written_is_read(name: str, shape: tuple[int, int, int, int]) -> None:
    spec = _spec(name, shape)
    _, cache = _pages(spec)
    slots_T = _random_slots(spec, 5)
    k_TGD, v_TGD = _random_kv(spec, len(slots_T))
    cache.format.write(k_TGD, v_TGD, cache, slots_T)
    order_RL = torch.tensor([[3, 1, 0], [4, 2, 2]])[:, : len(slots_T)]
    k_RLGD, v_RLGD = cache.format.read(cache, slots_T[order_RL])
    if name in DENSE:
        assert torch.equal(k_RLGD, k_TGD.to(DENSE[name])[order_RL])
        assert torch.equal(v_RLGD, v_TGD.to(DENSE[name])[order_RL])
    # Whatever the format loses, it loses once.
    again_k_TGD, again_v_TGD = (x[:, 0] for x in cache.format.read(cache, slots_T[:, None]))
    cache.format.write(again_k_TGD, again_v_TGD, cache, slots_T)
    k_after_TGD, v_after_TGD = (x[:, 0] for x in cache.format.read(cache, slots_T[:, None]))
    assert torch.equal(k_after_TGD, again_k_TGD)
    assert torch.equal(v_after_TGD, again_v_TGD)


@every_format
@every_shape
def test_slot_minus_one_is_skipped_even_when_not_finite(name: str, shape: tuple[int, int, int, int]) -> None:
    spec = _spec(name, shape)
    pages, cache = _pages(spec)
    before = pages.clone()
    k_TGD, v_TGD = _random_kv(spec, 3)
    k_TGD[0], v_TGD[1] = torch.nan, torch.inf
    cache.format.write(k_TGD, v_TGD, cache, torch.full((3,), -1))
    assert torch.equal(pages, before)
    k_RLGD, v_RLGD = cache.format.read(cache, torch.zeros(1, 1, dtype=torch.int64))
    assert not k_RLGD.any() and not v_RLGD.any()


@every_format
@every_shape
def test_a_block_owns_exactly_its_bytes(name: str, shape: tuple[int, int, int, int]) -> None:
    spec = _spec(name, shape)
    pages, cache = _pages(spec)
    block = 3
    slots_T = block * spec.block_size + torch.arange(spec.block_size)
    k_TGD, v_TGD = _random_kv(spec, spec.block_size)
    cache.format.write(k_TGD, v_TGD, cache, slots_T)
    assert pages[block].any()
    pages[block] = 0
    assert not pages.any()


@every_format
@every_shape
def test_slots_do_not_overlap(name: str, shape: tuple[int, int, int, int]) -> None:
    spec = _spec(name, shape)
    _, cache = _pages(spec)
    slots_T = torch.arange(spec.block_size, NUM_BLOCKS * spec.block_size)
    k_TGD, v_TGD = _random_kv(spec, len(slots_T))
    cache.format.write(k_TGD, v_TGD, cache, slots_T)
    together_k, together_v = cache.format.read(cache, slots_T[None])
    _, fresh = _pages(spec)
    for i, slot in enumerate(slots_T):
        fresh.format.write(k_TGD[i : i + 1], v_TGD[i : i + 1], fresh, slot[None])
    alone_k, alone_v = fresh.format.read(fresh, slots_T[None])
    assert torch.equal(together_k, alone_k) and torch.equal(together_v, alone_v)


@every_format
def test_the_cache_allocates_what_the_planes_say(name: str) -> None:
    windows = [None, 32, 32, None, 32]
    specs = [
        KVCacheSpec(num_kv_heads=2, head_dim=64, head_dim_v=64, block_size=16, sliding_window=w, format=name) for w in windows
    ]
    layout = make_layout(specs, _page_bytes)
    tensors = KVTensors(layout, NUM_BLOCKS, "cpu")
    assert tensors.num_bytes == NUM_BLOCKS * layout.block_bytes
    assert tensors.num_layers == len(specs)
    assert all(tensors.layer(i).spec == spec for i, spec in enumerate(specs))


@every_format
def test_layers_of_one_position_share_memory_and_positions_do_not(name: str) -> None:
    windows = [None, 32]
    specs = [
        KVCacheSpec(num_kv_heads=1, head_dim=64, head_dim_v=64, block_size=16, sliding_window=w, format=name) for w in windows
    ]
    layout = make_layout([*specs, *specs], _page_bytes)
    tensors = KVTensors(layout, NUM_BLOCKS, "cpu")
    k_TGD, v_TGD = _random_kv(specs[0], 1)
    slot_T = torch.tensor([40])
    written = tensors.layer(layout.groups[0].layers[0])
    written.format.write(k_TGD, v_TGD, written, slot_T)
    for group in layout.groups:
        for position, index in enumerate(group.layers):
            cache = tensors.layer(index)
            found = cache.format.read(cache, slot_T[:, None])[0].any()
            assert bool(found) == (position == 0)


@pytest.mark.skipif(tuple(map(int, platform.release().split(".")[:2])) < (5, 14), reason="needs MADV_POPULATE_WRITE")
def test_populating_changes_no_content() -> None:
    spec = KVCacheSpec(num_kv_heads=2, head_dim=64, head_dim_v=64, block_size=16, sliding_window=None, format="bfloat16")
    tensors = KVTensors(make_layout([spec, spec], _page_bytes), 2000, "cpu")
    cache = tensors.layer(1)
    k_TGD, v_TGD = _random_kv(spec, 40)
    slots_T = torch.arange(16, 56)
    cache.format.write(k_TGD, v_TGD, cache, slots_T)
    before = [torch.clone(x) for x in cache.format.read(cache, slots_T[None])]
    tensors.populate(num_bytes=8 << 20)
    for thread in threading.enumerate():
        if thread.name == "populate":
            thread.join()
    assert all(torch.equal(x, y) for x, y in zip(cache.format.read(cache, slots_T[None]), before, strict=True))
    assert _resident_bytes(tensors) >= 7 << 20


def _resident_bytes(tensors: KVTensors) -> int:
    """Of the mappings that hold the cache, as the system counts them."""
    starts = {f"{cache.planes['k'].data_ptr():x}" for cache in map(tensors.layer, range(tensors.num_layers))}
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            first, _, end = line.split()[0].partition("-")
            is_ours = any(int(first, 16) <= int(start, 16) < int(end, 16) for start in starts)
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
