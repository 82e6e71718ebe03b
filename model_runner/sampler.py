"""From logits to tokens: edit, filter, choose. One pipeline for all rows; what no row asks for costs nothing.

Order: bias, allowed ids and the minimum length; penalties; bad words; grammar mask; temperature; min-p, top-k, top-p; noise.
Greedy rows take the largest logit after the mask. Among equals the lowest id comes first, everywhere. Knows rows and what
they ask; knows no model. Called by the runner.

Shape letters: R rows that sample, N some of them, V vocabulary, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halfbyte.kernels.sampling import SLICE, count_kept, gumbel_noise, log_normaliser, ordered_top, rows_at_a_time
from halfbyte.model_runner.logit_edits import edit_logits
from halfbyte.model_runner.request_rows import RequestRows

# A row that its candidates do not settle gets so many times more.
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

    def __init__(self, rows: RequestRows, *, keep_processed: bool) -> None:
        self._rows = rows
        self._keep_processed = keep_processed

    def sample(self, logits_RV: Tensor, row_R: np.ndarray, grammar_mask_RW: Tensor | None = None) -> Sampled:
        """Choose one token per row. `logits_RV` (float32) is changed in place. grammar_mask_RW: see `unpack_bits`."""
        # The maximum of a row with a NaN is NaN.
        finite_R = logits_RV.amax(1).isfinite()
        if edit_logits(logits_RV, self._rows, row_R, grammar_mask_RW):
            finite_R &= logits_RV.amax(1).isfinite()
        random = np.flatnonzero(~self._rows.sampling.is_greedy[row_R])
        token_R = logits_RV.argmax(1) if len(random) < len(row_R) else finite_R.new_empty(len(row_R), dtype=torch.int64)
        step = rows_at_a_time(logits_RV)
        for start in range(0, len(random), step):
            at = random[start : start + step]
            at_N = torch.from_numpy(at).to(logits_RV.device)
            token_R[at_N], processed_NV = self._choose(logits_RV[at_N], row_R[at])
            if self._keep_processed:
                logits_RV[at_N] = processed_NV
        return Sampled(token_R, finite_R, logits_RV if self._keep_processed else None)

    def _choose(self, logits_NV: Tensor, row_N: np.ndarray) -> tuple[Tensor, Tensor]:
        """(tokens, logits that they were sampled from) of rows that sample at random."""
        device, vocab_size = logits_NV.device, logits_NV.shape[1]
        sampling = self._rows.sampling
        numbers = sampling.gather(torch.from_numpy(row_N).to(device))
        position_N = torch.from_numpy(self._rows.num_tokens[row_N]).to(device)
        scaled_NV = logits_NV / numbers.temperature_R[:, None]
        processed_NV = scaled_NV.clone() if self._keep_processed else scaled_NV
        token_N = torch.empty_like(position_N)
        is_filtered = sampling.is_filtered[row_N]
        if not is_filtered.all():
            index_N = torch.from_numpy(np.flatnonzero(~is_filtered)).to(device)
            ids_1V = torch.arange(vocab_size, device=device)[None]
            noise_NV = gumbel_noise(numbers.seed_R[index_N], position_N[index_N], ids_1V)
            token_N[index_N] = noise_NV.add_(scaled_NV[index_N]).argmax(1)
        left, width = np.flatnonzero(is_filtered), min(SLICE + 1, vocab_size)
        while len(left):
            index_N = torch.from_numpy(left).to(device)
            values_NV = scaled_NV[index_N]
            values_NK, ids_NK = ordered_top(values_NV, width)
            filters = numbers.top_k_R[index_N], numbers.top_p_R[index_N], numbers.min_p_R[index_N]
            count_N, settled_N = count_kept(values_NK, log_normaliser(values_NV), *filters, vocab_size)
            values_NK.masked_fill_(torch.arange(width, device=device) >= count_N[:, None], -torch.inf)
            noise_NK = gumbel_noise(numbers.seed_R[index_N], position_N[index_N], ids_NK)
            chosen_N1 = noise_NK.add_(values_NK).argmax(1, keepdim=True)
            token_N[index_N] = ids_NK.gather(1, chosen_N1)[:, 0]
            if self._keep_processed:
                processed_NV[index_N] = torch.full_like(values_NV, -torch.inf).scatter_(1, ids_NK, values_NK)
            if width == vocab_size or sampling.is_bounded[row_N[left]].all():
                break
            left, width = left[~settled_N.cpu().numpy()], min(_WIDEN * width, vocab_size)
        return token_N, processed_NV
