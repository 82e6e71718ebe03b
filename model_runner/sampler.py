"""From logits to tokens: adjust, filter, choose. One pipeline for all rows; what no row asks for costs nothing.

Order: bias, allowed ids and the minimum length; penalties; bad words; grammar mask; temperature; min-p, top-k, top-p; noise.
Greedy rows take the largest logit after the mask (the lowest id among equals). Knows rows and their parameters; knows no
model. Called by the runner.

Shape letters: R rows that sample, V vocabulary, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halfbyte.kernels.sampling import SLICE, filter_threshold, gumbel_noise
from halfbyte.model_runner.request_rows import RequestRows
from halfbyte.types import NewRow, SamplingParams

_WORD_BITS = 32


@dataclass(slots=True)
class Sampled:
    """token_R int64; finite_R: False where the logits were no numbers. processed_RV: what was sampled from, if wanted."""

    token_R: Tensor
    finite_R: Tensor
    processed_RV: Tensor | None


class Sampler:
    """Stateless but for the rows it reads."""

    def __init__(self, rows: RequestRows, *, keep_processed: bool) -> None:
        self._rows = rows
        self._keep_processed = keep_processed

    def sample(self, logits_RV: Tensor, row_R: np.ndarray, grammar_mask_RW: Tensor | None = None) -> Sampled:
        """Choose one token per row. `logits_RV` float32 may be changed in place.

        grammar_mask_RW: int32 bits, 1 = allowed, bit i of word w is token 32 w + i; rows without a grammar are all ones.
        """
        finite_R = torch.isfinite(logits_RV.amax(1)) & ~torch.isnan(logits_RV).any(1)
        requests = [self._rows.request(row) for row in row_R.tolist()]
        for index, (row, request) in enumerate(zip(row_R.tolist(), requests, strict=True)):
            self._adjust(logits_RV[index], row, request)
        if grammar_mask_RW is not None:
            logits_RV.masked_fill_(~unpack_bits(grammar_mask_RW, logits_RV.shape[1]), -torch.inf)
        random = [i for i, request in enumerate(requests) if not request.sampling.greedy]
        token_R = logits_RV.argmax(1)
        processed_RV = logits_RV if self._keep_processed else None
        if random:
            index_R = torch.tensor(random, device=logits_RV.device)
            scaled_RV, tokens = self._choose(logits_RV[index_R], [requests[i].sampling for i in random], row_R[random])
            token_R[index_R] = tokens
            if processed_RV is not None:
                processed_RV[index_R] = scaled_RV
        return Sampled(token_R, finite_R, processed_RV)

    def _adjust(self, logits_V: Tensor, row: int, request: NewRow) -> None:
        """What one row asks of its logits before temperature, in place."""
        params = request.sampling
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits_V.device)
            logits_V[ids] += torch.tensor(list(params.logit_bias.values()), device=logits_V.device)
        if params.allowed_token_ids is not None:
            allowed = torch.zeros_like(logits_V, dtype=torch.bool)
            allowed[torch.tensor(params.allowed_token_ids, device=logits_V.device)] = True
            logits_V.masked_fill_(~allowed, -torch.inf)
        output = self._rows.output(row)
        if request.stop_token_ids and len(output) < params.min_tokens:
            logits_V[torch.tensor(sorted(request.stop_token_ids), device=logits_V.device)] = -torch.inf
        if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
            _penalise(logits_V, self._rows.prompt(row), output, params)
        for word in request.bad_words_token_ids:
            prefix = word[:-1]
            if not prefix or output[-len(prefix) :].tolist() == prefix:
                logits_V[word[-1]] = -torch.inf

    def _choose(self, logits_RV: Tensor, params: list[SamplingParams], row_R: np.ndarray) -> tuple[Tensor, Tensor]:
        """(logits after temperature and filters, tokens) of rows that sample at random."""
        device = logits_RV.device
        temperature_R = torch.tensor([p.temperature for p in params], device=device)
        seed_R = torch.tensor([p.seed or 0 for p in params], device=device)
        position_R = torch.from_numpy(self._rows.num_tokens[row_R]).to(device)
        scaled_RV = logits_RV / temperature_R[:, None]
        token_R = torch.empty(len(params), dtype=torch.int64, device=device)
        threshold_R = torch.full_like(temperature_R, -torch.inf)
        filtered = [i for i, p in enumerate(params) if p.top_p < 1.0 or p.min_p > 0.0 or 0 < p.top_k < logits_RV.shape[1]]
        unfiltered = sorted(set(range(len(params))) - set(filtered))
        left = filtered
        for width in (SLICE, logits_RV.shape[1]):
            if not left:
                break
            index_R = torch.tensor(left, device=device)
            values_RK, ids_RK = scaled_RV[index_R].topk(min(width, logits_RV.shape[1]), dim=1)
            threshold, settled = _thresholds(scaled_RV[index_R], values_RK, [params[i] for i in left])
            noise_RK = gumbel_noise(seed_R[index_R], position_R[index_R], ids_RK)
            best_R = torch.where(values_RK >= threshold[:, None], values_RK + noise_RK, -torch.inf).argmax(1)
            done = index_R[settled]
            token_R[done] = ids_RK.gather(1, best_R[:, None])[settled, 0]
            threshold_R[done] = threshold[settled]
            left = index_R[~settled].tolist()
        all_ids_1V = torch.arange(logits_RV.shape[1], device=device)[None]
        for i in unfiltered:
            token_R[i] = (scaled_RV[i : i + 1] + gumbel_noise(seed_R[i : i + 1], position_R[i : i + 1], all_ids_1V)).argmax()
        if self._keep_processed:
            scaled_RV.masked_fill_(scaled_RV < threshold_R[:, None], -torch.inf)
        return scaled_RV, token_R


def unpack_bits(mask_RW: Tensor, vocab_size: int) -> Tensor:
    """bool [R, V] from int32 words, lowest bit first."""
    bit = torch.arange(_WORD_BITS, dtype=torch.int32, device=mask_RW.device)
    return ((mask_RW[:, :, None] >> bit) & 1).bool().flatten(1)[:, :vocab_size]


def _thresholds(scaled_RV: Tensor, values_RK: Tensor, params: list[SamplingParams]) -> tuple[Tensor, Tensor]:
    device = scaled_RV.device
    return filter_threshold(
        values_RK,
        torch.logsumexp(scaled_RV, 1),
        torch.tensor([p.top_k for p in params], device=device),
        torch.tensor([p.top_p for p in params], device=device),
        torch.tensor([p.min_p for p in params], device=device),
        scaled_RV.shape[1],
    )


def _penalise(logits_V: Tensor, prompt: np.ndarray, output: np.ndarray, params: SamplingParams) -> None:
    """Repetition divides positive and multiplies negative logits of seen tokens; frequency and presence count the output's."""
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.concatenate([prompt, output])).astype(np.int64)).to(logits_V.device)
        values = logits_V[seen]
        logits_V[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if len(output) and (params.frequency_penalty or params.presence_penalty):
        unique, counts = np.unique(output, return_counts=True)
        ids = torch.from_numpy(unique.astype(np.int64)).to(logits_V.device)
        count = torch.from_numpy(counts).to(logits_V)
        logits_V[ids] -= params.frequency_penalty * count + params.presence_penalty
