"""How the attention kernels are cut for each GPU: tile lengths, warps, stages. The built-in table; nothing is tuned in service.

Decoding is bound by memory: one warp to a program, many programs to a multiprocessor, tiles that fit into the registers.
Prompts are bound by tensor cores: tiles of queries as tall as their instructions want. Knows architectures by the names of
`halfbyte.platform`; called by the Triton attention back end where `tiles` has no cuts that were measured, and by `tuning`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

# Of the shared memory that a program may have, in bytes.
SHARED_BYTES = {
    **{"sm80": 163 << 10, "sm86": 99 << 10, "sm89": 99 << 10, "sm90": 227 << 10},
    **{"sm100": 227 << 10, "sm103": 227 << 10, "sm120": 99 << 10, "sm121": 99 << 10},
    **{"gfx90a": 64 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10},
}

_PART_TOKENS = 256
_MAX_PARTS = 64

_PROGRAMS_PER_MULTIPROCESSOR = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """rows: of a tile of queries (times heads); tile: tokens of the context at a time; stages: tiles on their way."""

    rows: int
    tile: int
    num_warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Cuts:
    """Of one kind of layer: for requests that are decoded, and for prompts."""

    decode: Cut
    prompt: Cut


@dataclass(frozen=True, slots=True)
class _Family:
    """prompt: for vectors of up to 128 numbers. decode_stages: where codes are read by the word."""

    prompt: Cut
    decode_stages: int


_WGMMA = _Family(Cut(128, 64, 8, 3), 3)  # and tcgen05: both take one operand from shared memory
_MMA = _Family(Cut(128, 32, 8, 2), 3)  # each warp holds the whole of K's tile in registers
_MFMA = _Family(Cut(128, 64, 4, 1), 2)
_FAMILIES = {
    **dict.fromkeys(("sm90", "sm100", "sm103"), _WGMMA),
    **dict.fromkeys(("sm80", "sm86", "sm89", "sm120", "sm121"), _MMA),
    **dict.fromkeys(("gfx90a", "gfx942", "gfx950"), _MFMA),
}


def decode_cut(architecture: str, rows: int, width: int, bits: Collection[int], is_easy: bool) -> Cut:
    """rows: queries times heads, a power of two. width: of a vector, a power of two; bits: of a number of K and of V.

    is_easy: whether both are read by the word, or as they are. Tiles and stages are as many as fit into the registers: a warp has
    16 rows of 128 sums, or of 64 where numbers are decoded one by one.
    """
    rows, tile, stages = max(16, rows), 16, _FAMILIES.get(architecture, _MMA).decode_stages
    is_dense = set(bits) == {16}
    if width <= 128 and is_easy and (is_dense or not set(bits) - {4, 8}):
        tile = 32
    if width > 128 or is_dense:
        stages = 2
    return Cut(rows, tile, rows // 16 * max(1, width // (128 if is_easy else 64)), stages)


def prompt_cut(architecture: str, heads: int, width: int) -> Cut:
    """heads: query heads per kv head, which share a tile's rows."""
    cut = _FAMILIES.get(architecture, _MMA).prompt
    if width > 128:
        cut = Cut(64, 16, 8, 2) if width <= 256 else Cut(32, 16, 4, 1)
    return replace(cut, rows=max(cut.rows, 1 << (heads - 1).bit_length()))


def part_tokens(max_context_len: int) -> int:
    """The unit of work of decoding, a power of two: the longest context that a server knows has not more than `_MAX_PARTS`, as
    graphs keep room for the results of all parts of all requests. It is the same for all requests, whatever their lengths."""
    return max(_PART_TOKENS, 1 << (-(-max_context_len // _MAX_PARTS) - 1).bit_length())


def num_programs(num_multiprocessors: int) -> int:
    """How many programs decoding is spread over."""
    return num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
