"""From the hidden states of a step of a decoder to vectors: the counterpart of `step_sampling` for models that pool.

A prompt may come in chunks: the state of its first token, or the sum of all of them, is kept with its row until the last one is
there. Launches everything and waits for nothing. Knows rows and the head; knows no attention. Called by the runner.

Shape letters: T tokens of the step, R rows, N states, E hidden.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from halfbyte.model_runner.cpu_model import CpuModel
from halfbyte.model_runner.input_batch import InputBatch
from halfbyte.model_runner.layers.model import Model
from halfbyte.model_runner.pending import PendingStep
from halfbyte.model_runner.pooling_head import PoolingHead
from halfbyte.model_runner.request_rows import RequestRows


class StepPooling:
    """The sum of a mean is float32, whatever the model computes in."""

    def __init__(self, head: PoolingHead, rows: RequestRows, num_rows: int, model: Model | CpuModel) -> None:
        self._head = head
        self._logits = model.compute_logits if head.plan.classes else None
        self._rows = rows
        self._mode = head.plan.mode
        self._kept_RE = None
        if self._mode != "last":
            self._kept_RE = torch.zeros(num_rows, model.config.hidden_size, dtype=torch.float32, device=rows.device.place)

    def __call__(self, batch: InputBatch, hidden_TE: Tensor, grammar_mask: np.ndarray | None) -> PendingStep:
        pending = PendingStep(batch.request_ids)
        owners, asked, states = [], [], []
        last_NE = None
        ends = np.flatnonzero(batch.samples_R)
        if self._kept_RE is None and len(ends):
            last_NE = hidden_TE[self._rows.device.upload(batch.last_R[ends].copy())]
        at_end = {int(place): index for index, place in enumerate(ends)}
        for place, row in enumerate(batch.row_R.tolist()):
            ask = self._rows.request(row).pooling
            assert ask is not None, "a model that pools has no other requests"
            first, end = int(batch.first_R[place]), int(batch.last_R[place]) + 1
            if ask.task == "token_embed":
                states.append(hidden_TE[first:end])
                owners += [place] * (end - first)
                asked += [ask] * (end - first)
                continue
            if self._kept_RE is not None:
                self._keep(row, hidden_TE[first:end], is_first=not batch.num_computed_R[place])
            if place in at_end:
                states.append(self._state(row) if last_NE is None else last_NE[at_end[place]][None])
                owners.append(place)
                asked.append(ask)
        if states:
            self._head.send(pending, owners, asked, torch.cat(states), self._logits)
        pending.send(self._rows.device)
        return pending

    def _keep(self, row: int, chunk_TE: Tensor, *, is_first: bool) -> None:
        assert self._kept_RE is not None
        if self._mode == "cls":
            if is_first:
                self._kept_RE[row] = chunk_TE[0]
            return
        total_E = chunk_TE.float().sum(0)
        self._kept_RE[row] = total_E if is_first else self._kept_RE[row] + total_E

    def _state(self, row: int) -> Tensor:
        """[1, E] of a row whose last token is there."""
        assert self._kept_RE is not None
        kept_1E = self._kept_RE[row : row + 1].clone()  # the row may have another owner before it is read
        return kept_1E / self._rows.request(row).num_prompt_tokens if self._mode == "mean" else kept_1E
