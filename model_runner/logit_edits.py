"""What rows ask of their logits before temperature: bias, allowed ids, minimum length, penalties, bad words, grammar masks.

Each function takes the batch's logits and the rows that ask for it, and edits all of them at once, in place. Knows rows and
their token lists; chooses nothing. Called by the sampler, in the order in which they stand here.

Shape letters: R rows of the batch, V vocabulary, N rows or (row, token) pairs, L tokens of a row, W words of mask bits,
P tokens before the last one of a bad word.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from halfbyte.kernels.sampling import rows_at_a_time
from halfbyte.model_runner.device import Device
from halfbyte.model_runner.request_rows import RequestRows
from halfbyte.model_runner.sampling_kernels import SamplingKernels
from halfbyte.model_runner.sampling_rows import RowEdits

_MASK_BITS = 32

# (place in the batch, what the row asks)
Asked = Sequence[tuple[int, RowEdits]]


def edit_logits(
    logits_RV: Tensor, rows: RequestRows, row_R: np.ndarray, grammar_mask_RW: Tensor | None, kernels: SamplingKernels
) -> bool:
    """Apply everything that the rows ask, in place. False when there was nothing to do."""
    asked = [(at, edits) for at, row in enumerate(row_R.tolist()) if (edits := rows.sampling.edits[row]) is not None]
    if asked:
        _add_bias(logits_RV, rows.device, asked)
        _keep_allowed(logits_RV, rows.device, asked)
        num_output_R = rows.num_tokens[row_R] - rows.num_prompt_tokens[row_R]
        early = [(at, edits) for at, edits in asked if num_output_R[at] < edits.min_tokens]
        _delay_stop(logits_RV, rows.device, early)
        _penalise(logits_RV, rows, row_R, [at for at, edits in asked if edits.penalises], kernels)
        _forbid_bad_words(logits_RV, rows, row_R, asked)
    if grammar_mask_RW is not None:
        logits_RV.masked_fill_(~unpack_bits(grammar_mask_RW, logits_RV.shape[1]), -torch.inf)
    return bool(asked) or grammar_mask_RW is not None


def unpack_bits(mask_RW: Tensor, vocab_size: int) -> Tensor:
    """bool [R, V] from int32 words, lowest bit first: bit i of word w is token 32 w + i, 1 = allowed."""
    bit = torch.arange(_MASK_BITS, dtype=torch.int32, device=mask_RW.device)
    return ((mask_RW[:, :, None] >> bit) & 1).bool().flatten(1)[:, :vocab_size]


def _add_bias(logits_RV: Tensor, device: Device, asked: Asked) -> None:
    biased = [(at, edits.bias_ids, edits.bias_values) for at, edits in asked if edits.bias_ids is not None]
    if biased:
        at_N, ids_N = _pairs(device, [(at, ids) for at, ids, _ in biased])
        values_N = torch.cat([values for _, _, values in biased if values is not None])
        logits_RV.index_put_((at_N, ids_N), values_N, accumulate=True)


def _keep_allowed(logits_RV: Tensor, device: Device, asked: Asked) -> None:
    limited = [(at, edits.allowed_ids) for at, edits in asked if edits.allowed_ids is not None]
    if limited:
        at_N, ids_N = _pairs(device, limited)
        kept_N = logits_RV[at_N, ids_N]
        logits_RV.index_fill_(0, device.upload(np.array([at for at, _ in limited], dtype=np.int64)), -torch.inf)
        logits_RV[at_N, ids_N] = kept_N


def _delay_stop(logits_RV: Tensor, device: Device, asked: Asked) -> None:
    early = [(at, edits.stop_ids) for at, edits in asked if edits.stop_ids is not None]
    if early:
        at_N, ids_N = _pairs(device, early)
        logits_RV.index_put_((at_N, ids_N), logits_RV.new_full((), -torch.inf))


def _penalise(logits_RV: Tensor, rows: RequestRows, row_R: np.ndarray, at: list[int], kernels: SamplingKernels) -> None:
    step = rows_at_a_time(logits_RV)
    for start in range(0, len(at), step):
        some = np.array(at[start : start + step])
        row_N = row_R[some]
        num_tokens_N = rows.num_tokens[row_N]
        table = rows.device.upload(np.stack([some, row_N, rows.num_prompt_tokens[row_N], num_tokens_N]))
        numbers = rows.sampling.gather(table[1])
        kernels.penalise_(
            logits_RV,
            table[0],
            rows.token_ids,
            row_N=table[1],
            num_prompt_N=table[2],
            num_tokens_N=table[3],
            repetition_N=numbers.repetition_R,
            frequency_N=numbers.frequency_R,
            presence_N=numbers.presence_R,
            max_tokens=int(num_tokens_N.max()),
        )


def _forbid_bad_words(logits_RV: Tensor, rows: RequestRows, row_R: np.ndarray, asked: Asked) -> None:
    """The last token of each word whose other tokens end the output. Words do not begin in the prompt."""
    words = [(at, e.bad_prefix_WP, e.bad_last_W) for at, e in asked if e.bad_prefix_WP is not None and e.bad_last_W is not None]
    if not words:
        return
    at_N, last_N = _pairs(rows.device, [(at, last) for at, _, last in words])
    width = max(prefix.shape[1] for _, prefix, _ in words)
    prefix_NP = torch.cat([F.pad(prefix, (width - prefix.shape[1], 0), value=-1) for _, prefix, _ in words])
    table = rows.device.upload(np.stack([row_R, rows.num_prompt_tokens[row_R], rows.num_tokens[row_R]]))
    row_N, num_prompt_N, num_tokens_N = table[:, at_N]
    position_NP = num_tokens_N[:, None] - width + torch.arange(width, device=logits_RV.device)
    token_NP = rows.token_ids[row_N[:, None], position_NP.clamp(min=0)]
    token_NP = token_NP.masked_fill(position_NP < num_prompt_N[:, None], -2)  # equal to no token and no padding
    matches_N = ((prefix_NP == token_NP) | (prefix_NP == -1)).all(1)
    logits_RV.index_put_((at_N, last_N), torch.where(matches_N, -torch.inf, 0.0).to(logits_RV), accumulate=True)


def _pairs(device: Device, lists: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """(place, token id) of every token in every row's list."""
    at = np.repeat([at for at, _ in lists], [len(ids) for _, ids in lists])
    ids_N = torch.cat([ids for _, ids in lists])
    return device.upload(at), ids_N
