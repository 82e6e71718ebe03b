"""Log probabilities of chosen tokens and of their best alternatives, as the wire type.

Shape letters: N positions, V vocabulary, K alternatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.types import TokenLogprobs


def token_logprobs(
    scores_NV: Tensor, token_N: Tensor, num_top: int, *, normalise: bool = True, listed_ids: list[int] | None = None
) -> list[TokenLogprobs]:
    """One entry per position for `token_N` (int64).

    scores_NV: logits; normalise=False reports them as they are. num_top: how many alternatives, best first; -1 is all.
    listed_ids replaces the best alternatives by these tokens, in their order.
    """
    if normalise:
        scores_NV = torch.log_softmax(scores_NV.float(), dim=1)
    chosen_N1 = scores_NV.gather(1, token_N[:, None])
    rank_N = (scores_NV > chosen_N1).sum(1) + 1
    if listed_ids is not None:
        top_ids = [listed_ids] * len(token_N)
        top_values = scores_NV[:, torch.tensor(listed_ids, device=scores_NV.device)].tolist()
    else:
        count = scores_NV.shape[1] if num_top == -1 else min(num_top, scores_NV.shape[1])
        values_NK, ids_NK = scores_NV.topk(count, dim=1)
        top_ids, top_values = ids_NK.tolist(), values_NK.tolist()
    columns = zip(token_N.tolist(), chosen_N1[:, 0].tolist(), rank_N.tolist(), top_ids, top_values, strict=True)
    return [TokenLogprobs(*column) for column in columns]
