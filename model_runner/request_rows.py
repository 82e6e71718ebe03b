"""The runner's memory of requests: each owns one fixed row from its entry to its release.

Per-step work gathers rows by an index; nothing is moved or compacted. Tokens live on the device, counts on the host. Knows
tokens and, through `SamplingRows`, what each row asks of the sampler; knows nothing of blocks or the scheduler. A released
row keeps nothing. Called by the runner.

Shape letters: R rows of the batch, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from halfbyte.model_runner.adapters import Adapters
from halfbyte.model_runner.device import Device
from halfbyte.model_runner.input_kernels import TORCH_INPUTS, InputKernels
from halfbyte.model_runner.sampling_rows import SamplingRows
from halfbyte.model_runner.staged_writes import StagedRows
from halfbyte.types import NewRow


class RequestRows:
    """Rows of up to `max_model_len` tokens, prompt and output together.

    `add` and `release` take effect on the device at the next `apply`; the host's counts are current at once.
    """

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        vocab_size: int,
        device: Device,
        kernels: InputKernels = TORCH_INPUTS,
        adapters: Adapters | None = None,
    ) -> None:
        self.device = device
        self.num_tokens = np.zeros(max_rows, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_rows, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_rows, dtype=np.int64)
        self.seat_of_row = np.zeros(max_rows, dtype=np.int64)
        self.requests: list[NewRow | None] = [None] * max_rows
        self.sampling = SamplingRows(max_rows, vocab_size, device, kernels)
        self._tokens = StagedRows(max_rows, max_model_len, torch.int32, device, kernels)
        self._adapters = adapters
        self._seats = None if adapters is None else StagedRows(max_rows, 1, torch.int32, device, kernels)
        self._row_of: dict[str, int] = {}
        self._free = list(reversed(range(max_rows)))

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def token_ids(self) -> Tensor:
        """int32 [max rows + 1, L]; zero beyond a row's tokens, and in the spare row."""
        return self._tokens.tensor

    def add(self, new: NewRow) -> int:
        row = self._free.pop()
        self._row_of[new.request_id] = row
        self.requests[row] = new
        self.num_tokens[row] = len(new.token_ids)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        self._tokens.write(row, 0, new.token_ids)
        self.sampling.add(row, new)
        if self._adapters is not None and self._seats is not None:
            self.seat_of_row[row] = self._adapters.seat_of(new.adapter_id)
            self._seats.write(row, 0, self.seat_of_row[row : row + 1])
        return row

    def release(self, request_id: str) -> int | None:
        """Free a request's row and return it; None for a request that never entered."""
        row = self._row_of.pop(request_id, None)
        if row is None:
            return None
        self._tokens.clear(row, min(int(self.num_tokens[row]), self._tokens.width))
        self.sampling.clear(row)
        if self._seats is not None:
            self.seat_of_row[row] = 0
            self._seats.clear(row, 1)
        self.requests[row] = None
        self.num_tokens[row] = self.num_prompt_tokens[row] = self.num_computed_tokens[row] = 0
        self._free.append(row)
        return row

    def apply(self) -> None:
        """Bring the device up to date with `add` and `release`."""
        self._tokens.apply()
        self.sampling.apply()
        if self._seats is not None:
            self._seats.apply()

    def seats(self, row_T: Tensor) -> Tensor | None:
        """Where the adapter of each token's row sits, int32 [T], 0 for none; None where there may be none at all."""
        return None if self._seats is None else self._seats.tensor.view(-1)[row_T]

    def index(self, request_ids: Iterable[str]) -> np.ndarray:
        return np.array([self._row_of[request_id] for request_id in request_ids], dtype=np.int64)

    def row(self, request_id: str) -> int:
        return self._row_of[request_id]

    def request(self, row: int) -> NewRow:
        request = self.requests[row]
        assert request is not None, "a row in a batch has a request"
        return request

    def append(self, row_R: np.ndarray, token_R: Tensor) -> None:
        """Append one token, on the device, to each row. A full row has had its last one: it will not be scheduled again."""
        at_R = self.num_tokens[row_R]
        fits_R = at_R < self._tokens.width
        if not fits_R.all():
            row_R, at_R, token_R = row_R[fits_R], at_R[fits_R], token_R[self.device.upload(np.flatnonzero(fits_R))]
        index = self.device.upload(np.stack([row_R, at_R]))
        self.token_ids[index[0], index[1]] = token_R.int()
        self.num_tokens[row_R] += 1
