"""The runner's memory of requests: each owns one fixed row from its entry to its release.

Per-step work gathers rows by an index; nothing is moved or compacted. Knows tokens and sampling parameters; knows nothing of
blocks, tensors on devices or the scheduler. A released row keeps nothing: `add` writes every field.

Shape letters: R rows of the batch, T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from halfbyte.types import NewRow, SamplingParams


class RequestRows:
    """Host arrays indexed by row. max_model_len: tokens a row can hold, prompt and output together."""

    def __init__(self, max_rows: int, max_model_len: int) -> None:
        self.token_ids = np.zeros((max_rows, max_model_len), dtype=np.int32)
        self.num_tokens = np.zeros(max_rows, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_rows, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_rows, dtype=np.int64)
        self.requests: list[NewRow | None] = [None] * max_rows
        self._row_of: dict[str, int] = {}
        self._free = list(reversed(range(max_rows)))

    def __len__(self) -> int:
        return len(self._row_of)

    def add(self, new: NewRow) -> int:
        row = self._free.pop()
        self._row_of[new.request_id] = row
        self.requests[row] = new
        count = len(new.token_ids)
        self.token_ids[row, :count] = new.token_ids
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        return row

    def release(self, request_id: str) -> int | None:
        """Free a request's row and return it; None for a request that never entered."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self.requests[row] = None
            self._free.append(row)
        return row

    def index(self, request_ids: Iterable[str]) -> np.ndarray:
        return np.array([self._row_of[request_id] for request_id in request_ids], dtype=np.int64)

    def row(self, request_id: str) -> int:
        return self._row_of[request_id]

    def request(self, row: int) -> NewRow:
        request = self.requests[row]
        assert request is not None, "a row in a batch has a request"
        return request

    def sampling(self, row: int) -> SamplingParams:
        return self.request(row).sampling

    def append(self, row_R: np.ndarray, token_R: np.ndarray) -> None:
        """Append one token to each row. A row that is full has had its last token: it will not be scheduled again."""
        fits_R = self.num_tokens[row_R] < self.token_ids.shape[1]
        rows = row_R[fits_R]
        self.token_ids[rows, self.num_tokens[rows]] = token_R[fits_R]
        self.num_tokens[rows] += 1

    def prompt(self, row: int) -> np.ndarray:
        return self.token_ids[row, : self.num_prompt_tokens[row]]

    def output(self, row: int) -> np.ndarray:
        return self.token_ids[row, self.num_prompt_tokens[row] : self.num_tokens[row]]
