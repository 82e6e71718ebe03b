"""The kernels that prepare a step against their laws, in the interpreter: whole numbers, so equal everywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfbyte.kvcache.spec import KVGroup
from halfbyte.model_runner.input_kernels import TORCH_INPUTS, StepInputs
from tests.kernels.triton_interpreter import interpreted

(kernels,) = interpreted("halfbyte.kernels.triton.input_batch")

NUM_ROWS, MAX_LEN = 40, 96
SPARE = NUM_ROWS  # the last of NUM_ROWS + 1
PLAIN = KVGroup((0,), None, 16)
FIRST = KVGroup((0,), None, 16, first_tokens=8, first_block_size=4)
ODD = KVGroup((0,), 64, 5)
every_group = pytest.mark.parametrize("group", [PLAIN, FIRST, ODD], ids=lambda group: f"S{group.block_size}F{group.first_tokens}")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_rows(width: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Numbers everywhere but in the spare row."""
    rows = torch.randint(1, 1000, (NUM_ROWS + 1, width), generator=seeded(0)).to(dtype)
    rows[SPARE] = 0
    return rows


def make_table(scheduled: list[int], num_padding: int = 0) -> Tensor:
    """A batch of such requests in rows of no order, and requests of the spare row behind them."""
    scheduled_R = torch.tensor([*scheduled, *[0] * num_padding])
    row_R = torch.randperm(NUM_ROWS, generator=seeded(1))[: len(scheduled)]
    row_R = torch.cat((row_R, torch.full((num_padding,), SPARE)))
    computed_R = torch.randint(0, MAX_LEN - max(scheduled), (len(scheduled_R),), generator=seeded(2))
    computed_R[len(scheduled) :] = 0
    end_R = scheduled_R.cumsum(0)
    return torch.stack((row_R, scheduled_R, computed_R, end_R - scheduled_R, end_R))


def run_step(table_5R: Tensor, token_ids: Tensor, num_tokens: int) -> StepInputs:
    """Into buffers that hold something else before."""
    num_requests = table_5R.shape[1]
    per_token = [torch.full((num_tokens,), -7) for _ in range(3)]
    starts = torch.full((num_requests + 1,), -7, dtype=torch.int32)
    lens = torch.full((num_requests,), -7, dtype=torch.int32)
    kernels.step_inputs(table_5R, token_ids, *per_token, starts, lens)
    return StepInputs(table_5R[0], starts, lens, *per_token, is_padded=True)


def assert_equal(found: StepInputs, want: StepInputs) -> None:
    for name in ("query_start_loc", "seq_lens_R", "row_T", "positions_T", "token_ids_T"):
        a, b = getattr(found, name), getattr(want, name)
        assert a.dtype == b.dtype and torch.equal(a, b), name


@pytest.mark.parametrize(
    "scheduled", [[1], [7], [1, 1, 1], [1, 30, 1, 5, 90], [90] * 7, [1] * 37], ids=lambda s: f"R{len(s)}T{sum(s)}"
)
def test_a_batch_is_the_laws(scheduled: list[int]) -> None:
    token_ids, table_5R = make_rows(MAX_LEN), make_table(scheduled)
    want = TORCH_INPUTS.step_inputs(table_5R, token_ids, sum(scheduled), is_padded=False)
    assert_equal(run_step(table_5R, token_ids, sum(scheduled)), want)


@pytest.mark.parametrize(("scheduled", "num_requests", "num_tokens"), [([1, 1, 1], 4, 4), ([1, 30, 1], 8, 64), ([5], 1, 300)])
def test_padding_belongs_to_the_spare_row(scheduled: list[int], num_requests: int, num_tokens: int) -> None:
    token_ids, table_5R = make_rows(MAX_LEN), make_table(scheduled, num_requests - len(scheduled))
    found = run_step(table_5R, token_ids, num_tokens)
    assert_equal(found, TORCH_INPUTS.step_inputs(table_5R, token_ids, num_tokens, is_padded=True))
    padding = slice(sum(scheduled), None)
    assert (found.row_T[padding] == SPARE).all()
    assert not found.positions_T[padding].any() and not found.token_ids_T[padding].any()
    assert not found.seq_lens_R[len(scheduled) :].any()


def test_a_batch_of_padding_alone() -> None:
    table_5R = torch.tensor([[SPARE] * 3, [0] * 3, [0] * 3, [0] * 3, [0] * 3])
    found = run_step(table_5R, make_rows(MAX_LEN), 3)
    assert found.row_T.tolist() == [SPARE] * 3 and not found.query_start_loc.any()


def test_requests_without_tokens_between_others() -> None:
    token_ids, table_5R = make_rows(MAX_LEN), make_table([3, 0, 0, 4, 0, 1])
    assert_equal(run_step(table_5R, token_ids, 8), TORCH_INPUTS.step_inputs(table_5R, token_ids, 8, is_padded=False))


@every_group
def test_slots_are_the_laws(group: KVGroup) -> None:
    tables = make_rows(group.num_entries(MAX_LEN))
    inputs = run_step(make_table([1, 30, 1, 90], 2), make_rows(MAX_LEN), 300)
    found_T = torch.full((300,), -7)
    kernels.slots(tables, group, inputs.row_T, inputs.positions_T, found_T)
    assert torch.equal(found_T, TORCH_INPUTS.slots(tables, group, inputs))
    assert (found_T[122:] == -1).all() and (found_T[:122] >= 0).any()
    kernels.first_slots(tables, group, inputs.row_T, inputs.positions_T, found_T)
    if group.first_tokens:
        assert torch.equal(found_T, TORCH_INPUTS.first_slots(tables, group, inputs))
        assert (found_T >= 0).any()
    else:
        assert (found_T == -1).all()


@every_group
@pytest.mark.parametrize("width", [3, 20, 50])
def test_tables_are_copied_as_far_as_sequences_reach(group: KVGroup, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_COLUMNS", 4)
    tables = make_rows(group.num_entries(MAX_LEN))
    row_R = torch.tensor([3, 0, 39, SPARE, 17, 5])
    seq_lens_R = torch.tensor([1, MAX_LEN, 17, 0, 8, 9], dtype=torch.int32)
    table_RW = torch.full((6, width), -7, dtype=torch.int32)
    kernels.gather_tables(tables, group, row_R, seq_lens_R, table_RW)
    gathered = tables[row_R, :width]
    for found, want, seq_len in zip(table_RW, gathered, seq_lens_R.tolist(), strict=True):
        num_entries = min(group.num_entries(seq_len), width)
        assert torch.equal(found[:num_entries], want[:num_entries])
        assert (found[num_entries:] == -7).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [4, 1024])
def test_edits_of_rows(dtype: torch.dtype, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of one value, few of many, in any order of rows; a row's own edits beside each other."""
    monkeypatch.setattr(kernels, "_COLUMNS", columns)
    edits = [(7, 3, 20), (0, 0, 1), (39, 95, 1), (7, 30, 2), (12, 0, MAX_LEN), (3, 5, 1), (1, 50, 7)]
    for some in (edits, edits[:1], edits[1:3]):
        counts = torch.tensor([count for _, _, count in some])
        starts = counts.cumsum(0) - counts
        edits_N4 = torch.tensor([[*edit, start] for edit, start in zip(some, starts.tolist(), strict=True)])
        values_V = torch.randn(int(counts.sum()), generator=seeded(3)).mul(1000).to(dtype)
        found, want = make_rows(MAX_LEN, dtype), make_rows(MAX_LEN, dtype)
        kernels.write_rows(found, edits_N4, values_V)
        TORCH_INPUTS.write_rows(want, edits_N4, values_V)
        assert torch.equal(found, want) and not torch.equal(found, make_rows(MAX_LEN, dtype))
    kernels.write_rows(found, edits_N4[:0], values_V[:0])
    assert torch.equal(found, want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("width", [0, 1, 33, MAX_LEN])
def test_rows_are_cleared(dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_COLUMNS", 16)
    found, want = make_rows(MAX_LEN, dtype), make_rows(MAX_LEN, dtype)
    for row_N in (torch.tensor([39, 0, 4]), torch.tensor([], dtype=torch.int64)):
        kernels.clear_rows(found, row_N, width)
        TORCH_INPUTS.clear_rows(want, row_N, width)
        assert torch.equal(found, want)
