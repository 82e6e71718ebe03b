"""Products with tiles of the cache: scores of queries with K, and sums of V weighted by a softmax, for any format.

Codes lie so that a tile comes out of memory in parts: the numbers of even and of odd index, or of every fourth or eighth. A
product does not mind the order of what it adds up, so queries and sums are kept in the same parts, and no number is moved from
one thread to another. Where codes are read by the word (`packed`), parts are float16, and `score_factor` and `value_factor` are
what their numbers lack. Called by the attention kernels.

Shape letters: M queries, L tokens of a tile, C columns of a part, N numbers of a vector, W words, E extra bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.triton.kv_read import extra_of, load_rows, read_halves, read_tile, rows_of_codes
from halfbyte.kernels.triton.numbers import repeat
from halfbyte.kernels.triton.packed import high_half, low_half
from halfbyte.kernels.triton.sides import KVSide


@triton.jit
def score_factor(side: KVSide, head: tl.tensor) -> tl.tensor:
    """What products with numbers of this side are to be multiplied with."""
    factor = tl.full([], side.power, tl.float32)
    if side.is_packed and side.uses_scale:
        factor *= tl.load(side.scale + head)
    return factor


@triton.jit
def load_queries(row_M: tl.tensor, is_row_M: tl.tensor, side: KVSide, DTYPE: tl.constexpr) -> tl.tuple:
    """(The queries in K's parts, what their scores are to be multiplied with): from `side.dim` numbers at each address.

    For float16 each query is divided by the power of two at its greatest magnitude, so that none overflows.
    """
    NUM: tl.constexpr = side.num_parts // 2 if side.is_packed else side.num_parts
    parts = ()
    most_M = tl.zeros(row_M.shape, tl.float32)
    for part in tl.static_range(NUM):
        n_C = key_columns(side, part)
        is_number_MC = is_row_M[:, None] & (n_C < side.dim)[None, :]
        x_MC = tl.load(row_M[:, None] + n_C[None, :], mask=is_number_MC, other=0.0)
        most_M = tl.maximum(most_M, tl.max(tl.abs(x_MC.to(tl.float32)), 1))
        parts = parts + (x_MC,)  # type: ignore[assignment]
    small_M, factor_M = _power_of_two(most_M, side.is_packed)
    return _cast(parts, NUM, small_M[:, None], tl.float16 if side.is_packed else DTYPE), factor_M


@triton.jit
def _cast(parts: tl.tuple, NUM: tl.constexpr, factor_M1: tl.tensor, DTYPE: tl.constexpr) -> tl.tuple:
    found = ()
    for part in tl.static_range(NUM):
        found = found + ((parts[part].to(tl.float32) * factor_M1).to(DTYPE),)  # type: ignore[assignment]
    return found


@triton.jit
def key_columns(side: KVSide, PART: tl.constexpr) -> tl.tensor:
    """Which numbers of a vector part PART of K holds, int32 [C]."""
    if side.is_packed:
        i_C = tl.arange(0, 2 * side.width // side.num_parts)
        n_C = side.num_parts * (i_C // 2) + side.num_parts // 2 * (i_C % 2) + PART
    else:
        n_C = side.num_parts * tl.arange(0, side.width // side.num_parts) + PART
    return n_C


@triton.jit
def score(
    queries: tl.tuple, side: KVSide, block_L: tl.tensor, offset_L: tl.tensor, head: tl.tensor, is_read_L: tl.tensor
) -> tl.tensor:
    """float32 [M, L]: products of the queries with K of those tokens; of zeros where not `is_read_L`."""
    DTYPE: tl.constexpr = queries[0].dtype
    found_ML = tl.zeros([queries[0].shape[0], block_L.shape[0]], tl.float32)
    if side.is_packed:
        word_LW, high_LW, unit_LE = _words(side, block_L, offset_L, head, is_read_L)
        for part in tl.static_range(side.num_parts // 2):
            pair_LW = side.pairs(word_LW, high_LW, part)
            key_LC = tl.reshape(tl.join(low_half(pair_LW), high_half(pair_LW)), [word_LW.shape[0], 2 * word_LW.shape[1]])
            found_ML = tl.dot(queries[part], tl.trans(_numbers(side, key_LC, unit_LE)), found_ML)
    elif side.num_parts == 2:
        even_LC, odd_LC = read_halves(side, block_L, offset_L, head, is_read_L)
        found_ML = tl.dot(queries[0], tl.trans(even_LC.to(DTYPE)), found_ML, input_precision="ieee")
        found_ML = tl.dot(queries[1], tl.trans(odd_LC.to(DTYPE)), found_ML, input_precision="ieee")
    else:
        key_LC = read_tile(side, block_L, offset_L, head, is_read_L)
        found_ML = tl.dot(queries[0], tl.trans(key_LC.to(DTYPE)), found_ML, input_precision="ieee")
    return found_ML


@triton.jit
def no_sums(side: KVSide, ROWS: tl.constexpr) -> tl.tuple:
    """What `add_values` begins with: a zero for each query and number of a vector of V, in V's parts."""
    found = ()
    for _ in tl.static_range(side.num_parts):
        found = found + (tl.zeros([ROWS, side.width // side.num_parts], tl.float32),)  # type: ignore[assignment]
    return found


@triton.jit
def add_values(
    sums: tl.tuple,
    keep_M: tl.tensor,
    weight_ML: tl.tensor,
    side: KVSide,
    block_L: tl.tensor,
    offset_L: tl.tensor,
    head: tl.tensor,
    is_read_L: tl.tensor,
    DTYPE: tl.constexpr,
) -> tl.tuple:
    """sums * keep + weight V, in V's parts: part P holds the numbers num_parts * i + P."""
    found = ()
    if side.is_packed:
        word_LW, high_LW, unit_LE = _words(side, block_L, offset_L, head, is_read_L)
        weight_ML = weight_ML.to(tl.float16)
        for part in tl.static_range(side.num_parts):
            pair_LW = side.pairs(word_LW, high_LW, part % (side.num_parts // 2))
            value_LW = low_half(pair_LW) if part < side.num_parts // 2 else high_half(pair_LW)
            sums_MC = sums[part] * keep_M[:, None]
            found = found + (tl.dot(weight_ML, _numbers(side, value_LW, unit_LE), sums_MC),)  # type: ignore[assignment]
    else:
        weight_ML = weight_ML.to(DTYPE)
        if side.num_parts == 2:
            values = read_halves(side, block_L, offset_L, head, is_read_L)
        else:
            values = (read_tile(side, block_L, offset_L, head, is_read_L),)
        for part in tl.static_range(side.num_parts):
            sums_MC = sums[part] * keep_M[:, None]
            found = found + (tl.dot(weight_ML, values[part].to(DTYPE), sums_MC, input_precision="ieee"),)  # type: ignore[assignment]
    return found


@triton.jit
def _words(side: KVSide, block_L: tl.tensor, offset_L: tl.tensor, head: tl.tensor, is_read_L: tl.tensor) -> tl.tuple:
    """Words of codes uint32 [L, W], the bits above the fourth of each code [L, W], units of blocks float16 [L, E]."""
    code_L = rows_of_codes(side, block_L, offset_L, head)
    WIDTH: tl.constexpr = side.width // side.num_parts
    word_LW = load_rows(code_L.to(tl.pointer_type(tl.uint32)), side.dim // side.num_parts, WIDTH, is_read_L)
    high_LW = word_LW
    if side.bits == 5:
        high_LW = load_rows(code_L + side.dim // 2, side.dim // 8, WIDTH, is_read_L).to(tl.uint32)
    elif side.bits == 6:
        high_L = (code_L + side.dim // 2).to(tl.pointer_type(tl.uint16))
        high_LW = load_rows(high_L, side.dim // 8, WIDTH, is_read_L).to(tl.uint32)
    unit_LE = high_LW
    if side.unit is not None:
        unit_LE = side.unit(extra_of(side, block_L, offset_L, head, is_read_L))
    return word_LW, high_LW, unit_LE


@triton.jit
def _numbers(side: KVSide, x_LC: tl.tensor, unit_LE: tl.tensor) -> tl.tensor:
    if side.offset != 0:
        x_LC = x_LC - side.offset
    if side.factor != 1:
        x_LC = x_LC * side.factor
    if side.unit is not None:
        x_LC = x_LC * repeat(unit_LE, x_LC.shape[1] // unit_LE.shape[1])
    return x_LC


@triton.jit
def whole_tile(
    side: KVSide,
    block_L: tl.tensor,
    offset_L: tl.tensor,
    head: tl.tensor,
    is_read_L: tl.tensor,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """[L, N] in the order of the vector: float16 without `score_factor` where packed, else DTYPE; zeros where not `is_read_L`.

    For many queries, which are worth putting the numbers in order.
    """
    if side.is_packed:
        word_LW, high_LW, unit_LE = _words(side, block_L, offset_L, head, is_read_L)
        if side.num_parts == 8:  # number 4 h + j of a word is half h of pair j
            even = tl.join(side.pairs(word_LW, high_LW, 0), side.pairs(word_LW, high_LW, 1))
            odd = tl.join(side.pairs(word_LW, high_LW, 2), side.pairs(word_LW, high_LW, 3))
            pair = tl.permute(tl.join(even, odd), (0, 1, 3, 2))
        else:
            pair = tl.join(side.pairs(word_LW, high_LW, 0), side.pairs(word_LW, high_LW, 1))
        pair = tl.reshape(pair, [word_LW.shape[0], word_LW.shape[1], side.num_parts // 2])
        number = tl.permute(tl.join(low_half(pair), high_half(pair)), (0, 1, 3, 2))
        tile_LN = _numbers(side, tl.reshape(number, [word_LW.shape[0], side.width]), unit_LE)
    else:
        tile_LN = read_tile(side, block_L, offset_L, head, is_read_L).to(DTYPE)
    return tile_LN


@triton.jit
def load_whole_queries(row_M: tl.tensor, is_row_M: tl.tensor, side: KVSide, DTYPE: tl.constexpr) -> tl.tuple:
    """`load_queries` in the order of the vector: ([M, N], factors)."""
    n_N = tl.arange(0, side.width)
    x_MN = tl.load(row_M[:, None] + n_N[None, :], mask=is_row_M[:, None] & (n_N < side.dim)[None, :], other=0.0)
    small_M, factor_M = _power_of_two(tl.max(tl.abs(x_MN.to(tl.float32)), 1), side.is_packed)
    return (x_MN.to(tl.float32) * small_M[:, None]).to(tl.float16 if side.is_packed else DTYPE), factor_M


@triton.jit
def _power_of_two(most_M: tl.tensor, IS_NEEDED: tl.constexpr) -> tl.tuple:
    """(What brings these magnitudes below 2, its inverse), or ones. Where there is no number, it makes none either."""
    small_M = tl.full(most_M.shape, 1.0, tl.float32)
    factor_M = small_M
    if IS_NEEDED:
        exponent_M = tl.minimum((most_M.to(tl.int32, bitcast=True) >> 23) & 255, 254)
        small_M = ((254 - exponent_M) << 23).to(tl.float32, bitcast=True)
        factor_M = (exponent_M << 23).to(tl.float32, bitcast=True)
    return small_M, factor_M
