"""What each row asks of the sampler: numbers in tensors on the device, token lists of the few rows that have any.

Written once, when a request enters; a step gathers what its rows ask by an index. Flags on the host say what a step can skip
without asking the device. Knows sampling parameters; knows no logits. Owned by the request rows, read by the sampler.

Shape letters: R rows, W bad words, P tokens before the last one of a bad word.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halfbyte.kernels.sampling import SLICE
from halfbyte.model_runner.device import Device
from halfbyte.model_runner.input_kernels import TORCH_INPUTS, InputKernels
from halfbyte.model_runner.staged_writes import StagedRows
from halfbyte.types import NewRow

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(frozen=True, slots=True)
class SamplingNumbers:
    """One value per row of a gather. temperature and the penalties are float32, top_p and min_p float64, the rest int64."""

    temperature_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    repetition_R: Tensor
    frequency_R: Tensor
    presence_R: Tensor
    seed_R: Tensor
    top_k_R: Tensor


@dataclass(frozen=True, slots=True)
class RowEdits:
    """Token lists of one row, int64 on the device; None where the row does not ask.

    bad_prefix_WP holds what comes before each bad word's last token, right-aligned, -1 before it; bad_last_W that last token.
    """

    bias_ids: Tensor | None
    bias_values: Tensor | None
    allowed_ids: Tensor | None
    stop_ids: Tensor | None
    bad_prefix_WP: Tensor | None
    bad_last_W: Tensor | None
    penalises: bool
    min_tokens: int


class SamplingRows:
    """Indexed by row. is_greedy, is_filtered (top-p, top-k or min-p), is_bounded (the first SLICE candidates settle it) and
    edits are on the host."""

    def __init__(self, max_rows: int, vocab_size: int, device: Device, kernels: InputKernels = TORCH_INPUTS) -> None:
        self.vocab_size = vocab_size
        self.is_greedy = np.zeros(max_rows, dtype=bool)
        self.is_filtered = np.zeros(max_rows, dtype=bool)
        self.is_bounded = np.zeros(max_rows, dtype=bool)
        self.edits: list[RowEdits | None] = [None] * max_rows
        self._device = device
        self._numbers = StagedRows(max_rows, len(_NUMBERS), torch.float64, device, kernels)
        self._integers = StagedRows(max_rows, 2, torch.int64, device, kernels)

    def add(self, row: int, new: NewRow) -> None:
        params = new.sampling
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self.is_greedy[row] = params.greedy
        self.is_filtered[row] = top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self.is_bounded[row] = 0 < top_k <= SLICE
        self._numbers.write(row, 0, [getattr(params, name) for name in _NUMBERS])
        self._integers.write(row, 0, [params.seed or 0, top_k])
        self.edits[row] = self._edits(new)

    def clear(self, row: int) -> None:
        self.is_greedy[row] = self.is_filtered[row] = self.is_bounded[row] = False
        self.edits[row] = None
        self._numbers.clear(row, self._numbers.width)
        self._integers.clear(row, self._integers.width)

    def apply(self) -> None:
        self._numbers.apply()
        self._integers.apply()

    def gather(self, row_R: Tensor) -> SamplingNumbers:
        temperature_R, top_p_R, min_p_R, repetition_R, frequency_R, presence_R = self._numbers.tensor[row_R].unbind(1)
        seed_R, top_k_R = self._integers.tensor[row_R].unbind(1)
        return SamplingNumbers(
            temperature_R.float(),
            top_p_R,
            min_p_R,
            repetition_R.float(),
            frequency_R.float(),
            presence_R.float(),
            seed_R,
            top_k_R,
        )

    def _edits(self, new: NewRow) -> RowEdits | None:
        params = new.sampling
        penalises = params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        bias = {token: value for token, value in (params.logit_bias or {}).items() if 0 <= token < self.vocab_size}
        bad_words = [word for word in new.bad_words_token_ids if word and 0 <= word[-1] < self.vocab_size]
        delays_stop = params.min_tokens > 0 and bool(new.stop_token_ids)
        if not (penalises or bias or bad_words or delays_stop or params.allowed_token_ids is not None):
            return None
        bad_prefix_WP, bad_last_W = self._bad_words(bad_words) if bad_words else (None, None)
        return RowEdits(
            bias_ids=self._tensor(list(bias)) if bias else None,
            bias_values=self._device.upload(np.array(list(bias.values()), dtype=np.float32)) if bias else None,
            allowed_ids=None if params.allowed_token_ids is None else self._ids(params.allowed_token_ids),
            stop_ids=self._ids(new.stop_token_ids) if delays_stop else None,
            bad_prefix_WP=bad_prefix_WP,
            bad_last_W=bad_last_W,
            penalises=penalises,
            min_tokens=params.min_tokens,
        )

    def _bad_words(self, words: list[list[int]]) -> tuple[Tensor, Tensor]:
        width = max(len(word) for word in words) - 1
        prefixes = [[-1] * (width - len(word) + 1) + word[:-1] for word in words]
        return self._tensor(prefixes).view(len(words), width), self._tensor([word[-1] for word in words])

    def _ids(self, token_ids: Iterable[int]) -> Tensor:
        """Ids outside the logits' width can never be chosen, so leaving them out changes nothing."""
        return self._tensor(sorted({token for token in token_ids if 0 <= token < self.vocab_size}))

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return self._device.upload(np.array(values, dtype=np.int64))
