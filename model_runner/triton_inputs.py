"""`InputKernels` by Triton: one launch each, into memory made for the step or, in a graph, for the graph.

Imported on a GPU only. Knows which kernel fills what; the laws are `input_kernels.TorchInputs`. Made by the runner.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.kernels.triton import input_batch
from halfbyte.kvcache.spec import KVGroup
from halfbyte.model_runner.input_kernels import StepInputs


class TritonInputs:
    """Padding is always looked for: it costs nothing here."""

    def clear_rows(self, rows: Tensor, row_N: Tensor, width: int) -> None:
        input_batch.clear_rows(rows, row_N, width)

    def write_rows(self, rows: Tensor, edits_N4: Tensor, values_V: Tensor) -> None:
        input_batch.write_rows(rows, edits_N4, values_V)

    def step_inputs(self, table_5R: Tensor, token_ids: Tensor, num_tokens: int, *, is_padded: bool) -> StepInputs:
        num_requests = table_5R.shape[1]
        row_T, positions_T, token_ids_T = (table_5R.new_empty(num_tokens) for _ in range(3))
        query_start_loc = table_5R.new_empty(num_requests + 1, dtype=torch.int32)
        seq_lens_R = table_5R.new_empty(num_requests, dtype=torch.int32)
        input_batch.step_inputs(table_5R, token_ids, row_T, positions_T, token_ids_T, query_start_loc, seq_lens_R)
        return StepInputs(table_5R[0], query_start_loc, seq_lens_R, row_T, positions_T, token_ids_T, is_padded)

    def slots(self, tables: Tensor, group: KVGroup, inputs: StepInputs) -> Tensor:
        slots_T = torch.empty_like(inputs.positions_T)
        input_batch.slots(tables, group, inputs.row_T, inputs.positions_T, slots_T)
        return slots_T

    def first_slots(self, tables: Tensor, group: KVGroup, inputs: StepInputs) -> Tensor:
        slots_T = torch.empty_like(inputs.positions_T)
        input_batch.first_slots(tables, group, inputs.row_T, inputs.positions_T, slots_T)
        return slots_T

    def gather_tables(self, tables: Tensor, group: KVGroup, inputs: StepInputs, width: int) -> Tensor:
        table_RW = tables.new_zeros(len(inputs.row_of_R), width)
        input_batch.gather_tables(tables, group, inputs.row_of_R, inputs.seq_lens_R, table_RW)
        return table_RW
