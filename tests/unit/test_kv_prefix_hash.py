"""The hash chain: equal prefixes and salts give equal digests, anything else gives others from there on."""

from __future__ import annotations

import subprocess
import sys

from halfbyte.kvcache.prefix_hash import extend_hashes


def chain(tokens: list[int], size: int = 4, salt: str | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, size, salt)
    return hashes


def test_full_blocks_only() -> None:
    assert [len(chain(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_growing_step_by_step_equals_at_once() -> None:
    tokens = list(range(23))
    hashes: list[bytes] = []
    for end in range(len(tokens) + 1):
        extend_hashes(hashes, tokens[:end], 4, "salt")
    assert hashes == chain(tokens, salt="salt")


def test_one_token_changes_all_that_follow() -> None:
    tokens = list(range(20))
    other = tokens[:9] + [99] + tokens[10:]
    same = [a == b for a, b in zip(chain(tokens), chain(other), strict=True)]
    assert same == [True, True, False, False, False]


def test_a_block_is_named_by_its_whole_prefix() -> None:
    hashes = chain([1, 2, 3, 4] * 3)
    assert len(set(hashes)) == 3 and all(len(digest) == 32 for digest in hashes)


def test_salts_share_nothing() -> None:
    tokens = list(range(12))
    chains = [chain(tokens, salt=salt) for salt in (None, "", "a", "b", "None", "\ud800")]
    assert len({digest for hashes in chains for digest in hashes}) == 18
    assert chain(tokens, salt="a") == chains[2]


def test_digests_differ_between_processes() -> None:
    code = "from halfbyte.kvcache.prefix_hash import *; h = []; extend_hashes(h, [1, 2], 2, None); print(h[0].hex())"
    runs = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(runs) == 2
