"""The block pool's order of reuse and its cache, one rule per test. The machine in tests/property covers the rest."""

from __future__ import annotations

import pytest

from halfbyte.kvcache.block_pool import BlockPool

A, B = (0, b"a"), (0, b"b")


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4, True)
    assert pool.allocate(3) == [1, 2, 3] and pool.num_free == 0 and pool.usage == 1.0
    with pytest.raises(AssertionError, match="1 blocks asked, 0 free"):
        pool.allocate(1)
    pool.release([0, 3, 2, 1])
    assert pool.usage == 0.0
    pool.check()


def test_unkeyed_blocks_are_reused_at_once_and_keyed_ones_last() -> None:
    pool = BlockPool(6, True)
    first, second, third = pool.allocate(3)
    pool.publish(first, A)
    pool.release([third, second, first])
    assert pool.allocate(5) == [second, third, 4, 5, first]
    assert pool.match(A) is None


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(3, True)
    one, two = pool.allocate(2)
    pool.publish(one, A)
    pool.publish(two, B)
    pool.release([two, one])
    pool.touch([two])
    pool.release([two])
    assert pool.allocate(1) == [one]
    assert (pool.match(A), pool.match(B)) == (None, two)


def test_cached_free_blocks_count_as_free() -> None:
    pool = BlockPool(5, True)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], A)
    assert pool.usage == 0.5
    pool.release(blocks)
    assert (pool.usage, pool.num_free, pool.num_cached) == (0.0, 4, 1)


def test_a_shared_block_is_free_when_its_last_owner_left() -> None:
    pool = BlockPool(3, True)
    [block] = pool.allocate(1)
    pool.publish(block, A)
    pool.touch([block])
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="once per owner"):
        pool.release([block])


def test_a_key_has_one_block() -> None:
    pool = BlockPool(5, True)
    one, two, three = pool.allocate(3)
    assert pool.publish(one, A) and not pool.publish(two, A)
    pool.release([one])
    assert pool.publish(three, A), "a copy in use replaces a free one"
    assert pool.match(A) == three
    assert pool.allocate(1) == [one]
    pool.check()


def test_only_cached_blocks_are_shared() -> None:
    pool = BlockPool(3, True)
    with pytest.raises(AssertionError, match="cached block"):
        pool.touch(pool.allocate(1))


def test_reset_needs_an_idle_pool() -> None:
    pool = BlockPool(3, True)
    [block] = pool.allocate(1)
    pool.publish(block, A)
    assert not pool.reset_cache() and pool.match(A) == block
    pool.release([block])
    assert pool.reset_cache() and pool.match(A) is None
    pool.check()


def test_without_caching_nothing_matches() -> None:
    pool = BlockPool(3, False)
    [block] = pool.allocate(1)
    assert not pool.publish(block, A) and pool.match(A) is None
