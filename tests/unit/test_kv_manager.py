"""The KV cache manager, one behaviour per test: sharing, windows, what fits. The machine in tests/property covers the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from halfbyte.kvcache.manager import KVCacheManager
from halfbyte.kvcache.prefix_hash import extend_hashes
from halfbyte.kvcache.spec import KVCacheSpec, make_layout


@dataclass(eq=False)
class User:
    request_id: str
    token_ids: list[int]
    skip_prefix_cache: bool = False
    salt: str | None = None
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        extend_hashes(self.block_hashes, self.token_ids, 4, self.salt)


def manager(*windows: int | None, num_blocks: int = 20, max_batched: int = 100, caching: bool = True) -> KVCacheManager:
    layout = make_layout([KVCacheSpec(1, 8, 8, 4, window, "float32") for window in windows], lambda spec: 64)
    return KVCacheManager(layout, num_blocks, enable_prefix_caching=caching, max_num_batched_tokens=max_batched)


def compute(cache: KVCacheManager, user: User, count: int | None = None) -> list[list[int]]:
    """Match, allocate, compute and publish `count` tokens (all that are left by default)."""
    match = None if user.num_computed_tokens else cache.match_prefix(user)
    start = match.num_tokens if match else user.num_computed_tokens
    count = len(user.token_ids) - start if count is None else count
    blocks = cache.allocate(user, count, match)
    assert blocks is not None
    user.num_computed_tokens = start + count
    cache.publish(user, user.num_computed_tokens)
    cache.check()
    return blocks


def test_a_second_request_shares_full_blocks_and_keeps_one_token() -> None:
    cache = manager(None)
    [table] = compute(cache, User("a", list(range(12))))
    match = cache.match_prefix(User("b", list(range(12))))
    assert (match.num_tokens, match.block_ids) == (8, [table[:2]])
    [other] = compute(cache, User("b", list(range(12))))
    assert other[:2] == table[:2] and other[2] != table[2]
    assert cache.usage == 4 / 19


def test_freed_blocks_still_match_until_they_are_reused() -> None:
    cache = manager(None, num_blocks=6)
    user = User("a", list(range(13)))
    [table] = compute(cache, user)
    cache.free(user)
    assert cache.usage == 0.0
    assert cache.match_prefix(User("b", list(range(13)))).block_ids == [table[:3]]
    other = User("c", [50] * 17)
    compute(cache, other)
    assert cache.match_prefix(User("d", list(range(13)))).num_tokens == 0


def test_the_tail_is_lost_first() -> None:
    cache = manager(None, num_blocks=6)
    user = User("a", list(range(13)))
    compute(cache, user)
    cache.free(user)
    compute(cache, User("b", [50] * 9))
    assert cache.match_prefix(User("c", list(range(13)))).num_tokens == 8


def test_salts_and_skipping_do_not_share() -> None:
    cache = manager(None)
    compute(cache, User("a", list(range(12)), salt="x"))
    assert cache.match_prefix(User("b", list(range(12)), salt="x")).num_tokens == 8
    assert cache.match_prefix(User("c", list(range(12)), salt="y")).num_tokens == 0
    assert cache.match_prefix(User("d", list(range(12)))).num_tokens == 0
    assert cache.match_prefix(User("e", list(range(12)), salt="x", skip_prefix_cache=True)).num_tokens == 0


def test_blocks_are_published_when_they_are_computed() -> None:
    cache = manager(None)
    user = User("a", list(range(12)))
    compute(cache, user, 7)
    assert cache.match_prefix(User("b", list(range(12)))).num_tokens == 4
    compute(cache, user, 1)
    assert cache.match_prefix(User("b", list(range(12)))).num_tokens == 8


def test_blocks_slide_out_of_the_window_and_are_released() -> None:
    cache = manager(None, 6, max_batched=4)
    user = User("a", list(range(32)))
    for _ in range(8):
        compute(cache, user, 4)
    # 8 blocks of full attention; of the window the blocks of tokens 23 .. 27 before the last step, and 28 .. 31
    assert cache.pool.num_blocks - 1 - cache.num_free_blocks == 8 + 3
    assert cache.blocks_needed(32) == 8 + 4 and cache.blocks_needed(3200) == 800 + 4
    user.num_computed_tokens = 32
    cache.allocate(user, 0)
    assert cache.pool.num_blocks - 1 - cache.num_free_blocks == 8 + 2


def in_flight(cache: KVCacheManager, user: User, count: int) -> None:
    """A step of `count` tokens whose result is not there yet."""
    assert cache.allocate(user, count, None if user.num_computed_tokens else cache.match_prefix(user)) is not None
    user.num_computed_tokens += count
    cache.check()


def test_what_a_step_in_flight_fills_stays_until_it_is_published() -> None:
    cache, user = manager(5, max_batched=16), User("a", list(range(64)))
    in_flight(cache, user, 16)
    in_flight(cache, user, 16)
    assert cache.pool.num_free == 19 - 8, "though the window needs one block of the first four"
    cache.publish(user, 16)
    in_flight(cache, user, 16)
    assert cache.pool.num_free == 19 - 8
    assert cache.match_prefix(User("b", list(range(17)))).num_tokens == 16
    bare, user = manager(5, max_batched=16, caching=False), User("a", list(range(64)))
    in_flight(bare, user, 16)
    in_flight(bare, user, 16)
    assert bare.pool.num_free == 19 - 5


def test_nothing_waits_to_be_published_at_the_cost_of_a_promise() -> None:
    cache, user, promised = manager(5, max_batched=16, num_blocks=12), User("a", list(range(40))), User("b", [7] * 16)
    in_flight(cache, user, 16)
    in_flight(cache, promised, 4)
    in_flight(cache, user, 16)
    assert cache.pool.num_free == 11 - 5 - 1
    in_flight(cache, promised, 12)


def test_a_sliding_match_needs_the_window_only() -> None:
    cache = manager(None, 6)
    user = User("a", list(range(32)))
    full, sliding = compute(cache, user)
    for index in range(5):
        cache.pool.unpublish((1, user.block_hashes[index]))
    match = cache.match_prefix(User("b", list(range(40))))
    assert match.num_tokens == 32
    assert match.block_ids == [full, [0] * 6 + sliding[6:]]
    cache.pool.unpublish((1, user.block_hashes[6]))
    assert cache.match_prefix(User("b", list(range(40)))).num_tokens == 0
    cache.check()


def test_a_window_that_lost_its_tail_shortens_the_match_of_all() -> None:
    cache = manager(None, 6)
    user = User("a", list(range(32)))
    full, sliding = compute(cache, user)
    cache.pool.unpublish((1, user.block_hashes[6]))
    match = cache.match_prefix(User("b", list(range(40))))
    assert (match.num_tokens, match.block_ids) == (24, [full[:6], [0] * 4 + sliding[4:6]])


def test_admission_asks_for_the_whole_sequence() -> None:
    cache = manager(None, num_blocks=6)
    assert cache.allocate(User("a", list(range(21))), 4) is None
    assert cache.allocate(User("b", list(range(20))), 4) == [[1]]
    assert cache.num_free_blocks == 4
    assert cache.allocate(User("c", [9]), 1) is None, "the other blocks are promised"
    cache.check()


def test_a_promise_ends_with_the_prompt_or_the_request() -> None:
    cache = manager(None, num_blocks=6)
    user, small = User("a", list(range(12))), User("b", list(range(20, 28)))
    compute(cache, user, 4)
    assert cache.allocate(User("c", list(range(20, 29))), 4) is None, "4 are free, 2 of them promised"
    compute(cache, user, 8)
    assert cache.allocate(small, 4) is not None and cache.num_free_blocks == 1
    assert cache.allocate(User("d", [1]), 1) is None
    cache.free(small)
    assert cache.allocate(User("d", [1]), 1) is not None
    cache.check()


def test_what_can_ever_fit() -> None:
    cache = manager(None, num_blocks=6)
    assert (cache.max_request_tokens, cache.can_ever_fit(20), cache.can_ever_fit(21)) == (20, True, False)
    assert manager(5, num_blocks=5, max_batched=8).can_ever_fit(10**9)


def test_no_attempt_before_enough_blocks_came_back() -> None:
    cache = manager(None, num_blocks=6)
    holders = [User("a", [1] * 4), User("b", [2] * 4), User("c", [3] * 8)]
    for holder in holders:
        compute(cache, holder)
    waiting = User("w", list(range(12)))
    assert cache.may_fit(waiting) and cache.allocate(waiting, 12) is None
    assert not cache.may_fit(waiting) and cache.may_fit(User("other", [1]))
    cache.free(holders[0])
    assert not cache.may_fit(waiting)
    cache.free(holders[1])
    assert cache.may_fit(waiting) and cache.allocate(waiting, 12) is not None


def test_forgotten_content_is_never_matched_again() -> None:
    cache = manager(None, 6)
    user, twin = User("a", list(range(16))), User("b", list(range(16)))
    compute(cache, user)
    compute(cache, twin)
    cache.forget(user)
    cache.check()
    cache.free(user)
    cache.free(twin)
    assert cache.match_prefix(User("c", list(range(16)))).num_tokens == 0
    assert cache.usage == 0.0


def test_without_caching_nothing_is_shared() -> None:
    cache = manager(None, caching=False)
    compute(cache, User("a", list(range(12))))
    assert cache.match_prefix(User("b", list(range(12)))).num_tokens == 0
