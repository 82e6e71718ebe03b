"""The codes of a format in the order in which the CPU kernels read them: an arrangement, in as many bytes.

Tokens lie side by side where keys are multiplied, dimensions where values are. With c codes to a 32-bit word (8 of 4 to 6 bits,
4 of 8, 2 of 16, 1 of 32), a block's planes are, per kv head:
  k        [D / c words][S tokens]           a word is c neighbouring numbers of a token
  k_high   [D / 8][S] of 1 or 2 bytes        what 5 and 6 bits have above the nibble, of the same 8 numbers
  k_extra  [units][S]                        the extra bytes of a token, in units of 1, 2 or 4
  v        [S / c words][D]                  a word is c neighbouring tokens of a number
  v_high   [S / 8][D] of 1 or 2 bytes
  v_extra  [S][bytes]                        as they are
Codes of even index fill the lower half of a word, the others its upper half: shifted words then hold pairs of neighbours, each at
the bottom of 16 bits, where instructions for pairs of bfloat16 want them.

Shape letters: T tokens, G kv heads, D head dim, B blocks, S block size, W words, C codes of a word, N bytes, E extra bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kvcache.formats.base import KVFormat
from halfbyte.kvcache.formats.coded import CodedFormat
from halfbyte.kvcache.spec import KVCacheSpec, Plane

if TYPE_CHECKING:
    from halfbyte.kvcache.tensors import LayerCache
    from halfbyte.platform import Platform

SUFFIX = "@tiles"
TILE_TOKENS = 16
_NIBBLES = 8  # codes of a word, for 4 to 6 bits


def codes_per_word(bits: int) -> int:
    return _NIBBLES if bits < 8 else 32 // bits


class TilesFormat(CodedFormat):
    """`base`, tile by tile."""

    def __init__(self, base: KVFormat) -> None:
        if base.sides is None:
            raise KeyError(base.name + SUFFIX)
        super().__init__(base.name + SUFFIX, *base.sides, first_tokens=base.first_tokens)
        self._base = base

    def planes(self, spec: KVCacheSpec) -> tuple[Plane, ...]:
        heads, size = spec.num_kv_heads, spec.block_size
        found = []
        for prefix, side, dim in self._each(spec):
            per_word, high = codes_per_word(side.codec.bits), max(side.codec.bits, 4) - 4 if side.codec.bits < 8 else 0
            is_key = prefix == "k"
            found.append(Plane(prefix, "int32", (heads, dim // per_word, size) if is_key else (heads, size // per_word, dim)))
            if high:
                inner = (heads, dim // 8, size) if is_key else (heads, size // 8, dim)
                found.append(Plane(f"{prefix}_high", "uint8" if high == 1 else "int16", inner))
            if extra := side.codec.extra_bytes(dim):
                unit = side.codec.extra_unit
                shape = (heads, extra // unit, size, unit) if is_key else (heads, size, extra)
                found.append(Plane(f"{prefix}_extra", "uint8", shape))
        return tuple(found)

    def refuse(self, spec: KVCacheSpec, platform: Platform) -> Refusal | None:
        if spec.block_size % TILE_TOKENS:
            return Refusal(f"{self.name} holds tiles of {TILE_TOKENS} tokens, got block size {spec.block_size}", "")
        for _, side, dim in self._each(spec):
            if dim % codes_per_word(side.codec.bits):
                return Refusal(f"{self.name} holds whole words of codes, got head dim {dim}", "")
        return self._base.refuse(spec, platform)

    def put(self, cache: LayerCache, prefix: str, at: tuple[Tensor, Tensor], codes_TGD: Tensor, extra_TGE: Tensor) -> None:
        block_T, offset_T = at
        bits = (self.k if prefix == "k" else self.v).codec.bits
        low, high = _split(codes_TGD, bits)
        _put_words(cache, prefix, block_T, offset_T, low, min(bits, 4) if bits < 8 else bits)
        if high is not None:
            _put_words(cache, f"{prefix}_high", block_T, offset_T, high, bits - 4)
        if extra_TGE.shape[-1]:
            plane = cache.planes[f"{prefix}_extra"]
            if prefix == "k":
                plane.permute(0, 3, 1, 2, 4)[block_T, offset_T] = extra_TGE.unflatten(-1, (plane.shape[2], -1))
            else:
                plane.transpose(1, 2)[block_T, offset_T] = extra_TGE

    def get(self, cache: LayerCache, prefix: str, at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        block, offset = at
        bits = (self.k if prefix == "k" else self.v).codec.bits
        codes = _get_words(cache, prefix, block, offset, min(bits, 4) if bits < 8 else bits)
        if 4 < bits < 8:
            codes = codes | (_get_words(cache, f"{prefix}_high", block, offset, bits - 4) << 4)
        codes = codes.to({16: torch.int16, 32: torch.int32}.get(bits, torch.uint8))
        plane = cache.planes.get(f"{prefix}_extra")
        if plane is None:
            return codes, codes[..., :0].to(torch.uint8)
        if prefix == "k":
            return codes, plane.permute(0, 3, 1, 2, 4)[block, offset].flatten(-2)
        return codes, plane.transpose(1, 2)[block, offset]


def _split(codes_TGD: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """Codes as int32: nibbles and what is above them, or whole."""
    wide = codes_TGD.to(torch.int32)
    return (wide & 15, wide >> 4) if 4 < bits < 8 else (wide, None)


def _put_words(cache: LayerCache, name: str, block_T: Tensor, offset_T: Tensor, codes_TGD: Tensor, bits: int) -> None:
    """Codes of `bits` into the words of a plane: of a key along its numbers, of a value along tokens."""
    plane = cache.planes[name]
    per_word = _per_word(plane, bits)
    mask = (1 << bits) - 1 if bits < 32 else -1
    shifts_C = _shifts(per_word, bits)
    if name.startswith("k"):
        words_TGW = ((codes_TGD & mask).unflatten(-1, (-1, per_word)) << shifts_C).sum(-1, dtype=torch.int64)
        plane.permute(0, 3, 1, 2)[block_T, offset_T] = _as_type(words_TGW, plane)
        return
    by_word_BWGD = plane.transpose(1, 2)
    for i in range(per_word):  # the tokens that are the i-th of their word: no two share one
        (rows,) = torch.nonzero(offset_T % per_word == i, as_tuple=True)
        place = (block_T[rows], offset_T[rows] // per_word)
        shift = int(shifts_C[i])
        kept = by_word_BWGD[place].long() & ~(mask << shift)
        by_word_BWGD[place] = _as_type(kept | ((codes_TGD[rows].long() & mask) << shift), plane)


def _get_words(cache: LayerCache, name: str, block: Tensor, offset: Tensor, bits: int) -> Tensor:
    """The codes of those tokens, int32 [..., G, D]."""
    plane = cache.planes[name]
    per_word = _per_word(plane, bits)
    mask = (1 << bits) - 1
    shifts_C = _shifts(per_word, bits)
    if name.startswith("k"):
        words = plane.permute(0, 3, 1, 2)[block, offset].long()
        return ((words[..., None] >> shifts_C) & mask).flatten(-2).to(torch.int32)
    words = plane.transpose(1, 2)[block, offset // per_word].long()
    return ((words >> shifts_C[offset % per_word][..., None, None]) & mask).to(torch.int32)


def _shifts(per_word: int, bits: int) -> Tensor:
    """Where in its word each code begins: those of even index fill the lower half, those of odd index the upper."""
    index_C = torch.arange(per_word)
    return index_C // 2 * bits + index_C % 2 * (per_word * bits // 2)


def _per_word(plane: Tensor, bits: int) -> int:
    return plane.dtype.itemsize * 8 // bits


def _as_type(words: Tensor, plane: Tensor) -> Tensor:
    """int64 to the plane's type, keeping the low bits."""
    bits = plane.dtype.itemsize * 8
    words = words & ((1 << bits) - 1)
    if plane.dtype != torch.uint8:
        words = torch.where(words >= 1 << (bits - 1), words - (1 << bits), words)
    return words.to(plane.dtype)
