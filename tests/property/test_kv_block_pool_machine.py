"""The block pool against a model of plain lists, with every invariant checked after each operation."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from halfbyte.kvcache.block_pool import BlockPool

KEYS = st.sampled_from([(0, b"a"), (1, b"a"), (0, b"b"), (0, b"c")])


class BlockPoolMachine(RuleBasedStateMachine):
    """The law: `free` is a list whose front is taken first; owners and keys are dicts."""

    @initialize(num_blocks=st.integers(2, 9), caching=st.booleans())
    def start(self, num_blocks: int, caching: bool) -> None:
        self.pool = BlockPool(num_blocks, caching)
        self.free = list(range(1, num_blocks))
        self.owners: dict[int, int] = {}
        self.keys: dict[tuple[int, bytes], int] = {}

    def is_cached(self, block: int) -> bool:
        return block in self.keys.values()

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free)))
        expected, self.free = self.free[:count], self.free[count:]
        assert self.pool.allocate(count) == expected
        self.owners |= dict.fromkeys(expected, 1)
        self.keys = {key: block for key, block in self.keys.items() if block not in expected}

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.owners)), unique=True))
        self.pool.release([0, *blocks])
        for block in blocks:
            self.owners[block] -= 1
            if self.owners[block] == 0:
                del self.owners[block]
                self.free.insert(len(self.free) if self.is_cached(block) else 0, block)

    @precondition(lambda self: any(not self.is_cached(block) for block in self.owners))
    @rule(data=st.data(), key=KEYS)
    def publish(self, data: st.DataObject, key: tuple[int, bytes]) -> None:
        block = data.draw(st.sampled_from(sorted(b for b in self.owners if not self.is_cached(b))))
        twin = self.keys.get(key)
        accepted = self.pool.enable_caching and twin not in self.owners
        assert self.pool.publish(block, key) is accepted
        if accepted:
            self.give_up(key)
            self.keys[key] = block

    @rule(key=KEYS)
    def match_and_touch(self, key: tuple[int, bytes]) -> None:
        block = self.pool.match(key)
        assert block == self.keys.get(key)
        if block is not None:
            self.pool.touch([0, block])
            self.owners[block] = self.owners.get(block, 0) + 1
            self.free = [b for b in self.free if b != block]

    @rule(key=KEYS)
    def unpublish(self, key: tuple[int, bytes]) -> None:
        self.pool.unpublish(key)
        self.give_up(key)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_cache() is (not self.owners)
        if not self.owners:
            self.keys.clear()

    def give_up(self, key: tuple[int, bytes]) -> None:
        block = self.keys.pop(key, None)
        if block is not None and block in self.free:
            self.free.remove(block)
            self.free.insert(0, block)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.num_free == len(self.free)
        assert self.pool.usage == len(self.owners) / (self.pool.num_blocks - 1)
        assert self.pool.num_cached == len(self.keys)
        assert all(self.pool.num_references(block) == self.owners.get(block, 0) for block in range(self.pool.num_blocks))


def test_block_pool_machine() -> None:
    run_state_machine_as_test(BlockPoolMachine, settings=settings(max_examples=200, stateful_step_count=50, deadline=None))
