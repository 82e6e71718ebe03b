"""Attention of requests with many queries: prompts and chunks of prompts, over what is cached of them and themselves.

A program takes a tile of one request's queries and one kv head, whose query heads are rows of the same products, and walks over
the context that the tile sees: first the tokens that are kept apart, then the tiles that all of its queries see, then those at
the borders. Tiles of the context begin at multiples of their length, so that what is added to what does not depend on chunks.

Shape letters: M rows (queries x heads of a kv head), L tokens of a tile, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.triton.decode import LOG2_E, Batch, Kind, exponents, request_of, softmax_step
from halfbyte.kernels.triton.kv_parts import load_whole_queries, score_factor, whole_tile
from halfbyte.kernels.triton.sides import KVSide
from halfbyte.kernels.triton.vectors import Vectors


@triton.jit(do_not_specialize=["num_requests"])
def attend_prompts(
    queries: Vectors,
    out: Vectors,
    batch: Batch,
    k: KVSide,
    v: KVSide,
    k_first: KVSide,
    v_first: KVSide,
    sinks: tl.tensor,
    scale: tl.tensor,
    num_requests: tl.tensor,
    kind: Kind,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Grid: (at least all tiles of queries, kv heads). The last tiles, which see most, come first."""
    item, head = tl.load(batch.tiles + num_requests) - 1 - tl.program_id(0), tl.program_id(1)
    if item >= 0:
        request = request_of(batch.tiles, item, num_requests)
        first_row = tl.load(batch.query_start_loc + request)
        num_queries = tl.load(batch.query_start_loc + request + 1) - first_row
        length = tl.load(batch.seq_lens + request)
        first_query = (item - tl.load(batch.tiles + request)) * kind.tile_queries
        row_M = tl.arange(0, ROWS)
        query_M, head_M = first_query + row_M // kind.heads, head * kind.heads + row_M % kind.heads
        is_row_M = (row_M < kind.tile_queries * kind.heads) & (query_M < num_queries)
        token_M = (first_row + query_M).to(tl.int64)
        at_M = queries.data + token_M * queries.token_stride + head_M * queries.head_stride
        least = length - num_queries + first_query  # the first query's position
        position_M = least + row_M // kind.heads
        end = tl.minimum(least + kind.tile_queries, length)
        begin = tl.maximum(least - kind.window + 1, 0) if kind.window > 0 else 0
        table = batch.block_table + tl.cast(request, tl.int64) * batch.table_stride

        sums_MD = tl.zeros([ROWS, v.width], tl.float32)
        total_M = tl.zeros([ROWS], tl.float32)
        most_M = tl.full([ROWS], float("-inf"), tl.float32)
        if HAS_SINKS:
            most_M = tl.load(sinks + head_M, mask=is_row_M, other=0.0) * LOG2_E
            total_M += 1.0
        if kind.first > 0:
            q_MD, factor_M = load_whole_queries(at_M, is_row_M, k_first, kind.dtype)
            sums_MD, total_M, most_M = _span(
                sums_MD, total_M, most_M, q_MD, factor_M * scale, position_M, begin, tl.minimum(kind.first, end),
                begin // 16 * 16, tl.minimum(kind.first, end), table, head, k_first, v_first, kind,
                kind.first_block_size, 16, 1, True)  # fmt: skip
            begin = tl.maximum(begin, kind.first)
            table += kind.first // kind.first_block_size - kind.first // kind.block_size
        out_factor = score_factor(v, head)
        sums_MD *= 1.0 / out_factor
        q_MD, factor_M = load_whole_queries(at_M, is_row_M, k, kind.dtype)
        factor_M *= scale * score_factor(k, head)
        # Tiles between `inner` and `border` are seen whole by all queries.
        inner, border = begin // TILE * TILE, tl.maximum(least // TILE * TILE, begin // TILE * TILE)
        if kind.window > 0 or kind.first > 0:
            inner = tl.minimum(tl.cdiv(tl.maximum(begin, end - kind.window if kind.window > 0 else 0), TILE) * TILE, border)
            sums_MD, total_M, most_M = _span(
                sums_MD, total_M, most_M, q_MD, factor_M, position_M, begin, end, begin // TILE * TILE, inner,
                table, head, k, v, kind, kind.block_size, TILE, STAGES, True)  # fmt: skip
        sums_MD, total_M, most_M = _span(
            sums_MD, total_M, most_M, q_MD, factor_M, position_M, begin, end, inner, border,
            table, head, k, v, kind, kind.block_size, TILE, STAGES, False)  # fmt: skip
        sums_MD, total_M, most_M = _span(
            sums_MD, total_M, most_M, q_MD, factor_M, position_M, begin, end, border, end,
            table, head, k, v, kind, kind.block_size, TILE, STAGES, True)  # fmt: skip
        out_MD = sums_MD * (out_factor / tl.where(is_row_M, total_M, 1.0))[:, None]
        n_D = tl.arange(0, v.width)
        out_M = out.data + token_M * out.token_stride + head_M * out.head_stride
        is_number_MD = is_row_M[:, None] & (n_D < v.dim)[None, :]
        tl.store(out_M[:, None] + n_D[None, :], out_MD.to(out.data.dtype.element_ty), mask=is_number_MD)


@triton.jit
def _span(
    sums_MD: tl.tensor,
    total_M: tl.tensor,
    most_M: tl.tensor,
    q_MD: tl.tensor,
    factor_M: tl.tensor,
    position_M: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    table: tl.tensor,
    head: tl.tensor,
    k: KVSide,
    v: KVSide,
    kind: Kind,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tl.tuple:
    """The tiles from `start` to `stop`, of whose tokens [begin, end) exist. IS_MASKED: not all queries see all of them."""
    for first in tl.range(start, stop, TILE, num_stages=STAGES):
        token_L = first + tl.arange(0, TILE)
        is_read_L = (token_L >= begin) & (token_L < end)
        block_L = tl.load(table + token_L // BLOCK_SIZE, mask=is_read_L, other=0).to(tl.int64)
        key_LD = whole_tile(k, block_L, token_L % BLOCK_SIZE, head, is_read_L, kind.dtype)
        score_ML = tl.dot(q_MD, tl.trans(key_LD), input_precision="ieee")
        score_ML = exponents(score_ML * factor_M[:, None], kind.soft_cap)
        if IS_MASKED:
            is_seen_ML = is_read_L[None, :] & (token_L[None, :] <= position_M[:, None])
            if kind.window > 0:
                is_seen_ML &= token_L[None, :] > position_M[:, None] - kind.window
            score_ML = tl.where(is_seen_ML, score_ML, float("-inf"))
        weight_ML, keep_M, most_M = softmax_step(score_ML, most_M)
        total_M = total_M * keep_M + tl.sum(weight_ML, 1)
        value_LD = whole_tile(v, block_L, token_L % BLOCK_SIZE, head, is_read_L, kind.dtype)
        sums_MD = tl.dot(weight_ML.to(value_LD.dtype), value_LD, sums_MD * keep_M[:, None], input_precision="ieee")
    return sums_MD, total_M, most_M
