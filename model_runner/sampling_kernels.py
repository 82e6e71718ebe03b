"""What choosing tokens needs of a device: the interface, and the laws behind it.

A device's kernels decide also what is done with rows that few candidates do not settle, since that depends on whether the host
may look which they are. Knows tensors; knows no requests. Chosen by the runner, called by the sampler and for log probabilities.

Shape letters: R rows of the batch, N rows that are asked for, V vocabulary, K candidates, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.kernels import sampling as law
from halfbyte.kernels.sampling import rows_at_a_time


class ChooseUnsettled(Protocol):
    """As its law, `kernels.sampling.choose_unsettled_`."""

    def __call__(
        self,
        token_N: Tensor,
        settled_N: Tensor,
        logits_RV: Tensor,
        at_N: Tensor,
        temperature_N: Tensor,
        top_k_N: Tensor,
        top_p_N: Tensor,
        min_p_N: Tensor,
        seed_N: Tensor,
        position_N: Tensor,
    ) -> None: ...


class SamplingKernels(Protocol):
    """On float32 logits. Rows `at_N` are divided by `temperature_N` (None: 1) first. Each row's result is that of the row alone.

    No function changes its logits, but for `penalise_`.
    """

    @property
    def max_candidates(self) -> int:
        """How many candidates, of all rows together, should be filtered at a time."""
        ...

    @property
    def choose_unsettled_(self) -> ChooseUnsettled | None:
        """None where the host may look which rows are settled: it gives the others more candidates."""
        ...

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

    def count_kept(
        self, values_NK: Tensor, normaliser_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor, vocab_size: int, /
    ) -> tuple[Tensor, Tensor]:
        """As its law, `kernels.sampling.count_kept`."""
        ...

    def penalise_(
        self,
        logits_RV: Tensor,
        at_N: Tensor,
        token_ids: Tensor,
        row_N: Tensor,
        num_prompt_N: Tensor,
        num_tokens_N: Tensor,
        repetition_N: Tensor,
        frequency_N: Tensor,
        presence_N: Tensor,
        max_tokens: int,
    ) -> None:
        """As its law, `kernels.sampling.penalise_rows_`."""
        ...

    def rank(self, logits_RV: Tensor, token_R: Tensor) -> Tensor:
        """1 and the number of logits larger than that of the row's token, int64 [R]."""
        ...


class TorchSampling:
    """The laws; as many rows at a time as their temporary tensors should hold. is_host: whether tensors are the host's memory."""

    count_kept = staticmethod(law.count_kept)
    penalise_ = staticmethod(law.penalise_rows_)

    def __init__(self, *, is_host: bool) -> None:
        # On a CPU candidates should stay in its caches; elsewhere few large operations are better.
        self.max_candidates = 1 << 20 if is_host else 1 << 24
        self.choose_unsettled_: ChooseUnsettled | None = None if is_host else law.choose_unsettled_

    def best(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        # The maximum of a row with a NaN is NaN.
        return logits_RV.argmax(1), logits_RV.amax(1).isfinite()

    def noisy_best(self, logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor, seed_N: Tensor, position_N: Tensor) -> Tensor:
        ids_1V = torch.arange(logits_RV.shape[1], device=logits_RV.device)[None]
        scaled = _scaled(logits_RV, at_N, temperature_N)
        return torch.cat([law.gumbel_noise(seed_N[n], position_N[n], ids_1V).add_(part_NV).argmax(1) for n, part_NV in scaled])

    def gumbel_noise(self, seed_N: Tensor, position_N: Tensor, ids_NK: Tensor) -> Tensor:
        return law.gumbel_noise(seed_N, position_N, ids_NK)

    def ordered_top(self, logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        parts = [law.ordered_top(part_NV, count) for _, part_NV in _scaled(logits_RV, at_N, temperature_N)]
        return torch.cat([values for values, _ in parts]), torch.cat([ids for _, ids in parts])

    def log_normaliser(self, logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor | None) -> Tensor:
        return torch.cat([law.log_normaliser(part_NV) for _, part_NV in _scaled(logits_RV, at_N, temperature_N)])

    def rank(self, logits_RV: Tensor, token_R: Tensor) -> Tensor:
        return (logits_RV > logits_RV.gather(1, token_R[:, None])).sum(1) + 1


def _scaled(logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    step = rows_at_a_time(logits_RV)
    for start in range(0, len(at_N), step):
        part = slice(start, start + step)
        rows_NV = logits_RV[at_N[part]]
        yield part, rows_NV if temperature_N is None else rows_NV.div_(temperature_N[part, None])


TORCH_SAMPLING = TorchSampling(is_host=True)
