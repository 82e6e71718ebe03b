"""The KV cache manager, one full and one sliding group, over a simulated memory, checked after each operation.

Requests share prefixes, grow in chunks, end, are preempted and come back, in pools that are too small for them. What each
token attends to must be in the request's blocks whenever it is computed; a match must be the longest there is. With a step in
flight a request publishes what it computed one step later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from halfbyte.kvcache.manager import KVCacheManager, PrefixMatch
from halfbyte.kvcache.prefix_hash import extend_hashes
from halfbyte.kvcache.spec import KVCacheSpec, KVLayout, make_layout

MAX_BATCHED = 9


@dataclass(eq=False)
class User:
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    cache_salt: str | None
    skip_prefix_cache: bool
    num_computed_tokens: int = 0
    num_heard_tokens: int = 0  # computed by steps that are not in flight any more
    block_hashes: list[bytes] = field(default_factory=list)
    tables: list[list[int]] | None = None


def layout_of(block_size: int, windows: list[int | None], first_tokens: int = 0, widths: tuple[int, int] = (4, 4)) -> KVLayout:
    """widths: bytes per token of layers of full attention and of sliding ones; the first tokens have 8 each."""

    def page_bytes(spec: KVCacheSpec) -> int:
        width = 8 if spec.format == "bfloat16" else widths[spec.sliding_window is not None]
        return width * spec.block_size

    return make_layout([KVCacheSpec(1, 8, 8, block_size, window, "float32", first_tokens) for window in windows], page_bytes)


def longest_match(manager: KVCacheManager, user: User) -> int:
    """The law of match_prefix: try all lengths, from the longest."""
    if not manager.enable_prefix_caching or user.skip_prefix_cache:
        return 0
    size = manager.block_size
    for length in range((len(user.token_ids) - 1) // size, 0, -1):
        fits = True
        for group, kv_group in enumerate(manager.layout.groups):
            window = kv_group.sliding_window
            first = 0 if window is None else max(0, length * size - window + 1)
            for position in range(first, length * size):
                unit = position // size
                nth = kv_group.entry_of(position) - kv_group.entry_of(unit * size)
                fits &= manager.pool.match((group, user.block_hashes[unit] + (nth.to_bytes(2) if nth else b""))) is not None
        if fits:
            return length * size
    return 0


class ManagerMachine(RuleBasedStateMachine):
    memory_class: Any
    runner_class: Any

    @initialize(
        block_size=st.integers(1, 4),
        windows=st.sampled_from([[None], [None, 1], [None, 3], [None, 6], [4], [None, 3, 7], [2, 5]]),
        num_blocks=st.integers(8, 60),
        caching=st.sampled_from([True, True, True, False]),
        first_units=st.sampled_from([0, 0, 1, 2]),
        widths=st.sampled_from([(4, 4), (4, 4), (2, 4), (4, 2), (1, 4)]),
        ahead=st.booleans(),
    )
    def start(
        self,
        block_size: int,
        windows: list[int | None],
        num_blocks: int,
        caching: bool,
        first_units: int,
        widths: tuple[int, int],
        ahead: bool,
    ) -> None:
        self.ahead = ahead
        fits_first = block_size * min(widths) >= 8
        layout = layout_of(block_size, windows, first_units * block_size if fits_first else 0, widths)
        event(f"{len({group.block_size for group in layout.groups})} block sizes, {layout.groups[0].first_tokens > 0} first")
        self.manager = KVCacheManager(layout, num_blocks, enable_prefix_caching=caching, max_num_batched_tokens=MAX_BATCHED)
        self.memory = self.memory_class(layout, self.manager.pool)
        self.waiting: list[User] = []
        self.running: list[User] = []
        self.num_users = 0

    def hash_full_blocks(self, user: User) -> None:
        extend_hashes(user.block_hashes, user.token_ids, self.manager.block_size, user.cache_salt)

    @rule(
        shared=st.integers(0, 16),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        salt=st.sampled_from([None, None, None, "a"]),
        skip=st.sampled_from([False, False, False, True]),
    )
    def arrive(self, shared: int, tail: list[int], salt: str | None, skip: bool) -> None:
        tokens = [7] * shared + tail
        if self.manager.can_ever_fit(len(tokens)):
            self.num_users += 1
            user = User(f"r{self.num_users}", tokens, len(tokens), salt, skip)
            self.hash_full_blocks(user)
            self.waiting.append(user)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        user = data.draw(st.sampled_from(self.waiting))
        may_fit = self.manager.may_fit(user)
        match = self.manager.match_prefix(user)
        assert match.num_tokens == longest_match(self.manager, user) < len(user.token_ids)
        chunk = data.draw(st.integers(1, min(MAX_BATCHED, len(user.token_ids) - match.num_tokens)))
        tables = self.manager.allocate(user, chunk, match)
        if tables is None:
            assert self.running, "a request that is alone fits"
            return
        assert may_fit or self.manager.enable_prefix_caching, "may_fit says no only when the attempt is pointless"
        self.waiting.remove(user)
        self.running.append(user)
        user.tables, user.num_computed_tokens = tables, match.num_tokens
        assert [table[: len(hit)] for table, hit in zip(tables, match.block_ids, strict=True)] == match.block_ids
        self.compute(user, chunk)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        user = data.draw(st.sampled_from(self.running))
        chunk = data.draw(st.integers(1, min(MAX_BATCHED, len(user.token_ids) - user.num_computed_tokens)))
        new = self.manager.allocate(user, chunk)
        if new is None:
            assert len(self.running) > 1, "a request that is alone fits"
            return
        assert user.tables is not None
        for table, ids in zip(user.tables, new, strict=True):
            table += ids
        self.compute(user, chunk)

    def compute(self, user: User, chunk: int) -> None:
        """What a step does: write, attend, publish; and a token more once all are computed."""
        end = user.num_computed_tokens + chunk
        digests = self.runner_class.digests_of(user.token_ids[:end], user.cache_salt)
        self.memory.write(user.tables, user.num_computed_tokens, digests)
        self.memory.verify(user.tables, user.num_computed_tokens, digests)
        heard, user.num_computed_tokens, user.num_heard_tokens = user.num_heard_tokens, end, end
        self.manager.publish(user, heard)
        if end == len(user.token_ids):
            if not self.manager.can_ever_fit(end + 1):
                self.manager.publish(user, end)
                self.finish(user)
                return
            user.token_ids.append(digests[-1] % 2)
            self.hash_full_blocks(user)
        if not self.ahead:
            self.manager.publish(user, end)

    def finish(self, user: User) -> None:
        self.running.remove(user)
        self.manager.free(user)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        user = data.draw(st.sampled_from(self.running))
        self.finish(user)
        user.num_computed_tokens, user.num_heard_tokens, user.tables = 0, 0, None
        self.waiting.append(user)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        user = data.draw(st.sampled_from(self.running))
        self.manager.forget(user)
        pool = self.manager.pool
        assert not any(pool.match((group, key)) for key in user.block_hashes for group in range(len(self.manager.layout.groups)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), group=st.integers(0, 2))
    def lose(self, data: st.DataObject, group: int) -> None:
        """Any cached block may lose its content at any time: prefixes get holes."""
        user = data.draw(st.sampled_from(self.running))
        if user.block_hashes:
            self.manager.pool.unpublish((group, data.draw(st.sampled_from(user.block_hashes))))

    @rule()
    def reset(self) -> None:
        assert self.manager.reset_prefix_cache() is (not self.running)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        held = {b for user in self.running for table in user.tables or () for b in table if b}
        assert self.manager.usage <= len(held) / (self.manager.pool.num_blocks - 1)
        if not self.running:
            assert self.manager.usage == 0.0
        most = sum(self.manager.blocks_needed(user.num_computed_tokens) for user in self.running)
        if self.ahead:  # what the last step filled may wait in each group
            most += len(self.running) * sum(-(-MAX_BATCHED // group.block_size) for group in self.manager.layout.groups)
        assert self.manager.pool.num_blocks - 1 - self.manager.num_free_blocks <= most


def test_manager_machine(fake_runner: Any, fake_runner_memory: Any) -> None:
    ManagerMachine.memory_class, ManagerMachine.runner_class = fake_runner_memory, fake_runner
    run_state_machine_as_test(ManagerMachine, settings=settings(max_examples=150, stateful_step_count=50, deadline=None))


@settings(max_examples=300, deadline=None)
@given(
    block_size=st.integers(1, 3),
    windows=st.sampled_from([[None], [3], [None, 1], [None, 4], [2, 5], [None, 3, 7], [3, 4, 8]]),
    num_blocks=st.integers(1, 12),
    is_cached=st.lists(st.sampled_from([True, True, True, False]), min_size=36, max_size=36),
)
def test_match_is_the_longest_with_any_holes(
    block_size: int, windows: list[int | None], num_blocks: int, is_cached: list[bool]
) -> None:
    manager = KVCacheManager(layout_of(block_size, windows), 64, enable_prefix_caching=True, max_num_batched_tokens=4)
    user = User("r", list(range(num_blocks * block_size + 1)), 1, None, False)
    extend_hashes(user.block_hashes, user.token_ids, block_size, None)
    cached: dict[tuple[int, int], int] = {}
    for group in range(len(windows)):
        for index in range(num_blocks):
            if is_cached[group * 12 + index]:
                [block] = manager.pool.allocate(1)
                manager.pool.publish(block, (group, user.block_hashes[index]))
                cached[group, index] = block
    match = manager.match_prefix(user)
    assert match.num_tokens == longest_match(manager, user)
    for group, kv_group in enumerate(manager.layout.groups):
        window = kv_group.sliding_window
        num_null = 0 if window is None else max(0, match.num_tokens - window + 1) // block_size
        expected = [0] * num_null + [cached[group, index] for index in range(num_null, match.num_tokens // block_size)]
        assert match.block_ids[group] == expected


def test_a_first_allocation_without_a_match_starts_an_empty_table() -> None:
    manager = KVCacheManager(layout_of(4, [None]), 8, enable_prefix_caching=True, max_num_batched_tokens=8)
    user = User("r", [1, 2, 3, 4, 5], 5, None, False)
    assert manager.match_prefix(user) == PrefixMatch(0, [[]])
    assert manager.allocate(user, 5) == [[1, 2]]
