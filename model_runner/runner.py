"""`ModelRunner`: one device, one model, its KV cache; executes what the scheduler decided.

`execute` applies the difference to rows and block tables, builds one ragged batch and runs the forward pass; `sample` turns
the last hidden states into tokens. Knows nothing of requests' lives, text or sockets. Driven by the engine core, one thread.

Shape letters: T tokens of the step, R requests of the batch, N positions that want logits, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle, groupby, islice

import numpy as np
import torch
from torch import Tensor

from halfbyte.config import EngineConfig
from halfbyte.errors import Refusal, UnsupportedError
from halfbyte.kernels.attention import get_backend
from halfbyte.kernels.attention.base import AttentionBackend
from halfbyte.kernels.attention.selection import arranged_spec
from halfbyte.kernels.attention.vendors import LayerFacts
from halfbyte.kernels.cpu.sampling import CpuSampling
from halfbyte.kvcache.formats import get_format, page_bytes
from halfbyte.kvcache.scales import LayerScales
from halfbyte.kvcache.spec import KVCacheSpec, KVLayout, make_layout
from halfbyte.kvcache.tensors import KVTensors, LayerParts
from halfbyte.model_runner.block_tables import BlockTables
from halfbyte.model_runner.cpu_model import CpuModel, load_cpu_model
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.input_batch import InputBatch, attention_metadata, make_batch
from halfbyte.model_runner.kv_scales import KVScales
from halfbyte.model_runner.layers.context import ForwardContext
from halfbyte.model_runner.layers.model import Model
from halfbyte.model_runner.layers.weights import prepack_weights
from halfbyte.model_runner.loader import load_model
from halfbyte.model_runner.logprobs import Listed, token_logprobs
from halfbyte.model_runner.request_rows import RequestRows
from halfbyte.model_runner.sampler import TORCH_SAMPLING, Sampler, SamplingKernels
from halfbyte.model_runner.source import ModelFiles
from halfbyte.platform import Platform
from halfbyte.types import GrownRow, ModelRunnerOutput, NewRow, SamplingParams, SchedulerOutput

StoredScales = tuple[list[LayerScales], list[str]]  # of each layer, and lines for the log

# float32 logits that exist at a time
_LOGITS_BYTES = 64 << 20


def load_runner(config: EngineConfig, files: ModelFiles, decoder: DecoderConfig, platform: Platform) -> ModelRunner:
    """Load the weights. The cache is allocated later, when its size is known."""
    backend = get_backend(config.attention_backend)
    settings = config.model
    model: Model | CpuModel
    scales = KVScales()
    if settings.device == "cpu":
        # The compiled kernels have threads of their own; what is left to torch is too small to wake another team for.
        torch.set_num_threads(1 if backend.name == "cpu" else settings.num_threads)
    if backend.name == "cpu":
        model, report, kernels = load_cpu_model(files, decoder, settings, backend, scales)
    else:
        place = (settings.dtype, settings.device, settings.load_format)
        model, report = load_model(files, decoder, *place, backend, scales=scales)
        if (settings.device, settings.dtype) == ("cpu", "float32"):
            prepack_weights(model)
        kernels = f"torch, {settings.num_threads} threads; linear {settings.dtype}"
    limit = f"{platform.memory_limit_bytes / 2**30:.1f} GiB of memory"
    lines = [
        f"kernels: {kernels}; attention {backend.name} over {config.cache.layers_name} KV; {limit}",
        *layer_lines(config.cache.layer_dtypes),
        f"weights: {report.num_tensors} tensors, {report.num_bytes:,} bytes",
    ]
    if report.unused:
        lines.append(f"weights: {len(report.unused)} tensors of the file are not used: {', '.join(report.unused[:5])}")
    stored = scales.layer_scales(decoder.num_layers, decoder.num_kv_heads, decoder.num_heads)
    return ModelRunner(config, model, backend, lines, stored)


class ModelRunner:
    """Implements `halfbyte.types.Runner`. report: lines for the start-up log. stored_scales: those of the checkpoint."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model | CpuModel,
        backend: AttentionBackend,
        report: list[str] | None = None,
        stored_scales: StoredScales | None = None,
    ) -> None:
        self.report = report or []
        self.config = config
        self.model = model
        self.device = torch.device(config.model.device)
        self.layout: KVLayout = make_layout(kv_specs(model, config), page_bytes)
        self.kv_specs = self.layout.specs
        self.weight_bytes = model.weight_bytes
        self.backend = backend
        self.stored_scales = stored_scales or _no_scales(model)
        self._parts: list[LayerParts] | None = None
        self._windows = [group.sliding_window for group in self.layout.groups]
        self._max_rows = config.scheduler.max_num_seqs
        self._mode = config.scheduler.logprobs_mode
        self._kernels: SamplingKernels = CpuSampling(model.engine) if isinstance(model, CpuModel) else TORCH_SAMPLING
        self._batch: InputBatch | None = None
        self._hidden_TE: Tensor | None = None

    def allocate_cache(self, num_blocks: int, max_model_len: int) -> None:
        """The KV cache of exactly `num_blocks` blocks, and rows for requests of up to `max_model_len` tokens."""
        self.num_blocks = num_blocks
        self._tensors = KVTensors(self.layout, num_blocks, self.device, self._parts)
        self._caches = [self._tensors.layer(i) for i in range(len(self.kv_specs))]
        self._rows = RequestRows(self._max_rows, max_model_len, self.model.config.vocab_size, self.device)
        self._tables = BlockTables(self.layout, self._max_rows, max_model_len, self.device)
        self._sampler = Sampler(self._rows, keep_processed=self._mode.startswith("processed"), kernels=self._kernels)

    def allocate_for(self, num_tokens: int) -> None:
        """A small cache: for one text of `num_tokens` at a time."""
        num_blocks = 1 + sum(group.num_entries(num_tokens) for group in self.layout.groups)
        self.allocate_cache(num_blocks, num_tokens)

    def set_parts(self, parts: list[LayerParts]) -> None:
        """Scales and turns of each layer, for the cache that is allocated next."""
        self._parts = [tuple(None if part is None else part.to(self.device) for part in layer) for layer in parts]  # type: ignore[misc]

    @torch.inference_mode()
    def execute(self, scheduled: SchedulerOutput) -> None:
        """Run the forward pass of one step. A step without tokens only releases rows."""
        self._batch = self._hidden_TE = None
        self._apply(scheduled)
        if not scheduled.num_scheduled_tokens:
            return
        batch = make_batch(self._rows, scheduled.num_scheduled_tokens, self.device)
        metadata = [attention_metadata(batch, self._tables, *group) for group in enumerate(self.layout.groups)]
        for one, window in zip(metadata, self._windows, strict=True):
            self.backend.prepare(one, window)
        context = ForwardContext(metadata, self._caches, self.layout.group_of_layer)
        self._hidden_TE = self.model(batch.token_ids_T, batch.positions_T, context)
        self._batch = batch

    @torch.inference_mode()
    def sample(self, grammar_mask: Tensor | None = None) -> ModelRunnerOutput:
        """Tokens of the rows whose known tokens are all computed, and log probabilities where they were asked for.

        grammar_mask: int32 [requests of the step, in its order; ceil(V / 32)], all ones for a request without a grammar.
        """
        batch, hidden_TE = self._batch, self._hidden_TE
        if batch is None or hidden_TE is None:
            return ModelRunnerOutput([], [], [])
        self._batch = self._hidden_TE = None
        output = ModelRunnerOutput(batch.request_ids, [[] for _ in batch.request_ids], [None] * len(batch.request_ids))
        bad = self._prompt_logprobs(output, batch, hidden_TE)
        sampling, step = np.flatnonzero(batch.samples_R), self._num_logits
        if grammar_mask is None and self._needs_only_best(batch.row_R[sampling]):
            bad |= self._take_best(output, batch, hidden_TE, sampling)
            sampling = sampling[:0]
        for start in range(0, len(sampling), step):
            bad |= self._sample_rows(output, batch, hidden_TE, sampling[start : start + step], grammar_mask)
        output.bad_rows = frozenset(bad)
        for place in [i for i, request_id in enumerate(batch.request_ids) if request_id in bad]:
            output.token_ids[place], output.logprobs[place] = [], None
        return output

    @torch.inference_mode()
    def step_logits(self) -> Tensor:
        """float32 logits [T, V] of every token of the step that was executed last and is not sampled: of few tokens at a time."""
        assert self._hidden_TE is not None, "a step was executed"
        return self.model.compute_logits(self._hidden_TE)

    def warm_up(self) -> None:
        """Prompts and a decode through the code of real requests, so that the first of those is not the slow one.

        Writes into blocks that nobody has yet, and leaves no row.
        """
        num_tokens = min(2 * self.layout.unit_tokens, self._rows.token_ids.shape[1]) - 1
        if num_tokens < 1:
            return
        blocks = cycle(range(1, self.num_blocks))
        tables = [list(islice(blocks, group.num_entries(num_tokens + 1))) for group in self.layout.groups]
        for params in (SamplingParams(seed=0, top_p=0.9, logprobs=1), SamplingParams(seed=0)):
            new = NewRow("warm-up", [0] * num_tokens, num_tokens, 0, tables, params, frozenset())
            self.execute(SchedulerOutput(new_rows=[new], num_scheduled_tokens={"warm-up": num_tokens}))
            self.sample()
            grown = GrownRow("warm-up", num_tokens, [[] for _ in tables])
            self.execute(SchedulerOutput(grown_rows=[grown], num_scheduled_tokens={"warm-up": 1}))
            self.sample()
            self.execute(SchedulerOutput(finished_request_ids=["warm-up"]))
        self._tensors.populate()  # last: it takes a core for a while

    def close(self) -> None:
        """Drop the model and the cache."""
        self._batch = self._hidden_TE = None
        if isinstance(self.model, CpuModel):
            self.model.close()
        for name in ("model", "_tensors", "_caches"):
            self.__dict__.pop(name, None)

    def refuse(self, platform: Platform) -> None:
        """UnsupportedError with every reason why the format or the back end cannot serve a layer here."""
        refusals: dict[Refusal, None] = {}
        for spec, kv_spec in zip(self.model.attention_specs(), self.kv_specs, strict=True):
            for refusal in (
                get_format(kv_spec.format).refuse(kv_spec, platform),
                self.backend.refuse(spec, kv_spec, platform),
            ):
                if refusal is not None:
                    refusals[refusal] = None
        if refusals:
            raise UnsupportedError(*refusals)

    @property
    def _num_logits(self) -> int:
        """Positions whose logits are computed at a time."""
        return max(1, _LOGITS_BYTES // (4 * self.model.config.vocab_size))

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
        self._rows.apply()
        self._tables.apply()

    def _logits(self, hidden_TE: Tensor, at: np.ndarray) -> Tensor:
        """float32 logits [N, V] of the step's tokens at `at`."""
        return self.model.compute_logits(hidden_TE[torch.from_numpy(at).to(self.device)])

    def _needs_only_best(self, row_R: np.ndarray) -> bool:
        """Whether these rows are served by the token of the greatest logit, so that no logits have to be made."""
        sampling = self._rows.sampling
        if not len(row_R) or not isinstance(self.model, CpuModel) or not sampling.is_greedy[row_R].all():
            return False
        rows = row_R.tolist()
        return all(sampling.edits[row] is None and self._rows.request(row).sampling.logprobs is None for row in rows)

    def _take_best(self, output: ModelRunnerOutput, batch: InputBatch, hidden_TE: Tensor, at: np.ndarray) -> set[str]:
        """`_sample_rows` for rows that need only the best token."""
        assert isinstance(self.model, CpuModel)
        token_R, best_R = self.model.best_tokens(hidden_TE[torch.from_numpy(batch.last_R[at])])
        good_R = best_R.isfinite()
        for place, token in zip(at.tolist(), token_R.tolist(), strict=True):
            output.token_ids[place] = [token]
        good = good_R.numpy()
        self._rows.append(batch.row_R[at][good], token_R if good.all() else token_R[good_R])
        return {batch.request_ids[place] for place in at[~good].tolist()}

    def _sample_rows(
        self, output: ModelRunnerOutput, batch: InputBatch, hidden_TE: Tensor, at: np.ndarray, mask: Tensor | None
    ) -> set[str]:
        """Fill in tokens and log probabilities for the requests at `at` of the batch; returns those that have no numbers."""
        row_R, places = batch.row_R[at], at.tolist()
        logits_RV = self._logits(hidden_TE, batch.last_R[at])
        if mask is not None:
            mask = mask[torch.from_numpy(at).to(mask.device)].to(self.device)
        requests = [self._rows.request(row) for row in row_R.tolist()]
        wanted = [i for i, request in enumerate(requests) if request.sampling.logprobs is not None]
        index_N = torch.tensor(wanted, dtype=torch.int64, device=self.device)
        is_raw = self._mode.startswith("raw")
        scores_NV = logits_RV[index_N] if wanted and is_raw else None
        sampled = self._sampler.sample(logits_RV, row_R, mask)
        if wanted and sampled.processed_RV is not None:
            scores_NV = sampled.processed_RV[index_N]

        finite_R = sampled.finite_R.cpu().numpy()
        for place, token in zip(places, sampled.token_R.tolist(), strict=True):
            output.token_ids[place] = [token]
        good = torch.from_numpy(finite_R).to(self.device)
        self._rows.append(row_R[finite_R], sampled.token_R if finite_R.all() else sampled.token_R[good])
        if scores_NV is not None:
            listed = [_listed(requests[i].sampling) for i in wanted]
            tokens_N = sampled.token_R[index_N]
            entries = token_logprobs(scores_NV, tokens_N, listed, normalise=self._normalises, kernels=self._kernels)
            for i, entry in zip(wanted, entries, strict=True):
                output.logprobs[places[i]] = [entry]
        return {batch.request_ids[place] for place, finite in zip(places, finite_R.tolist(), strict=True) if not finite}

    @property
    def _normalises(self) -> bool:
        return self._mode.endswith("logprobs")

    def _prompt_logprobs(self, output: ModelRunnerOutput, batch: InputBatch, hidden_TE: Tensor) -> set[str]:
        """Entries of the prompt tokens that follow this step's prompt positions, for the requests that want them.

        A request that comes back with output tokens has had its entries. Returns requests whose logits are no numbers.
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
            return set()
        bad: set[str] = set()
        at_N, target_N = np.concatenate(at), torch.tensor(targets, dtype=torch.int64, device=self.device)
        for start in range(0, len(owners), self._num_logits):
            part = slice(start, start + self._num_logits)
            logits_NV = self._logits(hidden_TE, at_N[part])
            finite = self._kernels.best(logits_NV)[1].tolist()
            asked = target_N[part], listed[part]
            entries = token_logprobs(logits_NV, *asked, normalise=self._normalises, kernels=self._kernels)
            for place, entry, good in zip(owners[part], entries, finite, strict=True):
                output.prompt_logprobs.setdefault(batch.request_ids[place], []).append(entry)
                if not good:
                    bad.add(batch.request_ids[place])
        return bad


def _listed(params: SamplingParams) -> Listed:
    return params.logprobs or 0 if params.logprob_token_ids is None else params.logprob_token_ids


def layer_lines(names: Sequence[str]) -> list[str]:
    """Which layers have which KV format, as a table, where they differ."""
    if len(set(names)) == 1:
        return []
    runs: dict[str, list[str]] = {}
    for name, run in groupby(enumerate(names), key=lambda layer: layer[1]):
        numbers = [index for index, _ in run]
        runs.setdefault(name, []).append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return [f"KV format {name}: layers {', '.join(parts)}" for name, parts in runs.items()]


def _no_scales(model: Model | CpuModel) -> StoredScales:
    return [LayerScales.ones(spec.num_kv_heads) for spec in model.attention_specs()], []


def kv_specs(model: Model | CpuModel, config: EngineConfig) -> list[KVCacheSpec]:
    """What each layer keeps in the cache, as the model's attention back end arranges it."""
    facts = partial(
        LayerFacts, block_size=config.cache.block_size, first_tokens=first_tokens(config), first_format=config.model.dtype
    )
    layers = zip(model.attention_specs(), config.cache.layer_dtypes, strict=True)
    return [arranged_spec(model.backend.name, name, facts(spec)) for spec, name in layers]


def first_tokens(config: EngineConfig) -> int:
    """How many tokens at the beginning of a sequence are kept in the model's dtype: as asked, or as the formats want it."""
    if config.cache.first_tokens is not None:
        return config.cache.first_tokens
    return max(get_format(name).first_tokens for name in config.cache.layer_dtypes)
