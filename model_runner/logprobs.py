"""Log probabilities of chosen tokens and of their alternatives: looked up on the device, made into the wire type on the host.

One call serves all positions of a step, whatever each of them asks. Knows logits and token ids; knows no rows.
Called by the step's sampling.

Shape letters: N positions, V vocabulary, K alternatives, M named alternatives of all positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from halfbyte.model_runner.device import HOST, Device
from halfbyte.model_runner.sampling_kernels import TORCH_SAMPLING, SamplingKernels
from halfbyte.types import TokenLogprobs

# What to list at a position: so many of the best (-1 is all), or these token ids in their order.
Listed = int | Sequence[int]

# Positions that list more than this are sorted apart, so that they do not widen the others' lists.
_WIDE = 256

_Alternatives = tuple[list[int], list[float]]  # token ids, values


@dataclass(slots=True)
class Lookup:
    """What was looked up at N positions. tensors: token, value and rank of each; ids and values of each group of `counts`;
    then the values of the named ids. counts: per group, position -> alternatives. named: position -> ids."""

    num_positions: int
    tensors: list[Tensor]
    counts: list[dict[int, int]] = field(default_factory=list)
    named: dict[int, list[int]] = field(default_factory=dict)

    def entries(self, arrays: Sequence[np.ndarray]) -> list[TokenLogprobs]:
        """One entry per position. arrays: the tensors, on the host."""
        token_N, value_N, rank_N, *rest = arrays
        alternatives: list[_Alternatives] = [([], []) for _ in range(self.num_positions)]
        left = iter(rest)
        for counts in self.counts:
            ids_NK, values_NK = next(left), next(left)
            for (at, count), ids, values in zip(counts.items(), ids_NK.tolist(), values_NK.tolist(), strict=True):
                alternatives[at] = ids[:count], values[:count]
        if self.named:
            values_of_ids = iter(next(left).tolist())
            for at, ids in self.named.items():
                alternatives[at] = ids, [next(values_of_ids) for _ in ids]
        columns = zip(token_N.tolist(), value_N.tolist(), rank_N.tolist(), alternatives, strict=True)
        return [TokenLogprobs(token, value, rank, ids, values) for token, value, rank, (ids, values) in columns]


def look_up(
    scores_NV: Tensor,
    token_N: Tensor,
    listed: Sequence[Listed],
    *,
    normalise: bool = True,
    kernels: SamplingKernels = TORCH_SAMPLING,
    device: Device = HOST,
) -> Lookup:
    """For `token_N` (int64) at each position. scores_NV: logits, float32; normalise=False reports them as they are.

    Rank and order are those of the logits: log probabilities round neighbours to equal values. The rank counts strictly better
    tokens, so equal ones share it. -inf is a value like any other.
    """
    assert len(listed) == len(token_N)
    at_N = torch.arange(len(token_N), device=scores_NV.device)
    normaliser_N = kernels.log_normaliser(scores_NV, at_N, None) if normalise else torch.zeros_like(at_N, dtype=torch.float64)
    chosen_N = (scores_NV[at_N, token_N] - normaliser_N).float()
    found = Lookup(len(listed), [token_N, chosen_N, kernels.rank(scores_NV, token_N)])
    vocab_size = scores_NV.shape[1]
    counts = {
        at: vocab_size if ask == -1 else min(ask, vocab_size) for at, ask in enumerate(listed) if isinstance(ask, int) and ask
    }
    narrow = {at: n for at, n in counts.items() if n <= _WIDE}
    for group in (narrow, {at: n for at, n in counts.items() if at not in narrow}):
        if group:
            index = device.upload(np.array(list(group), dtype=np.int64))
            scores_NK, ids_NK = kernels.ordered_top(scores_NV, index, None, max(group.values()))
            found.counts.append(group)
            found.tensors += ids_NK, (scores_NK - normaliser_N[index, None]).float()
    found.named = {at: list(ask) for at, ask in enumerate(listed) if not isinstance(ask, int)}
    if found.named:
        found.tensors.append(_named_values(scores_NV, normaliser_N, found.named, device))
    return found


def _named_values(scores_NV: Tensor, normaliser_N: Tensor, named: dict[int, list[int]], device: Device) -> Tensor:
    """float32 [M]. An id outside the vocabulary has -inf, not another's value."""
    at_M = [at for at, ids in named.items() for _ in ids]
    ids_M = [token for ids in named.values() for token in ids]
    index_2M = device.upload(np.array([at_M, ids_M], dtype=np.int64))
    known_M = (index_2M[1] >= 0) & (index_2M[1] < scores_NV.shape[1])
    scores_M = scores_NV[index_2M[0], torch.where(known_M, index_2M[1], 0)]
    values_M = (scores_M - normaliser_N[index_2M[0]]).float()
    return torch.where(known_M, values_M, -torch.inf)


def token_logprobs(
    scores_NV: Tensor,
    token_N: Tensor,
    listed: Sequence[Listed],
    *,
    normalise: bool = True,
    kernels: SamplingKernels = TORCH_SAMPLING,
    device: Device = HOST,
) -> list[TokenLogprobs]:
    """`look_up` for whoever wants to wait for it."""
    found = look_up(scores_NV, token_N, listed, normalise=normalise, kernels=kernels, device=device)
    return found.entries(device.download(found.tensors).wait())
