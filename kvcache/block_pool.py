"""The pool of KV blocks: who may write which block, and which free blocks still hold a known prefix.

Knows block ids, reference counts and opaque keys; knows no requests, tokens or memory. Used by the KV cache manager only.

A block is free (reference count 0, in the free queue) or in use. A block with a key is *cached*: its content is final, and
`match` finds it whether in use or free. Block 0 is the null block: the placeholder for positions that nobody reads. It is
never handed out, freed or cached, so it serves as the head of the free queue's ring.
"""

from __future__ import annotations

from collections.abc import Iterable

BlockKey = tuple[int, bytes]  # (group index, prefix hash)

NULL_BLOCK = 0


class BlockPool:
    """All operations are O(1) per block.

    The free queue is taken from at the front. Blocks without a key return to the front (reused at once, last in first out);
    blocks with a key go to the back, so the least recently used cached block is the first to lose its content.
    A key names at most one block.
    """

    def __init__(self, num_blocks: int, enable_caching: bool) -> None:
        assert num_blocks >= 2, "the null block and at least one more"
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.num_free = num_blocks - 1
        self.num_releases = 0  # blocks that became free, ever
        self.num_publications = 0  # blocks that became matchable, ever
        self._refs = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._block_of: dict[BlockKey, int] = {}
        self._next = [(block + 1) % num_blocks for block in range(num_blocks)]
        self._prev = [(block - 1) % num_blocks for block in range(num_blocks)]

    @property
    def usage(self) -> float:
        """The part of the blocks that is in use, 0 to 1. Cached blocks that nobody uses count as free."""
        return (self.num_blocks - 1 - self.num_free) / (self.num_blocks - 1)

    @property
    def num_cached(self) -> int:
        return len(self._block_of)

    def num_references(self, block: int) -> int:
        return self._refs[block]

    def key_of(self, block: int) -> BlockKey | None:
        return self._keys[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one owner who may write them. The caller checks `num_free` first."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free"
        blocks = []
        for _ in range(count):
            block = self._next[NULL_BLOCK]
            self._unlink(block)
            self._drop_key(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add one owner to each cached block; it comes out of the free queue if it was there. Null blocks are skipped."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            assert self._keys[block] is not None, "only a cached block can get another owner"
            if self._refs[block] == 0:
                self._unlink(block)
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one owner from each block. Pass a request's tail first: what is released first is reused first."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            assert self._refs[block] > 0, "a block is released once per owner"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self.num_releases += 1
                self._link(block, before=NULL_BLOCK if self._keys[block] is not None else self._next[NULL_BLOCK])

    def publish(self, block: int, key: BlockKey) -> bool:
        """Make a full block matchable; from now on nobody writes it. False if another block in use has the key already.

        A *free* block with the same content gives the key up: the one in use stays longer, and one copy is enough.
        """
        if not self.enable_caching:
            return False
        assert self._refs[block] > 0 and self._keys[block] is None, "a block is published once, by its owner"
        twin = self._block_of.get(key)
        if twin is not None:
            if self._refs[twin] > 0:
                return False
            self._forget(twin)
        self._keys[block] = key
        self._block_of[key] = block
        self.num_publications += 1
        return True

    def match(self, key: BlockKey) -> int | None:
        return self._block_of.get(key)

    def unpublish(self, key: BlockKey) -> None:
        """Forget a cached content (it turned out to be bad). Its owners keep the block."""
        block = self._block_of.get(key)
        if block is None:
            return
        if self._refs[block] == 0:
            self._forget(block)
        else:
            self._drop_key(block)

    def reset_cache(self) -> bool:
        """Forget every cached content. Only possible, and then True, while no block is in use."""
        if self.num_free != self.num_blocks - 1:
            return False
        self._block_of.clear()
        self._keys = [None] * self.num_blocks
        return True

    def check(self) -> None:
        """Verify every invariant; O(num_blocks), for tests."""
        free: list[int] = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            assert self._prev[self._next[block]] == block and self._next[self._prev[block]] == block, "queue links agree"
            free.append(block)
            assert len(free) < self.num_blocks, "the free queue is one ring"
            block = self._next[block]
        assert len(free) == len(set(free)) == self.num_free, "num_free counts the free queue"
        assert set(free) == {b for b in range(1, self.num_blocks) if self._refs[b] == 0}, "free means no owner"
        assert self._refs[NULL_BLOCK] == 0 and self._keys[NULL_BLOCK] is None, "the null block has no owner and no key"
        assert all(refs >= 0 for refs in self._refs)
        assert self._block_of == {key: b for b, key in enumerate(self._keys) if key is not None}, "keys and blocks are one to one"
        assert len(self._block_of) == sum(key is not None for key in self._keys), "no two blocks have one key"
        assert self.enable_caching or not self._block_of

    def _forget(self, block: int) -> None:
        """Take the key from a free block, which then is worth no more than any other: to the front."""
        self._drop_key(block)
        self._unlink(block)
        self._link(block, before=self._next[NULL_BLOCK])

    def _drop_key(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._block_of[key]
            self._keys[block] = None

    def _link(self, block: int, before: int) -> None:
        after = self._prev[before]
        self._next[after] = self._prev[before] = block
        self._prev[block], self._next[block] = after, before
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1
