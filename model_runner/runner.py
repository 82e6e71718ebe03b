"""`ModelRunner`: one device, one model, its KV cache; executes what the scheduler decided.

`execute` applies the difference to rows and block tables, builds one ragged batch and runs the forward pass; `sample` turns
the last hidden states into tokens. Knows nothing of requests' lives, text or sockets. Driven by the engine core, one thread.

Shape letters: T tokens of the step, R requests of the batch, N positions that want logits, E hidden, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from halfbyte.config import EngineConfig
from halfbyte.errors import Refusal, UnsupportedError
from halfbyte.kernels.attention import get_backend
from halfbyte.kernels.attention.base import AttentionBackend
from halfbyte.kvcache.formats import get_format
from halfbyte.kvcache.spec import KVCacheSpec, KVLayout, make_layout
from halfbyte.kvcache.tensors import KVTensors
from halfbyte.model_runner.block_tables import BlockTables
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.input_batch import InputBatch, attention_metadata, make_batch
from halfbyte.model_runner.layers.context import ForwardContext
from halfbyte.model_runner.layers.model import Model
from halfbyte.model_runner.loader import load_model
from halfbyte.model_runner.logprobs import token_logprobs
from halfbyte.model_runner.request_rows import RequestRows
from halfbyte.model_runner.sampler import Sampler
from halfbyte.model_runner.source import ModelFiles
from halfbyte.platform import Platform
from halfbyte.types import ModelRunnerOutput, NewRow, SamplingParams, SchedulerOutput, TokenLogprobs

# float32 logits of one chunk of prompt positions
_LOGITS_CHUNK_BYTES = 64 << 20


def load_runner(config: EngineConfig, files: ModelFiles, decoder: DecoderConfig, platform: Platform) -> ModelRunner:
    """Refuse what cannot run, then load the weights. The cache is allocated later, when its size is known."""
    backend = get_backend(config.attention_backend)
    if config.model.device == "cpu":
        torch.set_num_threads(config.model.num_threads)
    model, report = load_model(files, decoder, config.model.dtype, config.model.device, config.model.load_format, backend)
    lines = [f"weights: {report.num_tensors} tensors, {report.num_bytes:,} bytes in {config.model.dtype}"]
    if report.unused:
        lines.append(f"weights: {len(report.unused)} tensors of the file are not used: {', '.join(report.unused[:5])}")
    runner = ModelRunner(config, model, backend, lines)
    runner.refuse(platform)
    return runner


class ModelRunner:
    """Implements `halfbyte.types.Runner`. report: lines for the start-up log."""

    def __init__(self, config: EngineConfig, model: Model, backend: AttentionBackend, report: list[str] | None = None) -> None:
        self.report = report or []
        self.config = config
        self.model = model
        self.device = torch.device(config.model.device)
        self.kv_specs = kv_specs(model, config)
        self.layout: KVLayout = make_layout(self.kv_specs, _page_bytes)
        self._backend = backend
        self._windows = [group.spec.sliding_window for group in self.layout.groups]
        self._max_rows = config.scheduler.max_num_seqs
        self._mode = config.scheduler.logprobs_mode
        self._batch: InputBatch | None = None
        self._hidden_TE: Tensor | None = None

    def allocate_cache(self, num_blocks: int, max_model_len: int) -> None:
        """The KV cache of exactly `num_blocks` blocks, and rows for requests of up to `max_model_len` tokens."""
        self._tensors = KVTensors(self.layout, num_blocks, self.device)
        self._caches = [self._tensors.layer(i) for i in range(len(self.kv_specs))]
        self._rows = RequestRows(self._max_rows, max_model_len)
        self._tables = BlockTables(self.layout, self._max_rows, max_model_len)
        self._sampler = Sampler(self._rows, keep_processed=self._mode.startswith("processed"))

    @torch.inference_mode()
    def execute(self, scheduled: SchedulerOutput) -> None:
        """Run the forward pass of one step. A step without tokens only releases rows."""
        self._batch = self._hidden_TE = None
        self._apply(scheduled)
        if not scheduled.num_scheduled_tokens:
            return
        batch = make_batch(self._rows, scheduled.num_scheduled_tokens, self.device)
        metadata = [
            attention_metadata(batch, self._tables, group, self.layout.block_size, self.device)
            for group in range(len(self.layout.groups))
        ]
        for one, window in zip(metadata, self._windows, strict=True):
            self._backend.prepare(one, window)
        context = ForwardContext(metadata, self._caches, self.layout.group_of_layer)
        self._hidden_TE = self.model(batch.token_ids_T, batch.positions_T, context)
        self._batch = batch

    @torch.inference_mode()
    def sample(self, grammar_mask: Tensor | None = None) -> ModelRunnerOutput:
        """Tokens of the rows whose known tokens are all computed, and log probabilities where they were asked for."""
        batch, hidden_TE = self._batch, self._hidden_TE
        if batch is None or hidden_TE is None:
            return ModelRunnerOutput([], [], [])
        output = ModelRunnerOutput(batch.request_ids, [[] for _ in batch.request_ids], [None] * len(batch.request_ids))
        output.prompt_logprobs = self._prompt_logprobs(batch, hidden_TE)
        self._rows.num_computed_tokens[batch.row_R] += batch.num_scheduled_R
        sampling = np.flatnonzero(batch.samples_R)
        if len(sampling):
            self._sample_rows(output, batch, hidden_TE, sampling, grammar_mask)
        return output

    def warm_up(self) -> None:
        """A prompt and a decode through the code of real requests, so that the first of those is not the slow one.

        Uses one block per group, which any cache has.
        """
        num_tokens = min(self.layout.block_size, self._rows.token_ids.shape[1]) - 1
        if num_tokens < 1:
            return
        tables = [[1 + group] for group in range(len(self.layout.groups))]
        params = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
        new = NewRow("warm-up", [0] * num_tokens, num_tokens, 0, tables, params, frozenset())
        self.execute(SchedulerOutput(new_rows=[new], num_scheduled_tokens={"warm-up": num_tokens}))
        self.sample()
        self.execute(SchedulerOutput(num_scheduled_tokens={"warm-up": 1}))
        self.sample()
        self.execute(SchedulerOutput(finished_request_ids=["warm-up"]))

    def close(self) -> None:
        """Drop the model and the cache."""
        self._batch = self._hidden_TE = None
        for name in ("model", "_tensors", "_caches"):
            self.__dict__.pop(name, None)

    def refuse(self, platform: Platform) -> None:
        """UnsupportedError with every reason why the format or the back end cannot serve a layer here."""
        refusals: dict[Refusal, None] = {}
        for spec, kv_spec in zip(self.model.attention_specs(), self.kv_specs, strict=True):
            for refusal in (
                get_format(kv_spec.format).refuse(kv_spec, platform),
                self._backend.refuse(spec, kv_spec, platform),
            ):
                if refusal is not None:
                    refusals[refusal] = None
        if refusals:
            raise UnsupportedError(*refusals)

    def _apply(self, scheduled: SchedulerOutput) -> None:
        """Bring rows and block tables up to date. Requests that never entered (their step had failed) are ignored."""
        for request_id in (*scheduled.finished_request_ids, *scheduled.preempted_request_ids):
            if (row := self._rows.release(request_id)) is not None:
                self._tables.clear(row)
        for new in scheduled.new_rows:
            self._tables.append(self._rows.add(new), new.block_ids)
        for grown in scheduled.grown_rows:
            row = self._rows.row(grown.request_id)
            self._rows.num_computed_tokens[row] = grown.num_computed_tokens
            self._tables.append(row, grown.new_block_ids)

    def _sample_rows(
        self, output: ModelRunnerOutput, batch: InputBatch, hidden_TE: Tensor, sampling: np.ndarray, mask: Tensor | None
    ) -> None:
        """Fill in tokens, log probabilities and bad rows for the requests at `sampling` (positions in the batch)."""
        row_R = batch.row_R[sampling]
        logits_RV = self.model.compute_logits(hidden_TE[torch.from_numpy(batch.last_R[sampling]).to(self.device)])
        wanted = [(i, p) for i, row in enumerate(row_R.tolist()) if (p := self._rows.sampling(row)).logprobs is not None]
        raw_RV = logits_RV.clone() if wanted and self._mode.startswith("raw") else None
        sampled = self._sampler.sample(logits_RV, row_R, mask)
        finite, tokens = sampled.finite_R.tolist(), sampled.token_R.tolist()
        output.bad_rows = frozenset(batch.request_ids[at] for at, good in zip(sampling.tolist(), finite, strict=True) if not good)
        for at, token, good in zip(sampling.tolist(), tokens, finite, strict=True):
            output.token_ids[at] = [token] if good else []
        self._rows.append(row_R, np.array(tokens))
        scores_RV = sampled.processed_RV if raw_RV is None else raw_RV
        for i, params in wanted:
            if scores_RV is not None and finite[i]:
                output.logprobs[int(sampling[i])] = self._scores(scores_RV[i : i + 1], sampled.token_R[i : i + 1], params)

    def _scores(self, scores_NV: Tensor, token_N: Tensor, params: SamplingParams) -> list[TokenLogprobs]:
        return token_logprobs(
            scores_NV,
            token_N,
            params.logprobs or 0,
            normalise=self._mode.endswith("logprobs"),
            listed_ids=params.logprob_token_ids,
        )

    def _prompt_logprobs(self, batch: InputBatch, hidden_TE: Tensor) -> dict[str, list[TokenLogprobs]]:
        """For each request that wants them: entries of the prompt tokens that follow this step's prompt positions."""
        results: dict[str, list[TokenLogprobs]] = {}
        chunk = max(1, _LOGITS_CHUNK_BYTES // (4 * self.model.config.vocab_size))
        for at, row in enumerate(batch.row_R.tolist()):
            num_top = self._rows.sampling(row).prompt_logprobs
            if num_top is None:
                continue
            computed = int(batch.num_computed_R[at])
            last = int(self._rows.num_prompt_tokens[row]) - 1
            count = min(int(batch.num_scheduled_R[at]), last - computed)
            entries = results.setdefault(batch.request_ids[at], [])
            for start in range(0, count, chunk):
                end = min(start + chunk, count)
                first = int(batch.first_R[at])
                target = self._rows.token_ids[row, computed + start + 1 : computed + end + 1].astype(np.int64)
                logits_NV = self.model.compute_logits(hidden_TE[first + start : first + end])
                normalise = self._mode.endswith("logprobs")
                entries += token_logprobs(logits_NV, torch.from_numpy(target).to(self.device), num_top, normalise=normalise)
        return results


def kv_specs(model: Model, config: EngineConfig) -> list[KVCacheSpec]:
    """What each layer keeps in the cache."""
    return [
        KVCacheSpec(
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim_v,
            block_size=config.cache.block_size,
            sliding_window=spec.sliding_window,
            format=config.cache.kv_cache_dtype,
        )
        for spec in model.attention_specs()
    ]


def _page_bytes(spec: KVCacheSpec) -> int:
    return sum(plane.bytes for plane in get_format(spec.format).planes(spec))
