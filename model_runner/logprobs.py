"""Log probabilities of chosen tokens and of their alternatives, as the wire type.

One call serves all positions of a step, whatever each of them asks. Knows logits and token ids; knows no rows.
Called by the runner.

Shape letters: N positions, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfbyte.model_runner.sampler import TORCH_SAMPLING, SamplingKernels
from halfbyte.types import TokenLogprobs

# What to list at a position: so many of the best (-1 is all), or these token ids in their order.
Listed = int | Sequence[int]

# Positions that list more than this are sorted apart, so that they do not widen the others' lists.
_WIDE = 256


def token_logprobs(
    scores_NV: Tensor,
    token_N: Tensor,
    listed: Sequence[Listed],
    *,
    normalise: bool = True,
    kernels: SamplingKernels = TORCH_SAMPLING,
) -> list[TokenLogprobs]:
    """One entry per position for `token_N` (int64). scores_NV: logits, float32; normalise=False reports them as they are.

    Rank and order are those of the logits: log probabilities round neighbours to equal values. The rank counts strictly better
    tokens, so equal ones share it. -inf is a value like any other.
    """
    assert len(listed) == len(token_N)
    at_N = torch.arange(len(token_N), device=scores_NV.device)
    normaliser_N = kernels.log_normaliser(scores_NV, at_N, None) if normalise else torch.zeros_like(at_N, dtype=torch.float64)
    chosen_N = (scores_NV[at_N, token_N] - normaliser_N).float()
    rank_N = kernels.rank(scores_NV, token_N)
    alternatives = _alternatives(scores_NV, normaliser_N, listed, kernels)
    columns = zip(token_N.tolist(), chosen_N.tolist(), rank_N.tolist(), alternatives, strict=True)
    return [TokenLogprobs(token, value, rank, ids, values) for token, value, rank, (ids, values) in columns]


def _alternatives(
    scores_NV: Tensor, normaliser_N: Tensor, listed: Sequence[Listed], kernels: SamplingKernels
) -> list[tuple[list[int], list[float]]]:
    """(token ids, values) that each position lists. An id outside the vocabulary has -inf, not another's value."""
    vocab_size = scores_NV.shape[1]
    result: list[tuple[list[int], list[float]]] = [([], []) for _ in listed]
    counts = {
        at: vocab_size if ask == -1 else min(ask, vocab_size) for at, ask in enumerate(listed) if isinstance(ask, int) and ask
    }
    for group in ([at for at, n in counts.items() if n <= _WIDE], [at for at, n in counts.items() if n > _WIDE]):
        if group:
            index = torch.tensor(group, device=scores_NV.device)
            scores_NK, ids_NK = kernels.ordered_top(scores_NV, index, None, max(counts[at] for at in group))
            values_NK = (scores_NK - normaliser_N[index, None]).float()
            for at, ids, values in zip(group, ids_NK.tolist(), values_NK.tolist(), strict=True):
                result[at] = ids[: counts[at]], values[: counts[at]]
    named = [(at, list(ask)) for at, ask in enumerate(listed) if not isinstance(ask, int)]
    if named:
        at_N = [at for at, ids in named for _ in ids]
        ids_N = [token for _, ids in named for token in ids]
        index_2N = torch.tensor([at_N, ids_N], dtype=torch.int64, device=scores_NV.device)
        known_N = (index_2N[1] >= 0) & (index_2N[1] < vocab_size)
        scores_N = scores_NV[index_2N[0], torch.where(known_N, index_2N[1], 0)]
        values_N = (scores_N - normaliser_N[index_2N[0]]).float()
        values_of_ids = iter(torch.where(known_N, values_N, -torch.inf).tolist())
        for at, ids in named:
            result[at] = ids, [next(values_of_ids) for _ in ids]
    return result
