"""Planes, and how layers are grouped over one pool."""

from __future__ import annotations

import pytest

from halfbyte.kvcache.spec import KVCacheSpec, KVLayout, Plane, make_layout


def spec(window: int | None = None, head_dim: int = 8, block_size: int = 16) -> KVCacheSpec:
    return KVCacheSpec(2, head_dim, head_dim, block_size, window, "bfloat16")


def page_bytes(layer: KVCacheSpec) -> int:
    return 2 * layer.num_kv_heads * layer.block_size * layer.head_dim * 2


def layout(windows: list[int | None]) -> KVLayout:
    return make_layout([spec(window) for window in windows], page_bytes)


@pytest.mark.parametrize(
    ("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2), ("float16", 2), ("uint8", 1), ("float8_e4m3fn", 1)]
)
def test_plane_bytes(dtype: str, itemsize: int) -> None:
    assert Plane("k", dtype, (3, 16, 80)).bytes == 3 * 16 * 80 * itemsize


def test_equal_layers_are_one_group() -> None:
    one = layout([None] * 30)
    assert [group.layers for group in one.groups] == [tuple(range(30))]
    assert (one.num_positions, one.page_bytes, one.block_bytes, one.block_size) == (30, 1024, 30 * 1024, 16)


def test_five_sliding_layers_for_each_full_one() -> None:
    windows: list[int | None] = [512, 512, 512, 512, 512, None] * 3
    mixed = layout(windows)
    assert [len(group.layers) for group in mixed.groups] == [3] * 6
    assert mixed.groups[0].layers == (5, 11, 17) and mixed.groups[0].spec.sliding_window is None
    assert mixed.num_positions == 3 and mixed.block_bytes == 3 * 1024


def test_nearly_equal_kinds_take_the_larger_size() -> None:
    windows: list[int | None] = [None] * 10 + [64] * 14
    assert [len(group.layers) for group in layout(windows).groups] == [10, 14]
    windows = [None] * 10 + [64] * 15
    assert [len(group.layers) for group in layout(windows).groups] == [10, 8, 7]


@pytest.mark.parametrize("num_full", range(1, 9))
@pytest.mark.parametrize("num_sliding", range(9))
def test_each_layer_has_one_place(num_full: int, num_sliding: int) -> None:
    windows: list[int | None] = [None] * num_full + [32] * num_sliding
    some = layout(windows)
    assert sorted(layer for group in some.groups for layer in group.layers) == list(range(len(windows)))
    assert max(len(group.layers) for group in some.groups) == some.num_positions
    for layer, group in enumerate(some.group_of_layer):
        assert layer in some.groups[group].layers and some.groups[group].spec.sliding_window == windows[layer]
    sizes = [len(group.layers) for group in some.groups]
    assert max(sizes) - min(sizes) <= max(sizes) / 2 + 1, "groups are of like size"


def test_the_widest_kind_sets_the_page() -> None:
    wide = make_layout([spec(None, head_dim=8), spec(32, head_dim=64)], page_bytes)
    assert len(wide.groups) == 2 and wide.page_bytes == page_bytes(spec(head_dim=64)) == wide.block_bytes


def test_block_sizes_must_agree() -> None:
    with pytest.raises(AssertionError, match="one block size"):
        make_layout([spec(block_size=16), spec(block_size=32)], page_bytes)
