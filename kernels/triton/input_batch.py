"""Preparing a step in Triton: edits of rows, the tokens of a ragged batch, their places in the cache, block tables by row.

One launch each, whose shape follows from numbers of the host; all else is read from tensors, so that a graph can replay them.
Padding tokens belong to the last row, which is spare. The laws are PyTorch, in `model_runner.input_kernels`. Knows rows,
tables and KV groups; knows no requests. Called by the runner of a GPU.

Shape letters: R requests of the batch, T tokens of the step, N edits, V values, W entries of a table.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.triton.launch import Launch
from halfbyte.kvcache.spec import KVGroup

_COLUMNS = 1024  # of a row, of one program
_TOKENS = 256  # of a step, of one program


def clear_rows(rows: Tensor, row_N: Tensor, width: int) -> None:
    """Zero the first `width` columns of these rows (int64)."""
    if len(row_N) and width:
        clear_launch(rows, row_N, width).run()


def write_rows(rows: Tensor, edits_N4: Tensor, values_V: Tensor) -> None:
    """Apply edits (row, first column, how many, where in `values_V` they begin), int64, which do not overlap.

    The edits lie in the order of their values, which lie side by side.
    """
    if len(values_V):
        write_launch(rows, edits_N4, values_V).run()


def step_inputs(
    table_5R: Tensor,
    token_ids: Tensor,
    row_T: Tensor,
    positions_T: Tensor,
    token_ids_T: Tensor,
    query_start_loc: Tensor,
    seq_lens_R: Tensor,
) -> None:
    """Fill in the row, position and token of each of T tokens (int64), and query_start_loc [R + 1] and seq_lens_R (int32).

    table_5R: of each request its row, scheduled and computed tokens, first token of the step and the one after its last, int64;
    the last never falls. token_ids: int32 [rows, tokens]. Tokens after the last request's are padding: position 0 and token 0 of
    the last row.
    """
    step_launch(table_5R, token_ids, row_T, positions_T, token_ids_T, query_start_loc, seq_lens_R).run()


def slots(tables: Tensor, group: KVGroup, row_T: Tensor, positions_T: Tensor, slots_T: Tensor) -> None:
    """Where each token's K and V go, int64: block * block_size + offset; -1 for the group's first tokens and for padding."""
    slot_launch(tables, group, row_T, positions_T, slots_T).run()


def first_slots(tables: Tensor, group: KVGroup, row_T: Tensor, positions_T: Tensor, slots_T: Tensor) -> None:
    """The same for the first tokens, block * first_block_size + offset; -1 for all others and for padding."""
    first_slot_launch(tables, group, row_T, positions_T, slots_T).run()


def gather_tables(tables: Tensor, group: KVGroup, row_R: Tensor, seq_lens_R: Tensor, table_RW: Tensor) -> None:
    """Copy the rows' tables (int32) into a buffer, each as far as its sequence reaches; what lies beyond stays as it was."""
    gather_launch(tables, group, row_R, seq_lens_R, table_RW).run()


def clear_launch(rows: Tensor, row_N: Tensor, width: int) -> Launch:
    return Launch((len(row_N), triton.cdiv(width, _COLUMNS)), zero_columns, (rows, rows.stride(0), row_N, width, _COLUMNS))


def write_launch(rows: Tensor, edits_N4: Tensor, values_V: Tensor) -> Launch:
    assert rows.dtype == values_V.dtype and edits_N4.is_contiguous() and edits_N4.shape[1] == 4
    sizes = len(edits_N4), _greatest_step(len(edits_N4)), len(values_V), _COLUMNS
    arguments = (rows, rows.stride(0), edits_N4, values_V, *sizes)
    return Launch((triton.cdiv(len(values_V), _COLUMNS),), write_values, arguments)


def _greatest_step(num: int) -> int:
    """The greatest power of two up to `num`: an argument, because a constant would be compiled for each of them."""
    return 1 << (num.bit_length() - 1)


def step_launch(
    table_5R: Tensor,
    token_ids: Tensor,
    row_T: Tensor,
    positions_T: Tensor,
    token_ids_T: Tensor,
    query_start_loc: Tensor,
    seq_lens_R: Tensor,
) -> Launch:
    assert table_5R.is_contiguous() and table_5R.shape[0] == 5
    num_requests, num_tokens = table_5R.shape[1], len(row_T)
    outputs = row_T, positions_T, token_ids_T, query_start_loc, seq_lens_R
    sizes = len(token_ids), token_ids.stride(0), num_requests, _greatest_step(num_requests), num_tokens, _TOKENS
    grid = (triton.cdiv(max(num_tokens, num_requests + 1), _TOKENS),)
    return Launch(grid, fill_inputs, (table_5R, token_ids, *outputs, *sizes))


def slot_launch(tables: Tensor, group: KVGroup, row_T: Tensor, positions_T: Tensor, slots_T: Tensor) -> Launch:
    kind = group.block_size, group.entry_shift, group.first_tokens, False
    return _slot_launch(tables, row_T, positions_T, slots_T, *kind)


def first_slot_launch(tables: Tensor, group: KVGroup, row_T: Tensor, positions_T: Tensor, slots_T: Tensor) -> Launch:
    kind = group.first_block_size, 0, group.first_tokens, True
    return _slot_launch(tables, row_T, positions_T, slots_T, *kind)


def _slot_launch(
    tables: Tensor,
    row_T: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    block_size: int,
    entry_shift: int,
    first_tokens: int,
    takes_first: bool,
) -> Launch:
    kind = block_size, entry_shift, first_tokens, takes_first, _TOKENS
    arguments = (tables, len(tables) - 1, tables.stride(0), row_T, positions_T, slots_T, len(row_T), *kind)
    return Launch((triton.cdiv(len(row_T), _TOKENS),), fill_slots, arguments)


def gather_launch(tables: Tensor, group: KVGroup, row_R: Tensor, seq_lens_R: Tensor, table_RW: Tensor) -> Launch:
    width = min(tables.shape[1], table_RW.shape[1])
    kind = group.block_size, group.entry_shift, group.first_tokens, group.first_block_size, _COLUMNS
    arguments = (tables, tables.stride(0), row_R, seq_lens_R, table_RW, table_RW.stride(0), width, *kind)
    return Launch((len(row_R), triton.cdiv(width, _COLUMNS)), copy_entries, arguments)


@triton.jit(do_not_specialize=["width"])
def zero_columns(rows: tl.tensor, stride: tl.tensor, row_N: tl.tensor, width: tl.tensor, COLUMNS: tl.constexpr) -> None:
    """Grid: rows, parts of their columns."""
    row = tl.load(row_N + tl.program_id(0))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    zeros = tl.zeros([COLUMNS], rows.dtype.element_ty)
    tl.store(rows + row * stride + column, zeros, mask=column < width)


@triton.jit(do_not_specialize=["num_edits", "greatest_step", "num_values"])
def write_values(
    rows: tl.tensor,
    stride: tl.tensor,
    edits: tl.tensor,
    values: tl.tensor,
    num_edits: tl.tensor,
    greatest_step: tl.tensor,
    num_values: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Grid: parts of the values. An edit's values end where the next one's begin."""
    value = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_value = value < num_values
    edit = edits + 4 * (_count_up_to(edits + 3, 4, num_edits, value, greatest_step) - 1)
    place = tl.load(edit) * stride + tl.load(edit + 1) + value - tl.load(edit + 3)
    tl.store(rows + place, tl.load(values + value, mask=is_value), mask=is_value)


@triton.jit
def _count_up_to(rising: tl.tensor, stride: tl.tensor, num: tl.tensor, x: tl.tensor, step: tl.tensor) -> tl.tensor:
    """How many of `num` rising numbers are at most x, by halving; step: the greatest power of two up to `num`."""
    count = tl.zeros(x.shape, tl.int64)
    while step > 0:
        more = count + step
        is_inside = more <= num
        number = tl.load(rising + (more - 1) * stride, mask=is_inside, other=0)
        count = tl.where(is_inside & (number <= x), more, count)
        step = step // 2
    return count


@triton.jit(do_not_specialize=["num_requests", "greatest_step", "num_tokens"])
def fill_inputs(
    table: tl.tensor,
    token_ids: tl.tensor,
    row_T: tl.tensor,
    positions_T: tl.tensor,
    token_ids_T: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens_R: tl.tensor,
    num_rows: tl.tensor,
    token_stride: tl.tensor,
    num_requests: tl.tensor,
    greatest_step: tl.tensor,
    num_tokens: tl.tensor,
    TOKENS: tl.constexpr,
) -> None:
    """Grid: as many numbers at a time of the tokens, and of the requests."""
    i = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    scheduled, computed = table + num_requests, table + 2 * num_requests
    first, end = table + 3 * num_requests, table + 4 * num_requests

    is_request = i < num_requests
    seq_len = tl.load(computed + i, mask=is_request, other=0) + tl.load(scheduled + i, mask=is_request, other=0)
    tl.store(seq_lens_R + i, seq_len.to(tl.int32), mask=is_request)
    tl.store(query_start_loc + 1 + i, tl.load(end + i, mask=is_request, other=0).to(tl.int32), mask=is_request)
    tl.store(query_start_loc + i, tl.load(first + i, mask=i == 0, other=0).to(tl.int32), mask=i == 0)

    request = _count_up_to(end, 1, num_requests, i, greatest_step)
    is_token = (i < num_tokens) & (request < num_requests)
    row = tl.load(table + request, mask=is_token, other=0)
    shift = tl.load(computed + request, mask=is_token, other=0) - tl.load(first + request, mask=is_token, other=0)
    position = tl.where(is_token, i + shift, 0)
    token = tl.load(token_ids + row * token_stride + position, mask=is_token, other=0)
    tl.store(row_T + i, tl.where(is_token, row, num_rows - 1), mask=i < num_tokens)
    tl.store(positions_T + i, position, mask=i < num_tokens)
    tl.store(token_ids_T + i, token.to(tl.int64), mask=i < num_tokens)


@triton.jit(do_not_specialize=["num_tokens"])
def fill_slots(
    tables: tl.tensor,
    spare_row: tl.tensor,
    stride: tl.tensor,
    row_T: tl.tensor,
    positions_T: tl.tensor,
    slots_T: tl.tensor,
    num_tokens: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    ENTRY_SHIFT: tl.constexpr,
    FIRST_TOKENS: tl.constexpr,
    TAKES_FIRST: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Grid: parts of the tokens."""
    i = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = i < num_tokens
    row = tl.load(row_T + i, mask=is_token, other=0)
    position = tl.load(positions_T + i, mask=is_token, other=0)
    is_first = position < FIRST_TOKENS
    is_kept = is_token & (row != spare_row) & (is_first if TAKES_FIRST else is_first == 0)
    block = position // BLOCK_SIZE
    block_id = tl.load(tables + row * stride + block + ENTRY_SHIFT, mask=is_kept, other=0).to(tl.int64)
    slot = (block_id - block) * BLOCK_SIZE + position
    tl.store(slots_T + i, tl.where(is_kept, slot, -1), mask=is_token)


@triton.jit
def copy_entries(
    tables: tl.tensor,
    stride: tl.tensor,
    row_R: tl.tensor,
    seq_lens_R: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    width: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    ENTRY_SHIFT: tl.constexpr,
    FIRST_TOKENS: tl.constexpr,
    FIRST_BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Grid: requests, parts of their tables."""
    r = tl.program_id(0)
    last = tl.load(seq_lens_R + r) - 1
    last_entry = tl.where(last < FIRST_TOKENS, last // FIRST_BLOCK_SIZE, last // BLOCK_SIZE + ENTRY_SHIFT)
    num_entries = tl.where(last < 0, 0, last_entry + 1)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_entry = column < tl.minimum(num_entries, width)
    entry = tl.load(tables + tl.load(row_R + r) * stride + column, mask=is_entry)
    tl.store(out + r.to(tl.int64) * out_stride + column, entry, mask=is_entry)
