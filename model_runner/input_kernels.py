"""From the small table of a step to its tokens, positions and places in the cache: `InputKernels`, and its law in PyTorch.

All counts that shapes follow from are the host's, so that nothing is read back; all else comes from tensors, so that the same
launches serve every step of a shape. Padding tokens belong to the spare row, the last one, which has no tokens and only null
blocks. Knows tables of rows; knows no requests. Called by the rows, the block tables and the forward pass.

Shape letters: R requests of the batch, T tokens of the step, N edits, V values, W blocks per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.kvcache.spec import KVGroup


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A ragged batch on the device. query_start_loc [R + 1] and seq_lens_R are int32, the rest int64.

    row_of_R, row_T: each request's and each token's row. is_padded: there are tokens of the spare row.
    """

    row_of_R: Tensor
    query_start_loc: Tensor
    seq_lens_R: Tensor
    row_T: Tensor
    positions_T: Tensor
    token_ids_T: Tensor
    is_padded: bool


class InputKernels(Protocol):
    """What preparing a step needs of a device. Nothing here waits for it."""

    def clear_rows(self, rows: Tensor, row_N: Tensor, width: int) -> None:
        """Zero the first `width` columns of these rows."""
        ...

    def write_rows(self, rows: Tensor, edits_N4: Tensor, values_V: Tensor) -> None:
        """Apply edits (row, first column, how many, where in `values_V` they begin), int64, which do not overlap."""
        ...

    def step_inputs(self, table_5R: Tensor, token_ids: Tensor, num_tokens: int, *, is_padded: bool) -> StepInputs:
        """table_5R: of each request its row, scheduled and computed tokens, first token of the step and the one after its last,
        int64; padding requests have 0 scheduled tokens. token_ids: int32 [rows, tokens]."""
        ...

    def slots(self, tables: Tensor, group: KVGroup, inputs: StepInputs) -> Tensor:
        """Where each token's K and V go, int64 [T]: block * block_size + offset; -1 for the group's first tokens and padding."""
        ...

    def first_slots(self, tables: Tensor, group: KVGroup, inputs: StepInputs) -> Tensor:
        """The same for the first tokens, block * first_block_size + offset; -1 for all others."""
        ...

    def gather_tables(self, tables: Tensor, group: KVGroup, inputs: StepInputs, width: int) -> Tensor:
        """The first `width` entries of each request's table, [R, W]; 0 after those that its sequence has."""
        ...


class TorchInputs:
    """The laws, on any device."""

    def clear_rows(self, rows: Tensor, row_N: Tensor, width: int) -> None:
        rows[:, :width].index_fill_(0, row_N, 0)

    def write_rows(self, rows: Tensor, edits_N4: Tensor, values_V: Tensor) -> None:
        row_N, column_N, count_N, start_N = edits_N4.unbind(1)
        shift_V = torch.repeat_interleave(row_N * rows.shape[1] + column_N - start_N, count_N, output_size=len(values_V))
        rows.view(-1)[shift_V + torch.arange(len(values_V), device=rows.device)] = values_V

    def step_inputs(self, table_5R: Tensor, token_ids: Tensor, num_tokens: int, *, is_padded: bool) -> StepInputs:
        row_of_R, scheduled_R, computed_R, start_R, stop_R = table_5R
        token_T = torch.arange(num_tokens, device=table_5R.device)
        if is_padded:
            request_T = torch.searchsorted(stop_R, token_T, right=True)
            is_token_T = request_T < len(stop_R)
            request_T = request_T.clamp(max=len(stop_R) - 1)
        else:
            request_T = torch.repeat_interleave(scheduled_R, output_size=num_tokens)
        row_T = row_of_R[request_T]
        positions_T = token_T + (computed_R - start_R)[request_T]
        if is_padded:
            row_T = torch.where(is_token_T, row_T, len(token_ids) - 1)
            positions_T = torch.where(is_token_T, positions_T, 0)
        return StepInputs(
            row_of_R=row_of_R,
            query_start_loc=torch.cat([start_R[:1], stop_R]).int(),
            seq_lens_R=(computed_R + scheduled_R).int(),
            row_T=row_T,
            positions_T=positions_T,
            token_ids_T=token_ids[row_T, positions_T].long(),
            is_padded=is_padded,
        )

    def slots(self, tables: Tensor, group: KVGroup, inputs: StepInputs) -> Tensor:
        position_T = inputs.positions_T
        block_T = torch.div(position_T, group.block_size, rounding_mode="floor")
        entry_T = (block_T + group.entry_shift).clamp(max=tables.shape[1] - 1)  # of first tokens, which have none here
        block_id_T = tables[inputs.row_T, entry_T].long()
        slot_T = (block_id_T - block_T) * group.block_size + position_T
        if group.first_tokens:
            slot_T = slot_T.masked_fill(position_T < group.first_tokens, -1)
        return slot_T.masked_fill(inputs.row_T == len(tables) - 1, -1) if inputs.is_padded else slot_T

    def first_slots(self, tables: Tensor, group: KVGroup, inputs: StepInputs) -> Tensor:
        position_T = inputs.positions_T
        block_T = torch.div(position_T.clamp(max=group.first_tokens - 1), group.first_block_size, rounding_mode="floor")
        block_id_T = tables[inputs.row_T, block_T].long()
        slot_T = (block_id_T - block_T) * group.first_block_size + position_T
        is_other_T = position_T >= group.first_tokens
        return slot_T.masked_fill(is_other_T | (inputs.row_T == len(tables) - 1) if inputs.is_padded else is_other_T, -1)

    def gather_tables(self, tables: Tensor, group: KVGroup, inputs: StepInputs, width: int) -> Tensor:
        return tables[inputs.row_of_R, :width]


TORCH_INPUTS = TorchInputs()
