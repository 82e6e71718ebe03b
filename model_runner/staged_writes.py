"""A tensor of rows on the device whose edits are collected on the host and applied together, once per step.

Knows rows, columns and values; knows nothing of what they mean. Owned by the request rows and the block tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from halfbyte.model_runner.device import Device
from halfbyte.model_runner.input_kernels import TORCH_INPUTS, InputKernels

_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float64: np.float64}


class StagedRows:
    """`tensor` [rows + 1, width], zero at first. `write` and `clear` take effect at the next `apply`.

    The last row is spare: nobody's, zero for ever, for the padding of batches.
    """

    def __init__(
        self, num_rows: int, width: int, dtype: torch.dtype, device: Device, kernels: InputKernels = TORCH_INPUTS
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._numpy = _NUMPY[dtype]
        self.tensor = _zeros(num_rows + 1, width, dtype, device)
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
        if self._cleared:
            index = self._device.upload(np.array(list(self._cleared), dtype=np.int64))
            self._kernels.clear_rows(self.tensor, index, max(self._cleared.values()))
            self._cleared.clear()
        if self._writes:
            edits, num_values = [], 0
            for row, start, values in self._writes:
                edits.append((row, start, len(values), num_values))
                num_values += len(values)
            values = np.concatenate([values for _, _, values in self._writes])
            self._kernels.write_rows(
                self.tensor, self._device.upload(np.array(edits, dtype=np.int64)), self._device.upload(values)
            )
            self._writes.clear()


def _zeros(num_rows: int, width: int, dtype: torch.dtype, device: Device) -> Tensor:
    """On a CPU numpy leaves the zeroing to the system, page by page on first use: rows that nobody uses cost nothing."""
    if device.is_host:
        return torch.from_numpy(np.zeros((num_rows, width), dtype=_NUMPY[dtype]))
    return torch.zeros(num_rows, width, dtype=dtype, device=device.place)
