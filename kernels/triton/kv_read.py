"""Tiles of K or V out of the cache, dequantised, in any format: what attention kernels call where they would load numbers.

The Triton twin of `KVFormat.read`, for one kv head and the tokens of a tile. Codes of less than 8 bits lie in pairs:
`read_halves` gives the numbers of even and of odd index apart, which products can take as they are; `read_tile` puts them side by
side. A tile is as wide as the head dim's next power of two; beyond the head dim stand finite numbers without a meaning.

Shape letters: L tokens of a tile, N numbers of a vector, H half of that, E extra bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.triton.sides import KVSide


@triton.jit
def read_tile(side: KVSide, block_L: tl.tensor, offset_L: tl.tensor, head: tl.tensor, is_read_L: tl.tensor) -> tl.tensor:
    """float32 [L, N]: head `head` of the tokens at `offset_L` of the blocks `block_L` (int64); zeros where not `is_read_L`."""
    if side.bits < 8:
        even_LH, odd_LH = read_halves(side, block_L, offset_L, head, is_read_L)
        tile_LN = tl.reshape(tl.join(even_LH, odd_LH), [even_LH.shape[0], side.width])
    else:
        codes_LN = load_rows(rows_of_codes(side, block_L, offset_L, head), side.dim, side.width, is_read_L)
        if side.bits == 8:
            codes_LN = codes_LN.to(tl.int32)
        extra_LE = extra_of(side, block_L, offset_L, head, is_read_L)
        tile_LN = side.decode(codes_LN, extra_LE, tl.load(side.scale + head), side.parameter)
    return tile_LN


@triton.jit
def read_halves(side: KVSide, block_L: tl.tensor, offset_L: tl.tensor, head: tl.tensor, is_read_L: tl.tensor) -> tl.tuple:
    """The same as numbers of even index and of odd index, float32 [L, N / 2] each, of a side with less than 8 bits."""
    codes_L = rows_of_codes(side, block_L, offset_L, head)
    pairs_LH = load_rows(codes_L, side.dim // 2, side.width // 2, is_read_L).to(tl.int32)
    even_LH, odd_LH = pairs_LH & 15, pairs_LH >> 4
    if side.bits > 4:
        HIGH: tl.constexpr = side.bits - 4
        high = load_rows(codes_L + side.dim // 2, side.dim * HIGH // 8, side.width * HIGH // 8, is_read_L).to(tl.int32)
        even_LH |= _spread(high, 0, HIGH) << 4
        odd_LH |= _spread(high, HIGH, HIGH) << 4
    extra_LE, scale = extra_of(side, block_L, offset_L, head, is_read_L), tl.load(side.scale + head)
    return side.decode(even_LH, extra_LE, scale, side.parameter), side.decode(odd_LH, extra_LE, scale, side.parameter)


@triton.jit
def rows_of_codes(side: KVSide, block_L: tl.tensor, offset_L: tl.tensor, head: tl.tensor) -> tl.tensor:
    """Where the codes of each token begin."""
    return side.codes + (block_L * side.codes_block_stride + head * side.codes_head_stride + offset_L * side.codes_token_stride)


@triton.jit
def load_rows(row_L: tl.tensor, NUM: tl.constexpr, WIDTH: tl.constexpr, is_read_L: tl.tensor) -> tl.tensor:
    """[L, WIDTH]: NUM values from each row's address on, then zeros."""
    number_N = tl.arange(0, WIDTH)
    return tl.load(row_L[:, None] + number_N[None, :], mask=is_read_L[:, None] & (number_N < NUM)[None, :], other=0)


@triton.jit
def _spread(bytes_LB: tl.tensor, FIRST: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Every other code of BITS out of bytes full of them, the first at bit FIRST."""
    PER_BYTE: tl.constexpr = 4 // BITS
    shift = FIRST + 2 * BITS * tl.arange(0, PER_BYTE)
    codes = (bytes_LB[:, :, None] >> shift[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(codes, [bytes_LB.shape[0], bytes_LB.shape[1] * PER_BYTE])


@triton.jit
def extra_of(side: KVSide, block_L: tl.tensor, offset_L: tl.tensor, head: tl.tensor, is_read_L: tl.tensor) -> tl.tensor:
    """The extra bytes of each token, int32 [L, E]; for a codec without, a byte that it does not look at."""
    tl.static_assert(side.extra_step == 1, "interleaved extra bytes are for others to read")
    row_L = side.extra + (block_L * side.extra_block_stride + head * side.extra_head_stride + offset_L * side.extra_token_stride)
    return load_rows(row_L, side.num_extra, triton.next_power_of_2(max(side.num_extra, 1)), is_read_L).to(tl.int32)
