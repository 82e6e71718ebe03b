"""Which blocks each row holds, per KV group: persistent tables on the device, of which steps gather their rows.

Knows rows and block ids; knows nothing of requests. Called by the runner.

Shape letters: R rows of the batch, T tokens of the step, W blocks per row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from halfbyte.kvcache.spec import KVLayout
from halfbyte.model_runner.staged_writes import StagedRows


class BlockTables:
    """One int32 table [max rows, max blocks] per KV group. Unused entries are 0, the null block."""

    def __init__(self, layout: KVLayout, max_rows: int, max_model_len: int, device: torch.device) -> None:
        self._groups = layout.groups
        self._tables = [StagedRows(max_rows, group.num_entries(max_model_len), torch.int32, device) for group in layout.groups]
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

    def gather(self, group: int, row_R: Tensor, max_seq_len: int) -> Tensor:
        """The batch's tables of one group, int32 [R, W], as wide as the longest context."""
        return self._tables[group].tensor[row_R, : self._groups[group].num_entries(max_seq_len)]

    def slots(self, group: int, row_T: Tensor, position_T: Tensor) -> Tensor:
        """Where each token's K and V go, int64 [T]: block * block_size + offset; -1 for the group's first tokens."""
        kind = self._groups[group]
        block_T = torch.div(position_T, kind.block_size, rounding_mode="floor")
        table = self._tables[group].tensor
        entry_T = (block_T + kind.entry_shift).clamp(max=table.shape[1] - 1)  # of first tokens, which have none here
        block_id_T = table[row_T, entry_T].long()
        slot_T = (block_id_T - block_T) * kind.block_size + position_T
        return slot_T.masked_fill(position_T < kind.first_tokens, -1) if kind.first_tokens else slot_T

    def first_slots(self, group: int, row_T: Tensor, position_T: Tensor) -> Tensor:
        """The same for the first tokens, block * first_block_size + offset; -1 for all others."""
        kind = self._groups[group]
        block_T = torch.div(position_T.clamp(max=kind.first_tokens - 1), kind.first_block_size, rounding_mode="floor")
        block_id_T = self._tables[group].tensor[row_T, block_T].long()
        slot_T = (block_id_T - block_T) * kind.first_block_size + position_T
        return slot_T.masked_fill(position_T >= kind.first_tokens, -1)
