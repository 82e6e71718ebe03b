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
        self._block_size = layout.block_size
        width = -(-max_model_len // layout.block_size)
        self._tables = [StagedRows(max_rows, width, torch.int32, device) for _ in layout.groups]
        self._num_blocks = np.zeros(max_rows, dtype=np.int64)

    def append(self, row: int, block_ids: list[list[int]]) -> None:
        """Add blocks to the end of a row's tables; every group grows by the same number."""
        start = int(self._num_blocks[row])
        for table, ids in zip(self._tables, block_ids, strict=True):
            table.write(row, start, ids)
        self._num_blocks[row] += len(block_ids[0])

    def clear(self, row: int) -> None:
        for table in self._tables:
            table.clear(row, int(self._num_blocks[row]))
        self._num_blocks[row] = 0

    def apply(self) -> None:
        """Bring the device tables up to date with `append` and `clear`."""
        for table in self._tables:
            table.apply()

    def gather(self, group: int, row_R: Tensor, max_seq_len: int) -> Tensor:
        """The batch's tables of one group, int32 [R, W], as wide as the longest context."""
        return self._tables[group].tensor[row_R, : -(-max_seq_len // self._block_size)]

    def slots(self, group: int, row_T: Tensor, position_T: Tensor) -> Tensor:
        """Where each token's K and V go, int64 [T]: block * block_size + offset."""
        block_T = torch.div(position_T, self._block_size, rounding_mode="floor")
        block_id_T = self._tables[group].tensor[row_T, block_T].long()
        return (block_id_T - block_T) * self._block_size + position_T
