"""Choosing tokens with the C++ kernels: what the sampler wants of a device, one call into the library for each.

Twins of the laws in `kernels.sampling`, to the bit but for logarithms and sums; rows share nothing, so neither the batch nor the
number of threads can be seen. Logits stay where they are: rows are named by their place and scaled while they are read. Knows
tensors and the library; knows no requests. Made by the runner of a model that runs on a `CpuEngine`.

Shape letters: R rows of logits, N rows that are asked for, V vocabulary, K candidates.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from halfbyte.kernels.cpu.abi import LogitRows
from halfbyte.kernels.cpu.library import CpuEngine
from halfbyte.kernels.sampling import count_kept, penalise_rows_


class CpuSampling:
    """Implements the sampler's `SamplingKernels`, which says what the functions return, on the threads of `engine`."""

    max_candidates = 1 << 20  # they should stay in the caches
    choose_unsettled_ = None
    count_kept = staticmethod(count_kept)
    penalise_ = staticmethod(penalise_rows_)

    def __init__(self, engine: CpuEngine) -> None:
        self._engine = engine
        self._library = engine.library

    def best(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        token_R = torch.empty(len(logits_RV), dtype=torch.int64)
        finite_R = torch.empty(len(logits_RV), dtype=torch.bool)
        rows = _rows(logits_RV)
        self._library.hb_best(self._engine.handle, byref(rows), token_R.data_ptr(), finite_R.data_ptr())
        return token_R, finite_R

    def noisy_best(self, logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor, seed_N: Tensor, position_N: Tensor) -> Tensor:
        token_N = torch.empty_like(at_N)
        seed_N, position_N = seed_N.contiguous(), position_N.contiguous()
        rows = _rows(logits_RV, at_N, temperature_N)
        rows.seeds, rows.positions = seed_N.data_ptr(), position_N.data_ptr()
        self._library.hb_noisy_best(self._engine.handle, byref(rows), token_N.data_ptr())
        return token_N

    def gumbel_noise(self, seed_N: Tensor, position_N: Tensor, ids_NK: Tensor) -> Tensor:
        noise_NK = torch.empty(ids_NK.shape)
        seed_N, position_N, ids_NK = seed_N.contiguous(), position_N.contiguous(), ids_NK.contiguous()
        rows = LogitRows(seeds=seed_N.data_ptr(), positions=position_N.data_ptr(), num_rows=len(ids_NK))
        count = ids_NK.shape[1]
        self._library.hb_gumbel_noise(self._engine.handle, byref(rows), ids_NK.data_ptr(), count, noise_NK.data_ptr())
        return noise_NK

    def ordered_top(self, logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        values_NK, ids_NK = torch.empty(len(at_N), count), torch.empty(len(at_N), count, dtype=torch.int64)
        rows = _rows(logits_RV, at_N, temperature_N)
        self._library.hb_ordered_top(self._engine.handle, byref(rows), count, values_NK.data_ptr(), ids_NK.data_ptr())
        return values_NK, ids_NK

    def log_normaliser(self, logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor | None) -> Tensor:
        normaliser_N = torch.empty(len(at_N), dtype=torch.float64)
        rows = _rows(logits_RV, at_N, temperature_N)
        self._library.hb_log_normaliser(self._engine.handle, byref(rows), normaliser_N.data_ptr())
        return normaliser_N

    def rank(self, logits_RV: Tensor, token_R: Tensor) -> Tensor:
        token_R = token_R.contiguous()
        rank_R = torch.empty_like(token_R)
        rows = _rows(logits_RV)
        self._library.hb_rank(self._engine.handle, byref(rows), token_R.data_ptr(), rank_R.data_ptr())
        return rank_R


def _rows(logits_RV: Tensor, at_N: Tensor | None = None, temperature_N: Tensor | None = None) -> LogitRows:
    """The rows at `at_N`, divided by `temperature_N`; without these, all of them as they are. Holds addresses, not tensors."""
    assert logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1
    assert at_N is None or (at_N.dtype == torch.int64 and at_N.is_contiguous())
    assert temperature_N is None or (temperature_N.dtype == torch.float32 and temperature_N.is_contiguous())
    return LogitRows(
        logits=logits_RV.data_ptr(),
        stride=logits_RV.stride(0),
        at=None if at_N is None else at_N.data_ptr(),
        temperatures=None if temperature_N is None else temperature_N.data_ptr(),
        num_rows=len(logits_RV) if at_N is None else len(at_N),
        width=logits_RV.shape[1],
    )
