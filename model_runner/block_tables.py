"""Which blocks each row holds, per KV group: a table on the host that steps slice and send.

Knows rows and block ids; knows nothing of requests or tensors' contents. Called by the runner.

Shape letters: R rows of the batch, T tokens of the step, W blocks per row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from halfbyte.kvcache.spec import KVLayout


class BlockTables:
    """One int32 table [max rows, max blocks] per KV group. Unused entries are 0, the null block."""

    def __init__(self, layout: KVLayout, max_rows: int, max_model_len: int) -> None:
        self._block_size = layout.block_size
        width = -(-max_model_len // layout.block_size)
        self._tables = [np.zeros((max_rows, width), dtype=np.int32) for _ in layout.groups]
        self._lengths = np.zeros(max_rows, dtype=np.int64)

    def append(self, row: int, block_ids: list[list[int]]) -> None:
        """Add blocks to the end of a row's tables; every group grows by the same number."""
        count = len(block_ids[0])
        if count:
            start = self._lengths[row]
            for table, ids in zip(self._tables, block_ids, strict=True):
                table[row, start : start + count] = ids
            self._lengths[row] += count

    def clear(self, row: int) -> None:
        for table in self._tables:
            table[row, : self._lengths[row]] = 0
        self._lengths[row] = 0

    def gather(self, group: int, row_R: np.ndarray, max_seq_len: int) -> Tensor:
        """The batch's tables of one group, int32 [R, W], as wide as the longest context."""
        width = -(-max_seq_len // self._block_size)
        return torch.from_numpy(self._tables[group][row_R, :width])

    def slots(self, group: int, row_T: np.ndarray, position_T: np.ndarray) -> Tensor:
        """Where each token's K and V go, int64 [T]: block * block_size + offset."""
        block_T, offset_T = np.divmod(position_T, self._block_size)
        return torch.from_numpy(self._tables[group][row_T, block_T].astype(np.int64) * self._block_size + offset_T)
