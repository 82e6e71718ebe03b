"""Rows, block tables and ragged batches by themselves: staged writes against a plain dictionary, batches against a plain loop.

Shape letters: R rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.kvcache.spec import KVCacheSpec, make_layout
from halfbyte.model_runner.block_tables import BlockTables
from halfbyte.model_runner.device import HOST
from halfbyte.model_runner.input_batch import attention_metadata, make_batch
from halfbyte.model_runner.input_kernels import TORCH_INPUTS, StepInputs
from halfbyte.model_runner.request_rows import RequestRows
from halfbyte.model_runner.staged_writes import StagedRows
from halfbyte.types import NewRow, SamplingParams

BLOCK_SIZE = 4
VOCAB = 50
# Every option that a row can hold.
HEAVY = SamplingParams(
    temperature=1.5,
    seed=5,
    top_k=2,
    top_p=0.5,
    min_p=0.1,
    repetition_penalty=3.0,
    presence_penalty=2.0,
    frequency_penalty=1.0,
    logit_bias={1: 100.0},
    allowed_token_ids=[1, 2],
    min_tokens=3,
    logprobs=3,
    prompt_logprobs=1,
)


LAYOUT = make_layout([KVCacheSpec(1, 8, 8, BLOCK_SIZE, window, "float32") for window in (None, 6)], lambda spec: 64)


def two_groups() -> BlockTables:
    return BlockTables(LAYOUT, 6, 64, HOST)


def new_row(name: str, tokens: list[int], computed: int = 0, params: SamplingParams | None = None) -> NewRow:
    return NewRow(name, tokens, len(tokens), computed, [[], []], params or SamplingParams(seed=0), frozenset({7}), [[1, 2], [3]])


edits = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 3), st.integers(0, 5), st.lists(st.integers(1, 9), max_size=3)),
    st.tuples(st.just("clear"), st.integers(0, 3), st.just(0), st.just([])),
    st.tuples(st.just("apply"), st.just(0), st.just(0), st.just([])),
)


@settings(deadline=None)
@given(st.lists(edits, max_size=30))
def test_staged_writes_equal_writes_at_once(script: list[tuple[str, int, int, list[int]]]) -> None:
    """Edits of one row come in the order clear, then writes that do not overlap, as rows make them."""
    staged, plain = StagedRows(4, 8, torch.int32, HOST), np.zeros((4, 8), dtype=np.int32)
    dirty: set[tuple[int, int]] = set()
    for kind, row, start, values in script:
        cells = {(row, start + i) for i in range(len(values))}
        if kind == "apply":
            staged.apply()
            dirty.clear()
            assert staged.tensor.tolist() == [*plain.tolist(), [0] * 8]
        elif kind == "clear":
            staged.clear(row, 8)
            plain[row] = 0
            dirty = {cell for cell in dirty if cell[0] != row}
        elif not cells & dirty:
            staged.write(row, start, values)
            plain[row, start : start + len(values)] = values
            dirty |= cells
    staged.apply()
    assert staged.tensor.tolist() == [*plain.tolist(), [0] * 8]


def table_of(tables: BlockTables, group: int, rows: Iterable[int], max_seq_len: int) -> torch.Tensor:
    row_R = torch.tensor(list(rows))
    return tables.gather(group, StepInputs(row_R, *[row_R] * 5, is_padded=False), max_seq_len)


def test_a_step_writes_once_however_many_rows_change(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, tables, writes = RequestRows(6, 64, VOCAB, HOST), two_groups(), []
    for i in range(5):
        tables.append(rows.add(new_row(str(i), [1] * (3 + i))), [[i + 1, i + 2], [20 + i, 30 + i]])
    plain = torch.Tensor.__setitem__

    def count(tensor: torch.Tensor, index: object, value: object) -> None:
        writes.append(tuple(tensor.shape))
        plain(tensor, index, value)

    monkeypatch.setattr(torch.Tensor, "__setitem__", count)
    rows.apply()
    tables.apply()
    assert len(writes) == 5  # tokens, numbers, integers, and one table per group
    rows.apply()
    tables.apply()
    assert len(writes) == 5


def test_a_request_keeps_its_row_and_gets_a_free_one_only() -> None:
    rows = RequestRows(3, 16, VOCAB, HOST)
    a, b, c = (rows.add(new_row(name, [1, 2])) for name in "abc")
    assert len({a, b, c}) == 3
    assert rows.release("b") == b and rows.release("b") is None
    assert rows.add(new_row("d", [3])) == b
    assert rows.index(["d", "a", "c"]).tolist() == [b, a, c] and len(rows) == 3


def test_a_released_row_is_blank_on_host_and_device() -> None:
    rows, tables = RequestRows(2, 16, VOCAB, HOST), two_groups()
    row = rows.add(new_row("a", list(range(1, 14)), 3, HEAVY))
    tables.append(row, [[4, 5, 6, 7], [8, 9, 10, 11]])
    rows.apply()
    tables.apply()
    rows.append(np.array([row]), torch.tensor([9]))
    assert rows.token_ids[row, :15].tolist() == [*range(1, 14), 9, 0] and rows.num_tokens[row] == 14
    assert rows.sampling.edits[row] is not None
    rows.release("a")
    tables.clear(row)
    rows.apply()
    tables.apply()
    assert not rows.token_ids.any() and rows.requests == [None, None]
    assert not (rows.num_tokens.any() or rows.num_prompt_tokens.any() or rows.num_computed_tokens.any())
    sampling, index = rows.sampling, torch.tensor([row])
    assert sampling.edits == [None, None]
    assert not (sampling.is_greedy.any() or sampling.is_filtered.any() or sampling.is_bounded.any())
    numbers = sampling.gather(index)
    assert not any(getattr(numbers, name).any() for name in numbers.__slots__)
    for group in range(2):
        assert not table_of(tables, group, range(7), 64).any()


def test_a_row_released_before_it_was_applied_leaves_nothing() -> None:
    """As when a step fails between the bookkeeping and the device."""
    rows, tables = RequestRows(1, 16, VOCAB, HOST), two_groups()
    tables.append(rows.add(new_row("a", [9] * 12, 0, HEAVY)), [[4, 5, 6], [8, 9, 10]])
    tables.clear(rows.release("a") or 0)
    tables.append(rows.add(new_row("b", [1, 2])), [[1], [2]])
    rows.apply()
    tables.apply()
    assert rows.token_ids[0].tolist() == [1, 2] + [0] * 14
    assert [table_of(tables, g, [0], 16).tolist() for g in range(2)] == [[[1, 0, 0, 0]], [[2, 0, 0, 0]]]


def test_a_full_row_takes_no_more_tokens() -> None:
    rows = RequestRows(2, 4, VOCAB, HOST)
    full, free = rows.add(new_row("full", [1, 2, 3, 4])), rows.add(new_row("free", [1]))
    rows.apply()
    rows.append(np.array([full, free]), torch.tensor([8, 9]))
    assert rows.token_ids[[full, free]].tolist() == [[1, 2, 3, 4], [1, 9, 0, 0]]
    assert rows.num_tokens[[full, free]].tolist() == [4, 2]


requests = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 19), st.integers(1, 20)), min_size=1, max_size=6)


@settings(deadline=None)
@given(requests, st.randoms(use_true_random=False))
def test_ragged_batches_equal_a_loop(shape: list[tuple[int, int, int]], random: object) -> None:
    """shape: (known tokens, computed, scheduled) per request, cut to what is possible."""
    rows, tables, held, counts = RequestRows(6, 64, VOCAB, HOST), two_groups(), {}, {}
    next_block = 1
    for i, (known, computed, scheduled) in enumerate(shape):
        computed = min(computed, known - 1)
        scheduled = min(scheduled, known - computed)
        tokens = [(7 * i + 3 * j) % VOCAB for j in range(known)]
        num_blocks = -(-(computed + scheduled) // BLOCK_SIZE)
        blocks = [[next_block + g * num_blocks + j for j in range(num_blocks)] for g in range(2)]
        next_block += 2 * num_blocks
        tables.append(rows.add(new_row(str(i), tokens, computed)), blocks)
        held[str(i)], counts[str(i)] = (tokens, computed, blocks), scheduled
    rows.apply()
    tables.apply()
    order = list(counts)
    random.shuffle(order)  # type: ignore[attr-defined]
    batch = make_batch(rows, {name: counts[name] for name in order})
    inputs = TORCH_INPUTS.step_inputs(torch.from_numpy(batch.table()), rows.token_ids, batch.counts.num_tokens, is_padded=False)

    token_ids, positions, starts = [], [], [0]
    for name in order:
        tokens, computed, _ = held[name]
        token_ids += tokens[computed : computed + counts[name]]
        positions += range(computed, computed + counts[name])
        starts.append(len(token_ids))
    assert inputs.token_ids_T.tolist() == token_ids and inputs.positions_T.tolist() == positions
    assert batch.first_R.tolist() == starts[:-1] and batch.last_R.tolist() == [s - 1 for s in starts[1:]]
    assert batch.samples_R.tolist() == [held[n][1] + counts[n] == len(held[n][0]) for n in order]

    for group in range(2):
        metadata = attention_metadata(batch.counts, inputs, tables, group, LAYOUT.groups[group])
        slots = [
            held[name][2][group][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for name in order
            for p in range(held[name][1], held[name][1] + counts[name])
        ]
        seq_lens = [held[name][1] + counts[name] for name in order]
        width = -(-max(seq_lens) // BLOCK_SIZE)
        assert metadata.slot_mapping.tolist() == slots and metadata.slot_mapping.dtype == torch.int64
        assert metadata.query_start_loc.tolist() == starts and metadata.query_start_loc.dtype == torch.int32
        assert metadata.seq_lens.tolist() == metadata.seq_lens_host == seq_lens
        assert metadata.query_lens_host == [counts[name] for name in order]
        assert metadata.block_table.tolist() == [held[n][2][group] + [0] * (width - len(held[n][2][group])) for n in order]
        assert (metadata.max_query_len, metadata.max_seq_len) == (max(counts.values()), max(seq_lens))
        assert metadata.num_decodes == list(counts.values()).count(1)
