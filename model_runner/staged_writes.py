"""A tensor of rows on the device whose edits are collected on the host and applied together, once per step.

Knows rows, columns and values; knows nothing of what they mean. Owned by the request rows and the block tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float64: np.float64}


class StagedRows:
    """`tensor` [rows, width], zero at first. `write` and `clear` take effect at the next `apply`."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numpy = _NUMPY[dtype]
        self.tensor = _zeros(num_rows, width, dtype, device)
        self._writes: list[tuple[int, int, np.ndarray]] = []
        self._cleared: dict[int, int] = {}

    @property
    def width(self) -> int:
        return self.tensor.shape[1]

    def write(self, row: int, start: int, values: Sequence[float] | np.ndarray) -> None:
        """Set columns `start` .. of a row."""
        if len(values):
            self._writes.append((row, start, np.asarray(values, dtype=self._numpy)))

    def clear(self, row: int, width: int) -> None:
        """Zero the first `width` columns of a row; writes to it that were not applied yet are dropped."""
        if self._writes:
            self._writes = [write for write in self._writes if write[0] != row]
        self._cleared[row] = max(width, self._cleared.get(row, 0))

    def apply(self) -> None:
        """Clears first, then writes: at most one operation each, however many edits there are."""
        device = self.tensor.device
        if self._cleared:
            index = torch.tensor(list(self._cleared), device=device)
            self.tensor[:, : max(self._cleared.values())].index_fill_(0, index, 0)
            self._cleared.clear()
        if self._writes:
            spans = [np.arange(len(values)) + (row * self.width + start) for row, start, values in self._writes]
            index = torch.from_numpy(np.concatenate(spans)).to(device)
            values = torch.from_numpy(np.concatenate([values for _, _, values in self._writes])).to(device)
            self.tensor.view(-1)[index] = values
            self._writes.clear()


def _zeros(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU numpy leaves the zeroing to the system, page by page on first use: rows that nobody uses cost nothing."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((num_rows, width), dtype=_NUMPY[dtype]))
    return torch.zeros(num_rows, width, dtype=dtype, device=device)
