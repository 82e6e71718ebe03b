"""Planes, and how layers are grouped over one pool."""

from __future__ import annotations

from dataclasses import replace

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
    assert (one.position_bytes, one.block_bytes, one.unit_tokens) == ((1024,) * 30, 30 * 1024, 16)


def test_five_sliding_layers_for_each_full_one() -> None:
    windows: list[int | None] = [512, 512, 512, 512, 512, None] * 3
    mixed = layout(windows)
    assert [len(group.layers) for group in mixed.groups] == [3] * 6
    assert mixed.groups[0].layers == (5, 11, 17) and mixed.groups[0].sliding_window is None
    assert mixed.position_bytes == (1024,) * 3 and mixed.block_bytes == 3 * 1024


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
    assert max(len(group.layers) for group in some.groups) == len(some.position_bytes)
    for layer, group in enumerate(some.group_of_layer):
        assert layer in some.groups[group].layers and some.groups[group].sliding_window == windows[layer]
    sizes = [len(group.layers) for group in some.groups]
    assert max(sizes) - min(sizes) <= max(sizes) / 2 + 1, "groups are of like size"


def test_a_narrow_kind_gets_longer_blocks() -> None:
    wide = make_layout([spec(None, head_dim=8), spec(32, head_dim=64)], page_bytes)
    assert [group.block_size for group in wide.groups] == [128, 16]
    assert wide.position_bytes == (page_bytes(spec(head_dim=64)),) and wide.unit_tokens == 128
    assert wide.specs == (spec(None, head_dim=8, block_size=128), spec(32, head_dim=64))


def coded_bytes(layer: KVCacheSpec) -> int:
    """nvfp4 takes 9/32 of bfloat16."""
    return page_bytes(layer) * 9 // 32 if layer.format == "nvfp4" else page_bytes(layer)


def test_formats_of_one_kind_share_a_table_and_nothing_is_padded() -> None:
    """Skipping layers of a plain model costs exactly what those layers are wider."""
    specs = [replace(spec(), format="bfloat16" if i in (0, 1, 10, 11) else "nvfp4") for i in range(12)]
    skipping = make_layout(specs, coded_bytes)
    assert len(skipping.groups) == 1 and skipping.groups[0].layers == (0, 1, 10, 11, *range(2, 10))
    assert skipping.block_bytes == sum(map(coded_bytes, specs)) == 4 * 1024 + 8 * 288


def test_skipped_sliding_layers_do_not_pad_the_others() -> None:
    """Full attention in nvfp4 takes blocks of 64 tokens beside 16 of bfloat16: a ninth of these is lost, not 72% of those."""
    specs = [replace(spec(512), format="bfloat16") if i % 6 < 5 else replace(spec(), format="nvfp4") for i in range(18)]
    hybrid = make_layout(specs, coded_bytes)
    assert [(len(group.layers), group.block_size) for group in hybrid.groups] == [(3, 64)] + [(3, 16)] * 5
    assert hybrid.block_bytes == 3 * 4 * 288 and 3 * 1024 / hybrid.block_bytes > 0.88


def test_first_tokens_take_blocks_of_fewer() -> None:
    first = make_layout([replace(spec(), format="nvfp4", first_tokens=16)] * 2, coded_bytes)
    group = first.groups[0]
    assert group.first_block_size == 4  # of 64 bytes in 288
    assert [group.entry_of(position) for position in (0, 3, 4, 15, 16, 31, 32)] == [0, 0, 1, 3, 4, 4, 5]
    assert [group.num_entries(count) for count in (0, 1, 4, 5, 16, 17, 32, 33)] == [0, 1, 1, 2, 4, 5, 5, 6]


def test_block_sizes_must_agree() -> None:
    with pytest.raises(AssertionError, match="one block size"):
        make_layout([spec(block_size=16), spec(block_size=32)], page_bytes)
