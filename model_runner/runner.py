"""`ModelRunner`: one device, one model, its KV cache; executes what the scheduler decided.

`execute` applies the difference to rows and block tables, builds one ragged batch and runs the forward pass; `sample` turns
the last hidden states into tokens. Knows nothing of requests' lives, text or sockets. Driven by the engine core, one thread.

Shape letters: T tokens of the step, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, groupby, islice

import numpy as np
import torch
from torch import Tensor

from halfbyte.config import EngineConfig, ModelConfig
from halfbyte.errors import Refusal, UnsupportedError, UserError
from halfbyte.kernels.attention.base import AttentionBackend
from halfbyte.kernels.attention.selection import arranged_spec
from halfbyte.kernels.attention.vendors import LayerFacts
from halfbyte.kernels.cpu.sampling import CpuSampling
from halfbyte.kernels.layers import layer_kernels
from halfbyte.kvcache.formats import get_format, page_bytes
from halfbyte.kvcache.scales import LayerScales
from halfbyte.kvcache.spec import KVCacheSpec, KVLayout, make_layout
from halfbyte.kvcache.tensors import KVTensors, LayerParts
from halfbyte.model_runner.adapters import Adapters, attach_adapters
from halfbyte.model_runner.attention_tiles import load_backend
from halfbyte.model_runner.block_tables import BlockTables
from halfbyte.model_runner.cpu_model import CpuModel, load_cpu_model
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.device import Accelerator, Device, make_device
from halfbyte.model_runner.device_graphs import DeviceGraphs
from halfbyte.model_runner.forward import Forward, ForwardModel
from halfbyte.model_runner.graph_plan import GraphPlan, plan_graphs
from halfbyte.model_runner.input_batch import InputBatch, make_batch
from halfbyte.model_runner.input_kernels import TORCH_INPUTS, InputKernels
from halfbyte.model_runner.kv_scales import KVScales
from halfbyte.model_runner.layers.context import ForwardContext
from halfbyte.model_runner.layers.model import Model
from halfbyte.model_runner.layers.weights import LoadReport, prepack_weights
from halfbyte.model_runner.loader import load_model
from halfbyte.model_runner.pooling_head import PoolingHead
from halfbyte.model_runner.pooling_plan import PoolingPlan
from halfbyte.model_runner.request_rows import RequestRows
from halfbyte.model_runner.sampling_kernels import SamplingKernels, TorchSampling
from halfbyte.model_runner.source import ModelFiles
from halfbyte.model_runner.step_pooling import StepPooling
from halfbyte.model_runner.step_sampling import StepSampling
from halfbyte.platform import Platform, trim_heap
from halfbyte.types import (
    MEMORY_PARTS,
    GrownRow,
    MemoryPart,
    ModelRunnerOutput,
    NewRow,
    PendingOutput,
    SamplingParams,
    SchedulerOutput,
)

StoredScales = tuple[list[LayerScales], list[str]]  # of each layer, and lines for the log


def load_runner(
    config: EngineConfig,
    files: ModelFiles,
    decoder: DecoderConfig,
    platform: Platform,
    pooling: PoolingPlan | None = None,
    class_ids: Sequence[int] = (),
) -> ModelRunner:
    """Load the weights. The cache is allocated later, when its size is known.

    pooling: of a model that pools; class_ids: the tokens of its classes, where it has such.
    """
    backend, tiles = load_backend(config, decoder, platform, first_tokens(config))
    settings = config.model
    device = make_device(settings.device)
    plan = graph_plan(config, backend)  # what it refuses is refused before weights are read
    scales = KVScales()
    if settings.device == "cpu":
        # The compiled kernels have threads of their own; what is left to torch is too small to wake another team for.
        torch.set_num_threads(1 if backend.name == "cpu" else settings.num_threads)
    load = partial(_load_weights, files, decoder, settings, device, backend)
    model, report, kernels = load(scales)
    limit = f"{platform.memory_limit_bytes / 2**30:.1f} GiB of memory"
    lines = [
        f"kernels: {kernels}; attention {backend.name} over {config.cache.layers_name} KV; {limit}",
        *tiles,
        *layer_lines(config.cache.layer_dtypes),
        f"weights: {report.num_tensors} tensors, {report.num_bytes:,} bytes",
    ]
    if report.unused:
        lines.append(f"weights: {len(report.unused)} tensors of the file are not used: {', '.join(report.unused[:5])}")
    if not device.is_host:
        lines.append(plan.line())
    adapters = None
    if config.lora is not None:
        adapters = attach_adapters(model, config.lora, settings.dtype)
        lines.append(
            f"adapters: room for {config.lora.max_loras} and one that is being replaced, up to rank {config.lora.max_lora_rank},"
            f" {settings.dtype}: {adapters.nbytes:,} bytes"
        )
    stored = scales.layer_scales(decoder.num_layers, decoder.num_kv_heads, decoder.num_heads)
    head = None
    if pooling is not None:
        is_dummy = settings.load_format == "dummy"
        head = PoolingHead(pooling, files, decoder.hidden_size, device.place, class_ids=class_ids, dummy=is_dummy)
    return ModelRunner(config, model, backend, lines, stored, device, lambda: load(KVScales())[0], adapters, head)


def _load_weights(
    files: ModelFiles,
    decoder: DecoderConfig,
    settings: ModelConfig,
    device: Device,
    backend: AttentionBackend,
    scales: KVScales,
) -> tuple[Model | CpuModel, LoadReport, str]:
    """The model, what loading did, and which kernels run: at the start, and when a runner wakes up whose weights were dropped."""
    if backend.name == "cpu":
        return load_cpu_model(files, decoder, settings, backend, scales)
    place = (settings.dtype, device.place, settings.load_format)
    model, report = load_model(files, decoder, *place, backend, scales=scales)
    if (settings.device, settings.dtype) == ("cpu", "float32"):
        prepack_weights(model)
    used = f"torch, {settings.num_threads} threads" if device.is_host else layer_kernels(device.place).name
    return model, report, f"{used}; linear {settings.dtype}"


class ModelRunner:
    """Implements `halfbyte.types.Runner`. report: lines for the start-up log. stored_scales: those of the checkpoint.

    A step waits for nothing: see `device`. device: where the model is, None: made from the configuration. reload: the model
    anew, for a runner that may be put to sleep at level 2. head: of a model that pools, for which `sample` gives vectors in
    place of tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model | CpuModel,
        backend: AttentionBackend,
        report: list[str] | None = None,
        stored_scales: StoredScales | None = None,
        device: Device | None = None,
        reload: Callable[[], Model | CpuModel] | None = None,
        adapters: Adapters | None = None,
        head: PoolingHead | None = None,
    ) -> None:
        self.adapters = adapters
        self.report = report or []
        self.config = config
        self.model = model
        self.head = head
        self.device = device or make_device(config.model.device)
        self.layout: KVLayout = make_layout(kv_specs(model, config), page_bytes)
        self.kv_specs = self.layout.specs
        self.weight_bytes = model.weight_bytes
        self.backend = backend
        self.stored_scales = stored_scales or _no_scales(model)
        self._parts: list[LayerParts] | None = None
        self._max_rows = config.scheduler.max_num_seqs
        self._reload = reload
        self._offloaded = False
        self._compiled = self._compile()
        self._graphs: DeviceGraphs | None = None
        self._step: tuple[InputBatch, Tensor] | None = None

    def allocate_cache(self, num_blocks: int, max_model_len: int) -> None:
        """The KV cache of exactly `num_blocks` blocks, and rows for requests of up to `max_model_len` tokens."""
        sampling, inputs = _kernels_of(self.model, self.device)
        self._graphs = None
        self.num_blocks, self._max_seq_len = num_blocks, max_model_len
        self._tensors = KVTensors(self.layout, num_blocks, self.device.place, self._parts)
        caches = [self._tensors.layer(i) for i in range(len(self.kv_specs))]
        vocab_size, mode = self.model.config.vocab_size, self.config.scheduler.logprobs_mode
        self._rows = RequestRows(self._max_rows, max_model_len, vocab_size, self.device, inputs, self.adapters)
        self._tables = BlockTables(self.layout, self._max_rows, max_model_len, self.device, inputs)
        self._forward = Forward(self.model, self.backend, self.layout, caches, self._rows, self._tables, inputs)
        if self._compiled is not None:
            self._forward.model, self._forward.context = self._compiled
        self._sampling: StepSampling | StepPooling
        if self.head is None:
            self._sampling = StepSampling(self.model, self._rows, sampling, mode)
        else:
            self._sampling = StepPooling(self.head, self._rows, self._max_rows, self.model)

    def allocate_for(self, num_tokens: int) -> None:
        """A small cache: for one text of `num_tokens` at a time."""
        num_blocks = 1 + sum(group.num_entries(num_tokens) for group in self.layout.groups)
        self.allocate_cache(num_blocks, num_tokens)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a request's numbers depend on nothing beside it, to the bit: the compiled CPU kernels see to that."""
        return isinstance(self.model, CpuModel)

    @property
    def cache_bytes(self) -> int:
        """Of the cache that is allocated."""
        return self._tensors.num_bytes

    def release_cache(self) -> None:
        """Drop what `allocate_cache` made."""
        self._graphs = self._step = None
        if "_tensors" in self.__dict__:
            self._tensors.give_up()
        for name in ("_tensors", "_rows", "_tables", "_forward", "_sampling"):
            self.__dict__.pop(name, None)
        if isinstance(model := self.__dict__.get("model"), CpuModel):
            model.forget_caches()

    @property
    def missing(self) -> tuple[MemoryPart, ...]:
        """What `sleep` gave back and `wake_up` did not fetch yet; steps need all of it."""
        gone = {"weights": self._offloaded or "model" not in self.__dict__, "kv_cache": "_tensors" not in self.__dict__}
        return tuple(part for part in MEMORY_PARTS if gone[part])

    def sleep(self, level: int) -> None:
        """Give memory back to the system. Level 1: the cache, and the weights where the device has memory of its own: the host
        keeps them. Level 2: the cache and the weights. Scales, turns and the sizes of all that stay.
        """
        self.release_cache()
        if level == 2:
            self._drop_model()
        elif not self.device.is_host and "model" in self.__dict__ and isinstance(self.model, Model):
            self.model.to("cpu")
            self._offloaded = True
        if self.adapters is not None:  # they stay as they were loaded: their files may have changed
            self.adapters.move(torch.device("cpu"))
        if isinstance(self.device, Accelerator):
            self.device.trim()
        trim_heap()

    def wake_up(self, part: MemoryPart) -> None:
        """Fetch what `sleep` gave back: the weights from the host or from the checkpoint, then a cache as large as before, with
        what belongs to it. UserError for a cache without weights. Whatever else lies beside the weights comes back here, too.
        """
        if part not in self.missing:
            return
        if part == "weights":
            if self.adapters is not None:
                self.adapters.move(self.device.place)
            if self._offloaded:
                self.model.to(self.device.place)  # type: ignore[union-attr]
                self._offloaded = False
                return
            assert self._reload is not None, "a runner that dropped its weights can load them"
            self.model = self._reload()
            if self.adapters is not None:
                self.adapters.attach(self.model)
            self._compiled = self._compile()
            return
        if "weights" in self.missing:
            raise UserError("the KV cache wakes up after the weights: wake tags=weights first, or both", param="tags")
        self.allocate_cache(self.num_blocks, self._max_seq_len)
        self.warm_up()
        self.capture_graphs()

    def set_parts(self, parts: list[LayerParts]) -> None:
        """Scales and turns of each layer, for the cache that is allocated next."""
        place = self.device.place
        self._parts = [tuple(None if part is None else part.to(place) for part in layer) for layer in parts]  # type: ignore[misc]

    @torch.inference_mode()
    def execute(self, scheduled: SchedulerOutput) -> None:
        """Launch the forward pass of one step. A step without tokens only releases rows."""
        self._step = None
        self._apply(scheduled)
        if not scheduled.num_scheduled_tokens:
            return
        batch = make_batch(self._rows, scheduled.num_scheduled_tokens)
        if self._graphs is None:
            hidden_TE = self._forward(self.device.upload(batch.table()), batch.counts)
        else:
            hidden_TE = self._graphs.run(batch)
        self._step = batch, hidden_TE

    @torch.inference_mode()
    def sample(self, grammar_mask: np.ndarray | None = None) -> PendingOutput:
        """Tokens of the rows whose known tokens are all computed, and log probabilities where they were asked for.

        grammar_mask: int32 [requests of the step, in its order; ceil(V / 32)], all ones for a request without a grammar.
        """
        if self._step is None:
            return ModelRunnerOutput([], [], [])
        batch, hidden_TE = self._step
        self._step = None
        return self._sampling(batch, hidden_TE, grammar_mask)

    @torch.inference_mode()
    def step_logits(self) -> Tensor:
        """float32 logits [T, V] of every token of the step that was executed last and is not sampled: of few tokens at a time."""
        assert self._step is not None, "a step was executed"
        return self.model.compute_logits(self._step[1])

    def warm_up(self) -> None:
        """Prompts and a decode through the code of real requests, so that the first of those is not the slow one.

        Writes into blocks that nobody has yet, and leaves no row.
        """
        num_tokens = min(2 * self.layout.unit_tokens, self._max_seq_len) - 1
        if num_tokens < 1:
            return
        for params in (SamplingParams(seed=0, top_p=0.9, logprobs=1), SamplingParams(seed=0)):
            self.run_dummies([num_tokens], params, decodes=True)
        self._tensors.populate()  # last: it takes a core for a while

    def run_dummies(self, lengths: Sequence[int], params: SamplingParams, *, decodes: bool = False) -> None:
        """A step of requests that nobody sent, with prompts of these lengths, and one more that decodes; they leave no row.

        They share blocks that nobody has yet, whatever they write there. Where the model pools, none decodes.
        """
        pooling = None if self.head is None else self.head.ask
        decodes = decodes and pooling is None
        blocks = cycle(range(1, self.num_blocks))
        names = [f"dummy {i}" for i in range(len(lengths))]
        new = []
        for name, length in zip(names, lengths, strict=True):
            tables = [list(islice(blocks, group.num_entries(length + decodes))) for group in self.layout.groups]
            new.append(NewRow(name, [0] * length, length, 0, tables, params, frozenset(), pooling=pooling))
        try:
            self.execute(SchedulerOutput(new_rows=new, num_scheduled_tokens=dict(zip(names, lengths, strict=True))))
            self.sample().result()
            if decodes:
                grown = [GrownRow(row.request_id, len(row.token_ids), [[] for _ in row.block_ids]) for row in new]
                self.execute(SchedulerOutput(grown_rows=grown, num_scheduled_tokens=dict.fromkeys(names, 1)))
                self.sample().result()
        finally:
            self.execute(SchedulerOutput(finished_request_ids=names))

    def add_adapter(self, adapter_id: int, path: str) -> None:
        """As `Runner`; the engine has `--enable-lora`."""
        assert self.adapters is not None
        if "weights" in self.missing:
            raise UserError("the engine is asleep, without its weights; wake it up first")
        self.adapters.add(adapter_id, path)

    def remove_adapter(self, adapter_id: int) -> None:
        assert self.adapters is not None
        self.adapters.remove(adapter_id)

    def make_graphs(self) -> DeviceGraphs | None:
        """Graphs of what `graph_plan` says, not captured yet; None where there are to be none."""
        plan = graph_plan(self.config, self.backend)
        if plan.is_empty or not isinstance(self.device, Accelerator):
            return None
        return DeviceGraphs(self._forward, self.device, plan, self._max_seq_len, self._max_rows)

    def capture_graphs(self) -> bool:
        """Capture the graphs that steps use from now on, until the cache is allocated anew. False where there are to be none."""
        graphs = self.make_graphs()
        if graphs is not None:
            graphs.capture()
            self._graphs = graphs
        return graphs is not None

    def close(self) -> None:
        """Drop the model and the cache."""
        self.release_cache()
        self._drop_model()

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

    def _compile(self) -> tuple[ForwardModel, type[ForwardContext]] | None:
        return compile_model(self.model) if self.config.execution.compile == "native" else None

    def _drop_model(self) -> None:
        model = self.__dict__.pop("model", None)
        self._compiled, self._offloaded = None, False
        if isinstance(model, CpuModel):
            model.close()

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


def compile_model(model: Model | CpuModel) -> tuple[ForwardModel, type[ForwardContext]]:
    """The model through torch.compile, and a context whose attention stays as it is: a step's metadata has too many shapes."""
    from torch.compiler import disable  # importing the compiler takes seconds

    attend = disable(ForwardContext.attend)
    context = type("EagerAttention", (ForwardContext,), {"attend": attend})
    return torch.compile(model, dynamic=True), context


def graph_plan(config: EngineConfig, backend: AttentionBackend) -> GraphPlan:
    scheduler = config.scheduler
    sizes = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    return plan_graphs(config.execution, backend.name, backend.graph_support, *sizes)


def _kernels_of(model: Model | CpuModel, device: Device) -> tuple[SamplingKernels, InputKernels]:
    """The one place where a device's kernels beside those of layers and attention are chosen."""
    if isinstance(model, CpuModel):
        return CpuSampling(model.engine), TORCH_INPUTS
    if device.place.type == "cpu":
        return TorchSampling(is_host=device.is_host), TORCH_INPUTS
    from halfbyte.kernels.triton.sampling import TritonSampling
    from halfbyte.model_runner.triton_inputs import TritonInputs

    return TritonSampling(), TritonInputs()


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
