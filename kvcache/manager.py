"""Block tables of all requests, over all KV groups: what a request holds, what it can share, whether it fits.

Knows layouts, token counts and prefix hashes; knows no scheduling policy, no memory and no torch. The scheduler calls it for
each request that it schedules, from one thread. Blocks of the cache are immutable: a request writes only blocks that it
alone owns and that nobody can match, and a match always leaves at least one token to compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice, takewhile
from typing import Protocol

from halfbyte.kvcache.block_pool import NULL_BLOCK, BlockKey, BlockPool
from halfbyte.kvcache.sizing import UNBOUNDED_TOKENS, blocks_for_group, blocks_for_request, longest_request
from halfbyte.kvcache.spec import KVLayout


class CacheUser(Protocol):
    """What the manager reads of a request. num_computed_tokens counts those of a step in flight; what of them can be published
    already, the caller says. `block_hashes` covers at least the full blocks of what is published.
    """

    @property
    def request_id(self) -> str: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def block_hashes(self) -> list[bytes]: ...

    @property
    def skip_prefix_cache(self) -> bool: ...


@dataclass(slots=True)
class PrefixMatch:
    """Tokens whose KV is cached, and their blocks, one list per group, null where a sliding window needs none."""

    num_tokens: int
    block_ids: list[list[int]]


@dataclass(slots=True)
class _Holding:
    """What one request holds. tables: per group, one entry per block of the sequence, null where it slid out of the window.

    num_dropped: per group, leading entries that are null. num_published: leading units that need no publishing any more.
    num_awaitable: those units that were known when it was admitted, and that others may wait for until they are published.
    reserve: blocks that its known tokens will still need, spoken for when it was admitted.
    """

    user: CacheUser
    tables: list[list[int]]
    num_dropped: list[int]
    num_published: int
    num_awaitable: int
    known_tokens: int
    reserve: int = field(default=0)


class KVCacheManager:
    """One pool, one table per request and group.

    Prefixes are shared in units of `block_size` tokens, the layout's unit; a unit is one entry of a group's table, or several in
    a group with shorter blocks. content: what the cached numbers depend on beside tokens; part of every prefix's digest.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        enable_prefix_caching: bool,
        max_num_batched_tokens: int,
        content: bytes = b"",
    ) -> None:
        self.content = content
        self.layout = layout
        self.block_size = layout.unit_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, enable_prefix_caching)
        self._max_batched = max_num_batched_tokens
        self._holdings: dict[str, _Holding] = {}
        self._awaitable: Counter[bytes] = Counter()  # digests of units that requests compute and have not published
        self._reserved = 0
        self._reserve_returns = 0
        self._short: tuple[str, int] | None = None
        self.max_request_tokens = longest_request(layout, num_blocks, max_num_batched_tokens, UNBOUNDED_TOKENS)

    @property
    def usage(self) -> float:
        """The part of the blocks that requests hold, 0 to 1; 0 when idle, whatever is cached."""
        return self.pool.usage

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def blocks_needed(self, num_tokens: int) -> int:
        """The most blocks that a request of so many tokens ever holds at once."""
        return blocks_for_request(self.layout, num_tokens, self._max_batched)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a request of so many computed tokens fits when it is alone."""
        return num_tokens <= self.max_request_tokens

    def match_prefix(self, user: CacheUser) -> PrefixMatch:
        """The longest cached prefix that all groups can serve, in full blocks, short of the last token."""
        if not self.enable_prefix_caching or user.skip_prefix_cache:
            return PrefixMatch(0, [[] for _ in self.layout.groups])
        hashes = user.block_hashes
        length = min(len(hashes), (len(user.token_ids) - 1) // self.block_size)
        longest = -1
        while length != longest:  # a hole in one window shortens the match for all, which moves the other windows
            longest = length
            for group in range(len(self.layout.groups)):
                length = self._match_group(group, hashes, length)
        block_ids = []
        for group, kind in enumerate(self.layout.groups):
            num_null = kind.entry_of(self._first_needed(group, length * self.block_size))
            keys = (key for unit in range(length) for _, key in self._entries(group, unit, hashes[unit]))
            hits = [self.pool.match(key) for entry, key in enumerate(keys) if entry >= num_null]
            block_ids.append([NULL_BLOCK] * num_null + [block for block in hits if block is not None])
            assert len(block_ids[-1]) == kind.num_entries(length * self.block_size)
        return PrefixMatch(length * self.block_size, block_ids)

    def awaited_prefix(self, user: CacheUser) -> tuple[int, bytes] | None:
        """What running requests are computing of this one's prefix, beyond what is cached: (its length in tokens, the digest of
        its last unit); None when nothing is. To be asked for a request that holds nothing; O(1) afterwards: `is_awaitable`."""
        if not self._awaitable or user.skip_prefix_cache:
            return None
        hashes = user.block_hashes
        first = self.match_prefix(user).num_tokens // self.block_size
        last = (len(user.token_ids) - 1) // self.block_size
        num_units = len(list(takewhile(self._awaitable.__contains__, islice(hashes, first, last))))
        return (num_units * self.block_size, hashes[first + num_units - 1]) if num_units else None

    def is_awaitable(self, unit: bytes) -> bool:
        """Whether a running request is still to publish the unit with this digest."""
        return unit in self._awaitable

    def may_fit(self, user: CacheUser) -> bool:
        """False while another attempt to admit this request is pointless: fewer blocks became free or cached since it fell
        short than it was short of. O(1), so that a long prompt at the head of the queue costs nothing per step. May be
        pessimistic about prefixes with holes in them, but not longer than until the running requests have ended."""
        return self._short is None or self._short[0] != user.request_id or self._gains() >= self._short[1]

    def allocate(self, user: CacheUser, num_new_tokens: int, match: PrefixMatch | None = None) -> list[list[int]] | None:
        """Give the request blocks for its next `num_new_tokens` tokens; returns the new block ids, one list per group.

        A request that holds nothing yet gets its whole table (`match`, then new blocks), provided that all tokens known of it
        fit besides what was promised to others. None: too few free blocks, nothing changed except that blocks that slid out
        of a window were released. Those that a step in flight fills wait there to be published, while nobody needs them.
        """
        holding = self._holdings.get(user.request_id)
        if holding is None:
            return self._admit(user, num_new_tokens, match or PrefixMatch(0, [[] for _ in self.layout.groups]))
        assert match is None, "a prefix is matched before a request holds blocks"
        num_tokens = user.num_computed_tokens + num_new_tokens
        groups = zip(self.layout.groups, holding.tables, strict=True)
        grow = [max(0, kind.num_entries(num_tokens) - len(table)) for kind, table in groups]
        self._drop_out_of_window(holding, keep_unpublished=True)
        if sum(grow) + self._reserved > self.pool.num_free:
            self._drop_out_of_window(holding, keep_unpublished=False)
        if sum(grow) > self.pool.num_free:
            return None
        self._use_reserve(holding, sum(grow), num_tokens)
        if not any(grow):
            return [[] for _ in grow]
        blocks = iter(self.pool.allocate(sum(grow)))
        new = [list(islice(blocks, count)) for count in grow]
        for table, ids in zip(holding.tables, new, strict=True):
            table += ids
        return new

    def publish(self, user: CacheUser, num_computed_tokens: int) -> None:
        """Make the full units of the first `num_computed_tokens` tokens, whose KV is written, matchable."""
        if not self.enable_prefix_caching:
            return
        holding = self._holdings[user.request_id]
        for unit in range(holding.num_published, num_computed_tokens // self.block_size):
            for group, table in enumerate(holding.tables):
                for entry, key in self._entries(group, unit, user.block_hashes[unit]):
                    if table[entry] != NULL_BLOCK:
                        self.pool.publish(table[entry], key)
            self._await_no_more(holding, unit + 1)

    def free(self, user: CacheUser) -> None:
        """Take everything from the request; what is published stays matchable until its blocks are needed."""
        holding = self._holdings.pop(user.request_id, None)
        if self._short is not None and self._short[0] == user.request_id:
            self._short = None
        if holding is None:
            return
        self._await_no_more(holding, holding.num_awaitable)
        self._return_reserve(holding)
        held = takewhile(lambda unit: any(self._span(g, unit)[0] < len(t) for g, t in enumerate(holding.tables)), count())
        for unit in reversed(list(held)):  # the tail first, of all groups alike
            for group, table in enumerate(holding.tables):
                first, end = self._span(group, unit)
                self.pool.release(reversed(table[first:end]))

    def forget(self, user: CacheUser) -> None:
        """Make nothing of this request's content matchable any more: it may be wrong (non-finite)."""
        for unit, prefix in enumerate(user.block_hashes):
            for group in range(len(self.layout.groups)):
                for _, key in self._entries(group, unit, prefix):
                    self.pool.unpublish(key)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; only possible, and then True, while no request holds blocks."""
        return self.pool.reset_cache()

    def check(self) -> None:
        """Verify every invariant of the pool, the tables and what they share; for tests."""
        self.pool.check()
        owners: Counter[int] = Counter()
        writable: set[int] = set()
        for holding in self._holdings.values():
            hashes = holding.user.block_hashes
            for group, table in enumerate(holding.tables):
                dropped = holding.num_dropped[group]
                assert not any(table[:dropped]) and all(table[dropped:]), "null blocks lead, real blocks follow"
                assert self.layout.groups[group].sliding_window or dropped == 0, "full attention drops nothing"
                owners.update(table[dropped:])
                published = self._span(group, holding.num_published)[0]
                writable.update(table[max(dropped, published) :])
                keys = [key for unit, prefix in enumerate(hashes) for _, key in self._entries(group, unit, prefix)]
                for entry in range(dropped, len(table)):
                    key = self.pool.key_of(table[entry])
                    assert key is None or key == keys[entry], "a cached block holds this prefix"
        assert all(owners[block] == self.pool.num_references(block) for block in range(1, self.pool.num_blocks)), "no block leaks"
        for block in writable:
            assert owners[block] == 1 and self.pool.key_of(block) is None, "a writable block has one owner and no key"
        assert self._reserved == sum(h.reserve for h in self._holdings.values()) and self._reserved >= 0
        awaitable = [unit for h in self._holdings.values() for unit in h.user.block_hashes[h.num_published : h.num_awaitable]]
        assert self._awaitable == Counter(awaitable), "others wait for what is being computed, and for nothing else"

    def _admit(self, user: CacheUser, num_new_tokens: int, match: PrefixMatch) -> list[list[int]] | None:
        known_tokens = len(user.token_ids)
        end_tokens = match.num_tokens + num_new_tokens
        groups = zip(self.layout.groups, match.block_ids, strict=True)
        grow = [kind.num_entries(end_tokens) - len(table) for kind, table in groups]
        num_dropped = [table.count(NULL_BLOCK) for table in match.block_ids]
        live_hits = sum(self.pool.num_references(b) > 0 for table in match.block_ids for b in table)
        needs = self._blocks_from(num_dropped, known_tokens) - live_hits
        if needs + self._reserved > self.pool.num_free:
            self._short = (user.request_id, self._gains() + needs + self._reserved - self.pool.num_free)
            return None
        free_before = self.pool.num_free
        for table in match.block_ids:
            self.pool.touch(table)
        blocks = iter(self.pool.allocate(sum(grow)))
        tables = [table + list(islice(blocks, count)) for table, count in zip(match.block_ids, grow, strict=True)]
        num_published = match.num_tokens // self.block_size
        num_awaitable = 0 if user.skip_prefix_cache else len(user.block_hashes)  # it may compute what is cached
        holding = _Holding(user, tables, num_dropped, num_published, num_awaitable, known_tokens, reserve=needs)
        self._holdings[user.request_id] = holding
        self._awaitable.update(user.block_hashes[num_published:num_awaitable])
        self._reserved += needs
        self._use_reserve(holding, free_before - self.pool.num_free, end_tokens)
        return [list(table) for table in tables]

    def _await_no_more(self, holding: _Holding, num_units: int) -> None:
        """Nobody needs to wait for these leading units of the request any more."""
        for unit in holding.user.block_hashes[holding.num_published : min(num_units, holding.num_awaitable)]:
            self._awaitable[unit] -= 1
            if not self._awaitable[unit]:
                del self._awaitable[unit]
        holding.num_published = max(holding.num_published, num_units)

    def _blocks_from(self, num_dropped: list[int], num_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at once, whose first blocks need not be held in some groups."""
        return sum(
            min(group.num_entries(num_tokens) - dropped, blocks_for_group(group, num_tokens, self._max_batched))
            for group, dropped in zip(self.layout.groups, num_dropped, strict=True)
        )

    def _gains(self) -> int:
        """Grows by at least one with each block that an admission can find in addition."""
        return self.pool.num_releases + self.pool.num_publications + self._reserve_returns

    def _use_reserve(self, holding: _Holding, taken: int, num_tokens: int) -> None:
        """The request took blocks for its first `num_tokens` tokens: so many fewer are promised, none when all are there."""
        used = min(taken, holding.reserve)
        holding.reserve -= used
        self._reserved -= used
        if num_tokens >= holding.known_tokens:
            self._return_reserve(holding)

    def _return_reserve(self, holding: _Holding) -> None:
        self._reserved -= holding.reserve
        self._reserve_returns += holding.reserve
        holding.reserve = 0

    def _span(self, group: int, unit: int) -> tuple[int, int]:
        """The entries of a group's table that hold a unit: first, end."""
        kind = self.layout.groups[group]
        return kind.num_entries(unit * self.block_size), kind.num_entries((unit + 1) * self.block_size)

    def _entries(self, group: int, unit: int, prefix: bytes) -> Iterator[tuple[int, BlockKey]]:
        """Those entries, each with the key of its content. prefix: the unit's digest."""
        first, end = self._span(group, unit)
        for entry in range(first, end):
            yield entry, (group, prefix if entry == first else prefix + (entry - first).to_bytes(2))

    def _match_group(self, group: int, hashes: list[bytes], limit: int) -> int:
        """The longest prefix of at most `limit` units that this group can serve."""
        end = limit
        while end > 0:
            first = self._first_needed(group, end * self.block_size)
            holes = (unit for unit in range(first // self.block_size, end) if self._has_hole(group, unit, hashes, first))
            hole = next(holes, None)
            if hole is None:
                break
            end = hole  # each longer candidate needs the hole, too
        return end

    def _has_hole(self, group: int, unit: int, hashes: list[bytes], first_needed: int) -> bool:
        """Whether content of the unit is missing, in entries from that of position `first_needed` on."""
        needed = self.layout.groups[group].entry_of(first_needed)
        entries = self._entries(group, unit, hashes[unit])
        return any(entry >= needed and self.pool.match(key) is None for entry, key in entries)

    def _first_needed(self, group: int, num_computed_tokens: int) -> int:
        """The first position that tokens from `num_computed_tokens` on attend to."""
        window = self.layout.groups[group].sliding_window
        return 0 if window is None else max(0, num_computed_tokens - window + 1)

    def _drop_out_of_window(self, holding: _Holding, *, keep_unpublished: bool) -> None:
        """Replace blocks that slid out of their group's window by the null block, and release them, the last first.

        keep_unpublished: but for the full units that are computed and not published yet.
        """
        num_computed_tokens = holding.user.num_computed_tokens
        keep = keep_unpublished and self.enable_prefix_caching and holding.num_published < num_computed_tokens // self.block_size
        for group, table in enumerate(holding.tables):
            first_needed = self._first_needed(group, num_computed_tokens)
            first, end = holding.num_dropped[group], self.layout.groups[group].entry_of(first_needed)
            if keep:
                end = min(end, self._span(group, holding.num_published)[0])
            if end > first:
                self.pool.release(reversed(table[first:end]))
                table[first:end] = [NULL_BLOCK] * (end - first)
                holding.num_dropped[group] = end
