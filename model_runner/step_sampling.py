"""From the hidden states of a step to what is wanted of them: tokens, log probabilities, and those of the prompt.

Launches everything and waits for nothing; few positions at a time have logits. The tokens go to their rows at once, on the
device, also those of requests that turn out to have no numbers: such a request ends before its token is delivered. Knows rows,
the model's head and the sampler; knows no attention. Called by the runner.

Shape letters: T tokens of the step, R requests that sample, N positions that want logits, E hidden, V vocabulary.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from halfbyte.model_runner.cpu_model import CpuModel
from halfbyte.model_runner.device import Device
from halfbyte.model_runner.input_batch import InputBatch
from halfbyte.model_runner.layers.model import Model
from halfbyte.model_runner.logprobs import Listed, look_up
from halfbyte.model_runner.pending import PendingStep
from halfbyte.model_runner.request_rows import RequestRows
from halfbyte.model_runner.sampler import Sampler
from halfbyte.model_runner.sampling_kernels import SamplingKernels
from halfbyte.types import SamplingParams

# float32 logits that exist at a time: what a CPU finishes at once, and what keeps a GPU busy
_LOGITS_BYTES_HOST = 64 << 20
_LOGITS_BYTES = 256 << 20


class StepSampling:
    """Stateless but for the rows. mode: one of `LOGPROBS_MODES`."""

    def __init__(self, model: Model | CpuModel, rows: RequestRows, kernels: SamplingKernels, mode: str) -> None:
        self._model = model
        self._rows = rows
        self._kernels = kernels
        self._is_raw = mode.startswith("raw")
        self._normalises = mode.endswith("logprobs")
        self._sampler = Sampler(rows, keep_processed=not self._is_raw, kernels=kernels)

    def __call__(self, batch: InputBatch, hidden_TE: Tensor, grammar_mask: np.ndarray | None) -> PendingStep:
        """grammar_mask: int32 [requests of the step; ceil(V / 32)]."""
        pending = PendingStep(batch.request_ids)
        self._prompt_logprobs(pending, batch, hidden_TE)
        sampling, step = np.flatnonzero(batch.samples_R), self._num_logits
        if grammar_mask is None and self._needs_only_best(batch.row_R[sampling]):
            self._take_best(pending, batch, hidden_TE, sampling)
            sampling = sampling[:0]
        for start in range(0, len(sampling), step):
            self._sample_rows(pending, batch, hidden_TE, sampling[start : start + step], grammar_mask)
        pending.send(self._device)
        return pending

    @property
    def _device(self) -> Device:
        return self._rows.device

    @property
    def _num_logits(self) -> int:
        """Positions whose logits are computed at a time."""
        num_bytes = _LOGITS_BYTES_HOST if self._device.is_host else _LOGITS_BYTES
        return max(1, num_bytes // (4 * self._model.config.vocab_size))

    def _logits(self, hidden_TE: Tensor, at: np.ndarray) -> Tensor:
        """float32 logits [N, V] of the step's tokens at `at`."""
        return self._model.compute_logits(hidden_TE[self._device.upload(at)])

    def _needs_only_best(self, row_R: np.ndarray) -> bool:
        """Whether these rows are served by the token of the greatest logit, so that no logits have to be made."""
        sampling = self._rows.sampling
        if not len(row_R) or not isinstance(self._model, CpuModel) or not sampling.is_greedy[row_R].all():
            return False
        rows = row_R.tolist()
        return all(sampling.edits[row] is None and self._rows.request(row).sampling.logprobs is None for row in rows)

    def _take_best(self, pending: PendingStep, batch: InputBatch, hidden_TE: Tensor, at: np.ndarray) -> None:
        """`_sample_rows` for rows that need only the best token."""
        assert isinstance(self._model, CpuModel)
        token_R, best_R = self._model.best_tokens(hidden_TE[self._device.upload(batch.last_R[at])])
        self._rows.append(batch.row_R[at], token_R)
        pending.want_tokens(at.tolist(), token_R, best_R.isfinite())

    def _sample_rows(
        self, pending: PendingStep, batch: InputBatch, hidden_TE: Tensor, at: np.ndarray, grammar_mask: np.ndarray | None
    ) -> None:
        """Tokens and log probabilities for the requests at `at` of the batch."""
        row_R, places = batch.row_R[at], at.tolist()
        logits_RV = self._logits(hidden_TE, batch.last_R[at])
        mask_RW = None if grammar_mask is None else self._device.upload(grammar_mask[at])
        requests = [self._rows.request(row) for row in row_R.tolist()]
        wanted = [i for i, request in enumerate(requests) if request.sampling.logprobs is not None]
        index_N = self._device.upload(np.array(wanted, dtype=np.int64)) if wanted else None
        scores_NV = logits_RV[index_N] if index_N is not None and self._is_raw else None
        sampled = self._sampler.sample(logits_RV, row_R, mask_RW)
        self._rows.append(row_R, sampled.token_R)
        pending.want_tokens(places, sampled.token_R, sampled.finite_R)
        if index_N is None:
            return
        if scores_NV is None:
            assert sampled.processed_RV is not None, "kept for modes that are not raw"
            scores_NV = sampled.processed_RV[index_N]
        listed = [_listed(requests[i].sampling) for i in wanted]
        found = look_up(
            scores_NV,
            sampled.token_R[index_N],
            listed,
            normalise=self._normalises,
            kernels=self._kernels,
            device=self._device,
        )
        pending.want_logprobs([places[i] for i in wanted], found)

    def _prompt_logprobs(self, pending: PendingStep, batch: InputBatch, hidden_TE: Tensor) -> None:
        """Entries of the prompt tokens that follow this step's prompt positions, for the requests that want them.

        A request that comes back with output tokens has had its entries.
        """
        owners: list[int] = []
        at, targets, listed = [], [], []
        for place, row in enumerate(batch.row_R.tolist()):
            request = self._rows.request(row)
            ask = request.sampling.prompt_logprobs
            if ask is None or len(request.token_ids) > request.num_prompt_tokens:
                continue
            computed = int(batch.num_computed_R[place])
            count = min(int(batch.num_scheduled_R[place]), request.num_prompt_tokens - 1 - computed)
            if count > 0:
                owners += [place] * count
                listed += [ask] * count
                at.append(int(batch.first_R[place]) + np.arange(count))
                targets += request.token_ids[computed + 1 : computed + 1 + count]
        if not owners:
            return
        at_N, target_N = np.concatenate(at), self._device.upload(np.array(targets, dtype=np.int64))
        for start in range(0, len(owners), self._num_logits):
            part = slice(start, start + self._num_logits)
            logits_NV = self._logits(hidden_TE, at_N[part].copy())
            finite_N = self._kernels.best(logits_NV)[1]
            found = look_up(
                logits_NV,
                target_N[part],
                listed[part],
                normalise=self._normalises,
                kernels=self._kernels,
                device=self._device,
            )
            pending.want_prompt_logprobs(owners[part], found, finite_N)
            pending.send(self._device)  # at once: prompts are long, and may want the whole vocabulary


def _listed(params: SamplingParams) -> Listed:
    return params.logprobs or 0 if params.logprob_token_ids is None else params.logprob_token_ids
