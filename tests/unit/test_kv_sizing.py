"""The printed capacity can be recomputed by hand, and is what gets allocated."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest

from halfbyte.errors import CapacityError
from halfbyte.kvcache.sizing import KVCapacity, blocks_for_request, longest_request, size_cache
from halfbyte.kvcache.spec import KVCacheSpec, KVLayout, make_layout

BYTES = {"float32": 4, "bfloat16": 2, "fp8_e4m3": 1, "nvfp4": Fraction(9, 16)}


def make(num_full: int, num_sliding: int = 0, *, window: int = 512, fmt: str = "bfloat16", block_size: int = 16) -> KVLayout:
    specs = [KVCacheSpec(3, 64, 64, block_size, w, fmt) for w in [None] * num_full + [window] * num_sliding]
    return make_layout(specs, lambda spec: int(2 * 3 * 64 * spec.block_size * BYTES[spec.format]))


def numbers(line: str) -> list[Fraction]:
    return [Fraction(text.replace(",", "")) for text in re.findall(r"\d[\d,]*(?:\.\d+)?", line)]


def check_printed(capacity: KVCapacity) -> None:
    """Parse the lines as a reader would, and do each sum again."""
    block, cache, room = capacity.lines()
    positions, page, block_bytes = numbers(block)[:3]
    assert positions * page == block_bytes == capacity.layout.block_bytes
    num_blocks, per_block, total = numbers(cache)[:3]
    assert num_blocks * per_block == total == capacity.num_bytes and per_block == block_bytes
    usable, per_request, length, at_once, usable_again, length_again, per_request_again, tokens = numbers(room)
    assert usable == usable_again == num_blocks - 1 and length == length_again and per_request == per_request_again
    assert at_once == Fraction(int(usable * 100 / per_request), 100)
    assert tokens == usable * length // per_request == capacity.num_tokens
    assert length == capacity.max_model_len and abs(capacity.max_concurrency - usable / per_request) < 1e-9
    assert int(capacity.max_concurrency * capacity.max_model_len + 1e-6) == capacity.num_tokens


@pytest.mark.parametrize("fmt", list(BYTES))
@pytest.mark.parametrize("layers", [(30, 0), (3, 15), (4, 22)])
@pytest.mark.parametrize("length", [512, 1000, 8192])
def test_printed_equations_hold(fmt: str, layers: tuple[int, int], length: int) -> None:
    layout = make(*layers, fmt=fmt)
    capacity = size_cache(layout, 900_000_001, length, 8192, 2048)
    check_printed(capacity)
    assert capacity.num_bytes <= 900_000_001 < capacity.num_bytes + layout.block_bytes
    assert capacity.blocks_per_request == blocks_for_request(layout, length, 2048)


def test_full_attention_tokens_are_blocks_times_block_size() -> None:
    layout = make(30)
    capacity = size_cache(layout, 101 * layout.block_bytes, 160, 8192, 2048)
    assert (capacity.num_blocks, capacity.num_tokens, capacity.max_concurrency) == (101, 1600, 10.0)
    assert capacity.num_tokens * layout.block_bytes == 100 * layout.block_bytes * layout.unit_tokens


def test_a_sliding_group_needs_its_window_and_one_step() -> None:
    layout = make(1, 1, window=33)
    assert blocks_for_request(layout, 16, 32) == 1 + 1
    assert blocks_for_request(layout, 10_000, 32) == 625 + (32 + 32) // 16 + 1
    assert blocks_for_request(make(0, 2, window=33), 10**9, 32) == 5


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 40, 41])
def test_longest_request_is_exact(num_blocks: int) -> None:
    layout = make(1, 1, window=20)
    longest = longest_request(layout, num_blocks, 8, at_most=10_000)
    assert blocks_for_request(layout, longest, 8) <= num_blocks - 1 < blocks_for_request(layout, longest + 1, 8)
    assert longest_request(make(0, 1, window=20), 41, 8, at_most=10_000) == 10_000


def test_too_small_says_what_is_missing() -> None:
    layout = make(30)
    available = 100 * layout.block_bytes + 5
    with pytest.raises(CapacityError) as caught:
        size_cache(layout, available, 2048, 8192, 2048)
    message = str(caught.value)
    assert f"{129 * layout.block_bytes} bytes" in message and f"{available} bytes are available" in message
    assert "largest --max-model-len is 1584" in message
    assert "--kv-cache-memory-bytes" in message and "--num-gpu-blocks-override" in message and "\n" not in message
    assert size_cache(layout, available, 1584, 8192, 2048).num_blocks == 100
    with pytest.raises(CapacityError):
        size_cache(layout, available, 1585, 8192, 2048)


def test_auto_fit_takes_the_longest_that_fits() -> None:
    layout = make(30)
    assert size_cache(layout, 100 * layout.block_bytes, -1, 8192, 2048).max_model_len == 1584
    assert size_cache(layout, 10_000 * layout.block_bytes, -1, 8192, 2048).max_model_len == 8192
    for too_few in (0, layout.block_bytes, -5):
        with pytest.raises(CapacityError, match="largest --max-model-len is 0"):
            size_cache(layout, too_few, -1, 8192, 2048)


def test_the_override_wins_within_the_memory() -> None:
    layout = make(30)
    capacity = size_cache(layout, 1000 * layout.block_bytes, 128, 8192, 2048, num_blocks_override=9)
    assert (capacity.num_blocks, capacity.num_bytes, capacity.max_concurrency) == (9, 9 * layout.block_bytes, 1.0)
    with pytest.raises(CapacityError, match=f"{9 * layout.block_bytes} bytes are available"):
        size_cache(layout, 1000 * layout.block_bytes, 129, 8192, 2048, num_blocks_override=9)
    with pytest.raises(CapacityError, match="--num-gpu-blocks-override 1001 needs 1001 blocks"):
        size_cache(layout, 1000 * layout.block_bytes, 128, 8192, 2048, num_blocks_override=1001)
