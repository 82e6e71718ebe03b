"""From logits to tokens: edit, filter, choose. One pipeline for all rows; what no row asks for costs nothing.

Order: bias, allowed ids and the minimum length; penalties; bad words; grammar mask; temperature; min-p, top-k, top-p; noise.
Greedy rows take the largest logit after the mask. Among equals the lowest id comes first, everywhere. Knows rows and what
they ask; knows no model. Called by the runner, which brings the kernels of its device.

Shape letters: R rows of the batch, N some of them, V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from halfbyte.kernels.sampling import SLICE, count_kept, gumbel_noise, log_normaliser, ordered_top, rows_at_a_time
from halfbyte.model_runner.logit_edits import edit_logits
from halfbyte.model_runner.request_rows import RequestRows
from halfbyte.model_runner.sampling_rows import SamplingNumbers

# A row that its candidates do not settle gets so many times more, if the host may look whether they do.
_WIDEN = 16

# Candidates that are filtered at a time: where they should stay in a CPU's caches, and elsewhere.
_MAX_CANDIDATES_HOST = 1 << 20
_MAX_CANDIDATES = 1 << 24


class SamplingKernels(Protocol):
    """What choosing tokens needs of a device, on float32 logits. Rows `at_N` are divided by `temperature_N` (None: 1) first.

    No function changes its logits, and each row's result is that of the row alone.
    """

    def best(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """(the token with the largest logit, int64; whether that is finite and no logit NaN), [R]."""
        ...

    def noisy_best(self, logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor, seed_N: Tensor, position_N: Tensor) -> Tensor:
        """The token whose logit and noise have the largest sum, int64 [N]."""
        ...

    def gumbel_noise(self, seed_N: Tensor, position_N: Tensor, ids_NK: Tensor) -> Tensor: ...

    def ordered_top(self, logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        """(values, ids) of the `count` largest, [N, K]."""
        ...

    def log_normaliser(self, logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor | None) -> Tensor: ...

    def rank(self, logits_RV: Tensor, token_R: Tensor) -> Tensor:
        """1 and the number of logits larger than that of the row's token, int64 [R]."""
        ...


class TorchSampling:
    """The laws, on any device; as many rows at a time as their temporary tensors should hold."""

    def best(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        # The maximum of a row with a NaN is NaN.
        return logits_RV.argmax(1), logits_RV.amax(1).isfinite()

    def noisy_best(self, logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor, seed_N: Tensor, position_N: Tensor) -> Tensor:
        ids_1V = torch.arange(logits_RV.shape[1], device=logits_RV.device)[None]
        scaled = _scaled(logits_RV, at_N, temperature_N)
        return torch.cat([gumbel_noise(seed_N[n], position_N[n], ids_1V).add_(part_NV).argmax(1) for n, part_NV in scaled])

    def gumbel_noise(self, seed_N: Tensor, position_N: Tensor, ids_NK: Tensor) -> Tensor:
        return gumbel_noise(seed_N, position_N, ids_NK)

    def ordered_top(self, logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        parts = [ordered_top(part_NV, count) for _, part_NV in _scaled(logits_RV, at_N, temperature_N)]
        return torch.cat([values for values, _ in parts]), torch.cat([ids for _, ids in parts])

    def log_normaliser(self, logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor | None) -> Tensor:
        return torch.cat([log_normaliser(part_NV) for _, part_NV in _scaled(logits_RV, at_N, temperature_N)])

    def rank(self, logits_RV: Tensor, token_R: Tensor) -> Tensor:
        return (logits_RV > logits_RV.gather(1, token_R[:, None])).sum(1) + 1


def _scaled(logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    step = rows_at_a_time(logits_RV)
    for start in range(0, len(at_N), step):
        part = slice(start, start + step)
        rows_NV = logits_RV[at_N[part]]
        yield part, rows_NV if temperature_N is None else rows_NV.div_(temperature_N[part, None])


TORCH_SAMPLING = TorchSampling()


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
        if edit_logits(logits_RV, self._rows, row_R, grammar_mask_RW):
            token_R, left_R = self._kernels.best(logits_RV)
            finite_R &= left_R
        sampling = self._rows.sampling
        is_random, is_filtered = ~sampling.is_greedy[row_R], sampling.is_filtered[row_R]
        if len(at := np.flatnonzero(is_random & ~is_filtered)):
            self._choose(logits_RV, row_R, at, token_R)
        left, width = np.flatnonzero(is_random & is_filtered), min(SLICE + 1, logits_RV.shape[1])
        if not self._rows.device.is_host:
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
        step = max(1, (_MAX_CANDIDATES_HOST if self._rows.device.is_host else _MAX_CANDIDATES) // width)
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
        count_N, settled_N = count_kept(values_NK, normaliser_N, numbers.top_k_R, numbers.top_p_R, numbers.min_p_R, vocab_size)
        values_NK.masked_fill_(torch.arange(width, device=device.place) >= count_N[:, None], -torch.inf)
        noise_NK = self._kernels.gumbel_noise(numbers.seed_R, position_N, ids_NK)
        chosen_N1 = noise_NK.add_(values_NK).argmax(1, keepdim=True)
        token_R[at_N] = ids_NK.gather(1, chosen_N1)[:, 0]
        is_last = width == vocab_size or is_bounded_N.all()
        # Only the host's own memory comes here with rows that are not settled: elsewhere looking would wait for the device.
        settled = np.ones(len(at), dtype=bool) if is_last else settled_N.numpy()
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
