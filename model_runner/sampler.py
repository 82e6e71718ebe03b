"""From logits to tokens: edit, filter, choose. One pipeline for all rows; what no row asks for costs nothing.

Order: bias, allowed ids and the minimum length; penalties; bad words; grammar mask; temperature; min-p, top-k, top-p; noise.
Greedy rows take the largest logit after the mask. Among equals the lowest id comes first, everywhere. Knows rows and what
they ask; knows no model. Called by the runner, which brings the kernels of its device.

Shape letters: R rows of the batch, N some of them, V vocabulary, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halfbyte.kernels.sampling import SLICE
from halfbyte.model_runner.logit_edits import edit_logits
from halfbyte.model_runner.request_rows import RequestRows
from halfbyte.model_runner.sampling_kernels import TORCH_SAMPLING, SamplingKernels
from halfbyte.model_runner.sampling_rows import SamplingNumbers

# A row that its candidates do not settle gets so many times more, if the host may look whether they do.
_WIDEN = 16


@dataclass(slots=True)
class Sampled:
    """token_R int64; finite_R: False where the model's logits were no numbers, or where what the row asks left no token.

    processed_RV: the logits that were sampled from, -inf where dropped; only if wanted.
    """

    token_R: Tensor
    finite_R: Tensor
    processed_RV: Tensor | None


class Sampler:
    """Stateless but for the rows it reads."""

    def __init__(self, rows: RequestRows, *, keep_processed: bool, kernels: SamplingKernels = TORCH_SAMPLING) -> None:
        self._rows = rows
        self._keep_processed = keep_processed
        self._kernels = kernels

    def sample(self, logits_RV: Tensor, row_R: np.ndarray, grammar_mask_RW: Tensor | None = None) -> Sampled:
        """Choose one token per row. `logits_RV` (float32) is changed in place. grammar_mask_RW: see `unpack_bits`."""
        token_R, finite_R = self._kernels.best(logits_RV)
        if edit_logits(logits_RV, self._rows, row_R, grammar_mask_RW, self._kernels):
            token_R, left_R = self._kernels.best(logits_RV)
            finite_R &= left_R
        sampling = self._rows.sampling
        is_random, is_filtered = ~sampling.is_greedy[row_R], sampling.is_filtered[row_R]
        if len(at := np.flatnonzero(is_random & ~is_filtered)):
            self._choose(logits_RV, row_R, at, token_R)
        left, width = np.flatnonzero(is_random & is_filtered), min(SLICE + 1, logits_RV.shape[1])
        if self._keep_processed and self._kernels.choose_unsettled_ is not None:
            # What a row keeps is read off its candidates: who may not look whether these are enough takes all of them at once.
            is_bounded = sampling.is_bounded[row_R[left]]
            self._filter(logits_RV, row_R, left[is_bounded], width, token_R)
            left, width = left[~is_bounded], logits_RV.shape[1]
        while len(left):
            left = self._filter(logits_RV, row_R, left, width, token_R)
            width = min(_WIDEN * width, logits_RV.shape[1])
        return Sampled(token_R, finite_R, logits_RV if self._keep_processed else None)

    def _choose(self, logits_RV: Tensor, row_R: np.ndarray, at: np.ndarray, token_R: Tensor) -> None:
        """Fill in the tokens of the rows `at`, which have no filters."""
        at_N, position_N, numbers = self._asked(row_R, at)
        temperature_N = numbers.temperature_R
        token_R[at_N] = self._kernels.noisy_best(logits_RV, at_N, temperature_N, numbers.seed_R, position_N)
        if self._keep_processed:
            logits_RV[at_N] /= temperature_N[:, None]

    def _filter(self, logits_RV: Tensor, row_R: np.ndarray, at: np.ndarray, width: int, token_R: Tensor) -> np.ndarray:
        """`_choose_filtered` for as many rows at a time as should be."""
        step = max(1, self._kernels.max_candidates // width)
        pieces = [at[start : start + step] for start in range(0, len(at), step)]
        return np.concatenate([at[:0], *(self._choose_filtered(logits_RV, row_R, piece, width, token_R) for piece in pieces)])

    def _choose_filtered(self, logits_RV: Tensor, row_R: np.ndarray, at: np.ndarray, width: int, token_R: Tensor) -> np.ndarray:
        """Fill in the tokens of the rows `at` from their best `width`; returns those of `at` that need more candidates."""
        device, vocab_size = self._rows.device, logits_RV.shape[1]
        is_bounded_N = self._rows.sampling.is_bounded[row_R[at]]
        at_N, position_N, numbers = self._asked(row_R, at)
        values_NK, ids_NK = self._kernels.ordered_top(logits_RV, at_N, numbers.temperature_R, width)
        # Filters compare masses with each other: where top-k says what the whole is, any normaliser serves.
        normaliser_N = values_NK[:, 0].double()
        if not is_bounded_N.all():
            loose = device.upload(np.flatnonzero(~is_bounded_N))
            normaliser_N[loose] = self._kernels.log_normaliser(logits_RV, at_N[loose], numbers.temperature_R[loose])
        filters = numbers.top_k_R, numbers.top_p_R, numbers.min_p_R
        count_N, settled_N = self._kernels.count_kept(values_NK, normaliser_N, *filters, vocab_size)
        values_NK.masked_fill_(torch.arange(width, device=device.place) >= count_N[:, None], -torch.inf)
        noise_NK = self._kernels.gumbel_noise(numbers.seed_R, position_N, ids_NK)
        token_N = ids_NK.gather(1, noise_NK.add_(values_NK).argmax(1, keepdim=True))[:, 0]
        settled, choose_unsettled_ = np.ones(len(at), dtype=bool), self._kernels.choose_unsettled_
        if width < vocab_size and not is_bounded_N.all():
            if choose_unsettled_ is None:
                settled = settled_N.numpy()
            else:
                scaled = logits_RV, at_N, numbers.temperature_R
                choose_unsettled_(token_N, settled_N, *scaled, *filters, numbers.seed_R, position_N)
        token_R[at_N] = token_N
        if self._keep_processed:
            done = device.upload(np.flatnonzero(settled))
            dropped_NV = torch.full((len(done), vocab_size), -torch.inf, device=device.place)
            logits_RV[at_N[done]] = dropped_NV.scatter_(1, ids_NK[done], values_NK[done])
        return at[~settled]

    def _asked(self, row_R: np.ndarray, at: np.ndarray) -> tuple[Tensor, Tensor, SamplingNumbers]:
        """(places, positions of the new tokens, what the rows ask) of the rows `at` of the batch, on the device."""
        row_N = row_R[at]
        table = self._rows.device.upload(np.stack([at, self._rows.num_tokens[row_N], row_N]))
        return table[0], table[1], self._rows.sampling.gather(table[2])
