"""Which blocks each row holds, per KV group: persistent tables on the device, of which steps gather their rows.

Knows rows and block ids; knows nothing of requests. Called by the runner.

Shape letters: R rows of the batch, W blocks per row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from halfbyte.kvcache.spec import KVLayout
from halfbyte.model_runner.device import Device
from halfbyte.model_runner.input_kernels import TORCH_INPUTS, InputKernels, StepInputs
from halfbyte.model_runner.staged_writes import StagedRows


class BlockTables:
    """One int32 table [max rows + 1, max blocks] per KV group. Unused entries are 0, the null block."""

    def __init__(
        self, layout: KVLayout, max_rows: int, max_model_len: int, device: Device, kernels: InputKernels = TORCH_INPUTS
    ) -> None:
        self.max_model_len = max_model_len
        self._kernels = kernels
        self._groups = layout.groups
        widths = [group.num_entries(max_model_len) for group in layout.groups]
        self._tables = [StagedRows(max_rows, width, torch.int32, device, kernels) for width in widths]
        self._num_entries = np.zeros((len(layout.groups), max_rows), dtype=np.int64)

    def append(self, row: int, block_ids: list[list[int]]) -> None:
        """Add blocks to the end of a row's tables."""
        for table, num_entries, ids in zip(self._tables, self._num_entries, block_ids, strict=True):
            table.write(row, int(num_entries[row]), ids)
            num_entries[row] += len(ids)

    def clear(self, row: int) -> None:
        for table, num_entries in zip(self._tables, self._num_entries, strict=True):
            table.clear(row, int(num_entries[row]))
            num_entries[row] = 0

    def apply(self) -> None:
        """Bring the device tables up to date with `append` and `clear`."""
        for table in self._tables:
            table.apply()

    def gather(self, group: int, inputs: StepInputs, max_seq_len: int) -> Tensor:
        """The batch's tables of one group, int32 [R, W], as wide as the longest context."""
        kind = self._groups[group]
        return self._kernels.gather_tables(self._tables[group].tensor, kind, inputs, kind.num_entries(max_seq_len))

    def slots(self, group: int, inputs: StepInputs) -> Tensor:
        """Where each token's K and V go; see `InputKernels.slots`."""
        return self._kernels.slots(self._tables[group].tensor, self._groups[group], inputs)

    def first_slots(self, group: int, inputs: StepInputs) -> Tensor:
        """The same for the first tokens."""
        return self._kernels.first_slots(self._tables[group].tensor, self._groups[group], inputs)
