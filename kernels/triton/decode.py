"""Attention of requests with few queries each (decoding, drafts), split over the context, as two kernels in any KV format.

The context is cut at multiples of `part_tokens`, so that what is added to what depends on nothing but the request itself.
`plan_batch` counts each request's parts on the device; the programs of `attend_parts` take (part, kv head) after (part, kv
head) from that list, whatever the batch looks like, which makes one launch fit every batch (and a device graph). `merge_parts`
adds the parts of a query up. All heads of a kv head are the rows of one product.

Shape letters: R requests, M rows of a tile (queries x heads of a kv head), L tokens of a tile, C columns of a part, D head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.triton.kv_parts import add_values, load_queries, no_sums, score, score_factor
from halfbyte.kernels.triton.sides import KVSide
from halfbyte.kernels.triton.vectors import Vectors

LOG2_E = tl.constexpr(1.4426950408889634)


class Batch(NamedTuple):
    """A step's requests as the kernels see them.

    parts, tiles: int32 [R + 1], how many parts of contexts (of those that are decoded) and tiles of queries (of all others) come
    before each request's; `plan_batch` counts them.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    table_stride: int
    parts: Tensor
    tiles: Tensor


class Found(NamedTuple):
    """What came of each part: float32 [parts, G, queries x heads, D] sums, and [parts, G, queries x heads] the greatest score
    (as an exponent of two) and the sum of the weights."""

    sums: Tensor
    most: Tensor
    totals: Tensor


class Kind(NamedTuple):
    """What is constant for a layer: a kernel is compiled for it.

    heads: query heads per kv head. max_queries: of a request that is decoded; tile_queries: of a tile of others. window,
    soft_cap: 0 for none. block_size: of the blocks; the first so many tokens lie in blocks of first_block_size, whose entries
    come first in the table.
    """

    heads: Any
    max_queries: Any
    tile_queries: Any
    part_tokens: Any
    window: Any
    soft_cap: Any
    block_size: Any
    first: Any
    first_block_size: Any
    dtype: Any


@triton.jit
def bounds(batch: Batch, request: tl.tensor, is_request: tl.tensor, kind: Kind) -> tl.tuple:
    """Of a request or several: its number of queries, its length, and the first token that a query of it sees.

    A request with more queries than are decoded, or none, has an empty context here.
    """
    starts = batch.query_start_loc + request
    num_queries = tl.load(starts + 1, mask=is_request, other=0) - tl.load(starts, mask=is_request, other=0)
    length = tl.load(batch.seq_lens + request, mask=is_request, other=0)
    length = tl.where((num_queries > 0) & (num_queries <= kind.max_queries), length, 0)
    begin = length * 0
    if kind.window > 0:
        begin = tl.maximum(length - num_queries - kind.window + 1, 0)
    return num_queries, length, begin


@triton.jit
def _num_main_parts(length: tl.tensor, begin: tl.tensor, kind: Kind) -> tl.tensor:
    """The parts that hold tokens of [begin, length) after the first ones."""
    begin = tl.maximum(begin, kind.first)
    return tl.where(length > begin, tl.cdiv(length, kind.part_tokens) - begin // kind.part_tokens, 0)


@triton.jit(do_not_specialize=["num_requests"])
def plan_batch(batch: Batch, num_requests: tl.tensor, kind: Kind, ROWS: tl.constexpr) -> None:
    """Fills `batch.parts` and `batch.tiles`. Grid: 1. ROWS: a power of two, at least the number of requests."""
    row = tl.arange(0, ROWS)
    is_request = row < num_requests
    num_queries, length, begin = bounds(batch, row, is_request, kind)
    num_parts = _num_main_parts(length, begin, kind)
    if kind.first > 0:
        num_parts += ((length > 0) & (begin < kind.first)).to(tl.int32)
    num_tiles = tl.where(num_queries > kind.max_queries, tl.cdiv(num_queries, kind.tile_queries), 0)
    tl.store(batch.parts + 1 + row, tl.cumsum(num_parts, 0), mask=is_request)
    tl.store(batch.tiles + 1 + row, tl.cumsum(num_tiles, 0), mask=is_request)
    tl.store(batch.parts, 0)
    tl.store(batch.tiles, 0)


@triton.jit
def request_of(starts: tl.tensor, item: tl.tensor, num_requests: tl.tensor) -> tl.tensor:
    """The request r with starts[r] <= item < starts[r + 1]."""
    low = item * 0  # a number of the device, as what it becomes
    high = low + num_requests - 1
    while low < high:
        middle = (low + high) // 2
        is_later = tl.load(starts + middle + 1) <= item
        low = tl.where(is_later, middle + 1, low)
        high = tl.where(is_later, high, middle)
    return low


@triton.jit(do_not_specialize=["num_requests"])
def attend_parts(
    queries: Vectors,
    batch: Batch,
    k: KVSide,
    v: KVSide,
    k_first: KVSide,
    v_first: KVSide,
    found: Found,
    scale: tl.tensor,
    num_requests: tl.tensor,
    num_kv_heads: tl.constexpr,
    kind: Kind,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Grid: any number of programs. Fills `found`, by part, kv head and row."""
    num_items = tl.load(batch.parts + num_requests) * num_kv_heads
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        slot, head = item // num_kv_heads, item % num_kv_heads
        request = request_of(batch.parts, slot, num_requests)
        num_queries, length, begin = bounds(batch, request, True, kind)
        part = slot - tl.load(batch.parts + request)
        row_M = tl.arange(0, ROWS)
        query_M = row_M // kind.heads
        token_M = (tl.load(batch.query_start_loc + request) + query_M).to(tl.int64)
        at_M = queries.data + token_M * queries.token_stride + (head * kind.heads + row_M % kind.heads) * queries.head_stride
        is_row_M = query_M < num_queries
        position_M = tl.where(is_row_M, length - num_queries + query_M, -1)
        table = batch.block_table + tl.cast(request, tl.int64) * batch.table_stride
        place_M = (tl.cast(slot, tl.int64) * num_kv_heads + head) * (kind.heads * kind.max_queries) + row_M
        is_first = False
        if kind.first > 0:
            has_first = begin < kind.first
            is_first = has_first & (part == 0)
            part -= has_first.to(tl.int32)
        if is_first:
            _attend(
                at_M, is_row_M, position_M, begin, tl.minimum(length, kind.first), begin * 0, table, head, scale,
                found, place_M, k_first, v_first, kind, kind.first_block_size, 16, 1)  # fmt: skip
        else:
            begin = tl.maximum(begin, kind.first)
            start = (begin // kind.part_tokens + part) * kind.part_tokens
            end = tl.minimum(start + kind.part_tokens, length)
            table += kind.first // kind.first_block_size - kind.first // kind.block_size
            start = tl.maximum(start, begin // TILE * TILE)
            _attend(
                at_M, is_row_M, position_M, begin, end, start, table, head, scale,
                found, place_M, k, v, kind, kind.block_size, TILE, STAGES)  # fmt: skip


@triton.jit
def _attend(
    at_M: tl.tensor,
    is_row_M: tl.tensor,
    position_M: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    start: tl.tensor,
    table: tl.tensor,
    head: tl.tensor,
    scale: tl.tensor,
    found: Found,
    place_M: tl.tensor,
    k: KVSide,
    v: KVSide,
    kind: Kind,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """The tokens [begin, end), tile by tile from `start` on, whose blocks `table` lists; fills the rows `place_M` of `found`."""
    queries, factor_M = load_queries(at_M, is_row_M, k, kind.dtype)
    factor_M *= scale * score_factor(k, head)
    sums = no_sums(v, at_M.shape[0])
    most_M = tl.full(at_M.shape, float("-inf"), tl.float32)
    total_M = tl.zeros(at_M.shape, tl.float32)
    for first in tl.range(start, end, TILE, num_stages=STAGES):
        token_L = first + tl.arange(0, TILE)
        is_read_L = (token_L >= begin) & (token_L < end)
        block_L = tl.load(table + token_L // BLOCK_SIZE, mask=is_read_L, other=0).to(tl.int64)
        score_ML = score(queries, k, block_L, token_L % BLOCK_SIZE, head, is_read_L)
        is_seen_ML = is_read_L[None, :] & (token_L[None, :] <= position_M[:, None])
        if kind.window > 0:
            is_seen_ML &= token_L[None, :] > position_M[:, None] - kind.window
        score_ML = exponents(score_ML * factor_M[:, None], kind.soft_cap)
        score_ML = tl.where(is_seen_ML, score_ML, float("-inf"))
        weight_ML, keep_M, most_M = softmax_step(score_ML, most_M)
        total_M = total_M * keep_M + tl.sum(weight_ML, 1)
        sums = add_values(sums, keep_M, weight_ML, v, block_L, token_L % BLOCK_SIZE, head, is_read_L, kind.dtype)
    out_factor = score_factor(v, head)
    for part in tl.static_range(v.num_parts):
        n_C = v.num_parts * tl.arange(0, v.width // v.num_parts) + part
        is_number_MC = is_row_M[:, None] & (n_C < v.dim)[None, :]
        tl.store(found.sums + place_M[:, None] * v.dim + n_C[None, :], sums[part] * out_factor, mask=is_number_MC)
    tl.store(found.most + place_M, most_M, mask=is_row_M)
    tl.store(found.totals + place_M, total_M, mask=is_row_M)


@triton.jit
def exponents(score_ML: tl.tensor, SOFT_CAP: tl.constexpr) -> tl.tensor:
    """Scores, capped, as exponents of two. tanh(x) = 1 - 2 / (e^2x + 1)."""
    if SOFT_CAP > 0:
        score_ML = SOFT_CAP - 2 * SOFT_CAP / (tl.exp2(score_ML * (2 * LOG2_E / SOFT_CAP)) + 1)
    return score_ML * LOG2_E


@triton.jit
def softmax_step(score_ML: tl.tensor, most_M: tl.tensor) -> tl.tuple:
    """(weights, what earlier sums are to be multiplied with, the greatest score). A row that has seen nothing gets zeros."""
    now_M = tl.maximum(most_M, tl.max(score_ML, 1))
    base_M = tl.where(now_M == float("-inf"), 0.0, now_M)
    return tl.exp2(score_ML - base_M[:, None]), tl.exp2(most_M - base_M), now_M


@triton.jit(do_not_specialize=["num_requests"])
def merge_parts(
    out: Vectors,
    batch: Batch,
    found: Found,
    sinks: tl.tensor,
    num_requests: tl.tensor,
    num_kv_heads: tl.constexpr,
    kind: Kind,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Grid: (requests, kv heads)."""
    request, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(batch.parts + request), tl.load(batch.parts + request + 1)
    if start < end:
        num_queries, length, begin = bounds(batch, request, True, kind)
        row_M = tl.arange(0, ROWS)
        query_M, head_M = row_M // kind.heads, head * kind.heads + row_M % kind.heads
        is_row_M = query_M < num_queries
        n_D = tl.arange(0, WIDTH)
        is_number_MD = is_row_M[:, None] & (n_D < DIM)[None, :]
        sums_MD = tl.zeros([ROWS, WIDTH], tl.float32)
        most_M = tl.full([ROWS], float("-inf"), tl.float32)
        total_M = tl.zeros([ROWS], tl.float32)
        if HAS_SINKS:
            most_M = tl.load(sinks + head_M, mask=is_row_M, other=0.0) * LOG2_E
            total_M += 1.0
        for slot in range(start, end):
            place_M = (tl.cast(slot, tl.int64) * num_kv_heads + head) * (kind.heads * kind.max_queries) + row_M
            part_M = tl.load(found.most + place_M, mask=is_row_M, other=0.0)
            now_M = tl.maximum(most_M, part_M)
            base_M = tl.where(now_M == float("-inf"), 0.0, now_M)
            keep_M, add_M = tl.exp2(most_M - base_M), tl.exp2(part_M - base_M)
            part_MD = tl.load(found.sums + place_M[:, None] * DIM + n_D[None, :], mask=is_number_MD, other=0.0)
            sums_MD = sums_MD * keep_M[:, None] + part_MD * add_M[:, None]
            total_M = total_M * keep_M + tl.load(found.totals + place_M, mask=is_row_M, other=0.0) * add_M
            most_M = now_M
        out_MD = sums_MD / tl.where(is_row_M, total_M, 1.0)[:, None]
        token_M = (tl.load(batch.query_start_loc + request) + query_M).to(tl.int64)
        at_M = out.data + token_M * out.token_stride + head_M * out.head_stride
        tl.store(at_M[:, None] + n_D[None, :], out_MD.to(out.data.dtype.element_ty), mask=is_number_MD)
