"""Names for prefixes: a chain of SHA-256 digests over full blocks of token ids.

The digest of block i stands for *all* tokens up to its end, and for the request's cache salt and adapter, because block i's
digest goes into that of block i + 1. The chain starts from a seed that is random per process: nobody outside can construct a
collision or compare digests. Knows no blocks and no pool; called by the scheduler when a request arrives and as it grows.
"""

from __future__ import annotations

import os
from array import array
from hashlib import sha256

_SEED = os.urandom(32)


def extend_hashes(
    hashes: list[bytes], token_ids: list[int], block_size: int, salt: str | None, content: bytes = b"", adapter_id: int = 0
) -> None:
    """Append the digests of the full blocks of `token_ids` that `hashes` does not cover yet. O(new tokens).

    content: names what else the cached numbers depend on, such as the calibration of their format. adapter_id: of one load of an
    adapter; 0 for none.
    """
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else _root(salt, content, adapter_id)
        hashes.append(sha256(parent + array("q", token_ids[start : start + block_size]).tobytes()).digest())


def _root(salt: str | None, content: bytes, adapter_id: int) -> bytes:
    """The parent of a first block. Requests with different salts or adapters share nothing from here on."""
    if salt is None and not content and not adapter_id:
        return _SEED
    salted = b"" if salt is None else sha256(salt.encode("utf-8", "surrogatepass")).digest()
    adapted = sha256(b"adapter %d" % adapter_id).digest() if adapter_id else b""
    return sha256(b"".join([_SEED, *(b"%d:" % len(part) + part for part in (salted, adapted, content))])).digest()
