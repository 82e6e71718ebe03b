"""From options to a running engine core: find the model, resolve the configuration, load, size the cache, warm up.

Called in the engine process, and in the user's process for `LLM`. torch is imported on the way, never at module level.
Everything that can be refused is refused before weights are read.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.adapters import LoadedAdapter
from halfbyte.config import EngineConfig, EngineOptions
from halfbyte.engine.adapters import EngineAdapters, load_adapters
from halfbyte.engine.core import EngineCore
from halfbyte.engine.front import find_model, load_front
from halfbyte.engine.grammar.preparation import Preparation
from halfbyte.engine.kv_calibration import check, needs_calibration, prepare_parts
from halfbyte.engine.kv_layout import backend_refusals, choose_backend, kv_layout, model_facts, rule_origin
from halfbyte.engine.kv_plan import read_plan
from halfbyte.engine.phases import PhaseReport, Phases
from halfbyte.engine.scheduler import WORTH_WAITING_TOKENS, Scheduler
from halfbyte.errors import CapacityError, Refusal, UnsupportedError
from halfbyte.kernels.attention import BACKENDS, presence
from halfbyte.kernels.attention.selection import AUTO, model_rule
from halfbyte.kernels.attention.vendors import VENDORS, priority
from halfbyte.kernels.cpu.library import KernelsMissing, load
from halfbyte.kvcache.formats import FORMATS, page_bytes
from halfbyte.kvcache.manager import KVCacheManager
from halfbyte.kvcache.sizing import KVCapacity, blocks_for_request, size_cache
from halfbyte.kvcache.spec import KVLayout
from halfbyte.model_runner.decoder_config import DecoderConfig, config_from_files
from halfbyte.model_runner.pooling_plan import PoolingPlan, model_overrides, plan_pooling
from halfbyte.model_runner.source import ModelFiles
from halfbyte.platform import Platform, available_memory_bytes, detect_platform
from halfbyte.resolve import AUTO_FIT, config_lines, resolve
from halfbyte.types import EngineInfo, KVLayers

if TYPE_CHECKING:
    from halfbyte.model_runner.memory_profile import MemoryProfile
    from halfbyte.model_runner.runner import ModelRunner

# How often a compute thread looks for its sibling before it sleeps; read once, when torch loads OpenMP. The default (300,000)
# burns the core that a sibling waits for as soon as anything else runs: decoding then becomes several times slower. On a quiet
# machine `halfbyte bench` is no slower with this.
_OPENMP_SPIN_COUNT = "2000"

_BYTES_FIXED = "KV size: bytes are fixed, by {}; tokens follow from the format"
_TOKENS_FIXED = "KV size: tokens are fixed, by {}; bytes follow from the format"

log = logging.getLogger(__name__)


def build_engine(
    options: EngineOptions, report: PhaseReport = lambda name, seconds: None, *, streams: bool = False
) -> tuple[EngineCore, EngineInfo]:
    """Start an engine. `report` hears of each part of the start-up, with its seconds; together they are the whole time.

    streams: whether somebody waits for each token (`resolve`).

    Raises a HalfbyteError with a one-line message when the model, the options and the machine do not go together.
    """
    phases = Phases(report)
    os.environ.setdefault("GOMP_SPINCOUNT", _OPENMP_SPIN_COUNT)
    files = find_model(options.model, options)
    plan = plan_pooling(files, options)
    platform = detect_platform(options.device)
    if plan is not None and plan.is_encoder:
        from halfbyte.engine.build_encoder import build_encoder

        return build_encoder(options, files, plan, platform, phases)
    return _build_decoder(options, files, plan, platform, phases, streams=streams)


def _build_decoder(
    options: EngineOptions, files: ModelFiles, plan: PoolingPlan | None, platform: Platform, phases: Phases, *, streams: bool
) -> tuple[EngineCore, EngineInfo]:
    decoder = config_from_files(files, model_overrides(options, plan))
    makes_logits = plan is None or bool(plan.classes)
    if not makes_logits:
        decoder = replace(decoder, tie_embeddings=True)  # no second matrix of the vocabulary is read
    tokenizer = cache(lambda: load_front(options).tokenizer)
    class_ids = plan.class_ids(tokenizer()) if plan is not None and plan.classes else []
    phases.end("read configuration")
    absent = absent_backends(platform)
    phases.end("load CPU kernels")
    config = resolve_all(options, files, decoder, platform, absent, streams=streams, plan=plan)
    if plan is not None and config.lora is not None:
        raise UnsupportedError(Refusal("--enable-lora: adapters are for models that generate", "leave it out"))
    if not makes_logits:
        _refuse_check(config)
    _size(config, decoder, platform, kv_layout(config, decoder))  # what does not fit into empty memory fits no better later
    from halfbyte.model_runner.runner import load_runner

    phases.end("resolve configuration, import torch")
    runner = load_runner(config, files, decoder, platform, plan, class_ids)
    adapters, loaded = load_adapters(config.lora, runner)
    phases.end("load weights")
    parts = prepare_parts(config, files, runner, tokenizer, log.info)
    runner.set_parts(parts.layers)
    runner.report += parts.lines
    if needs_calibration(config.cache.layer_dtypes) and config.cache.kv_check != "off":
        runner.report.append(check(config, runner, tokenizer()))
    phases.end("prepare KV formats")
    profile = None
    if platform.device != "cpu" and config.cache.kv_cache_memory_bytes is None:
        from halfbyte.model_runner.memory_profile import profile_memory

        profile = profile_memory(runner, _longest(config, decoder))
        runner.report.append(profile.line(config.cache.memory_utilization))
        phases.end("profile memory")
    capacity, sized_by = _size(config, decoder, platform, runner.layout, profile)
    runner.report.append(sized_by)
    config = replace(config, model=replace(config.model, max_model_len=capacity.max_model_len))
    runner.allocate_cache(capacity.num_blocks, capacity.max_model_len)
    phases.end("allocate KV cache")
    runner.warm_up()
    phases.end("warm up")
    if runner.capture_graphs():
        phases.end("capture graphs")
    preparation = Preparation(tokenizer, decoder.vocab_size, decoder.eos_token_ids)
    core = _core(config, capacity, runner, parts.digest, preparation, adapters)
    return core, _info(config, decoder, capacity, runner, phases.done, loaded)


def _core(
    config: EngineConfig,
    capacity: KVCapacity,
    runner: ModelRunner,
    digest: bytes,
    preparation: Preparation,
    adapters: EngineAdapters | None,
) -> EngineCore:
    """digest: what the cached numbers depend on beside tokens."""
    manager = KVCacheManager(
        capacity.layout,
        capacity.num_blocks,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        content=digest,
    )
    worth_waiting = 1 if config.model.device == "cpu" else WORTH_WAITING_TOKENS
    scheduler = Scheduler(config.scheduler, manager, max_model_len=capacity.max_model_len, worth_waiting_tokens=worth_waiting)
    return EngineCore(scheduler, runner, preparation, adapters, async_scheduling=config.scheduler.async_scheduling)


def resolve_all(
    options: EngineOptions,
    files: ModelFiles,
    decoder: DecoderConfig,
    platform: Platform,
    absent: Mapping[str, Refusal],
    *,
    streams: bool = False,
    plan: PoolingPlan | None = None,
) -> EngineConfig:
    """The configuration, with an attention back end that reads every layer's KV format. No weight is read.

    absent: the back ends that this machine cannot run, and why. plan: of a model that pools. UserError and UnsupportedError as
    `resolve`, and for what no back end reads.
    """
    backends = tuple(name for name in priority(platform) if name in BACKENDS and name not in absent)
    facts = model_facts(options, files, decoder, platform)
    if plan is not None:
        facts = replace(facts, pooling=plan.task, usual_length=plan.max_tokens)
    kv_plan = None if options.kv_cache_plan is None else read_plan(Path(options.kv_cache_plan))
    asked = options.attention_backend
    if asked in {*BACKENDS, *VENDORS} - set(backends):
        options = replace(options, attention_backend=AUTO)  # refused below, with what is known of it
    settled = partial(resolve, options, facts, platform, kv_formats=tuple(FORMATS), streams=streams, kv_plan=kv_plan)
    config = settled(attention_backends=backends)
    if config.origins["kv_cache_dtype"] == rule_origin(decoder) and (rule := model_rule(decoder.architecture, platform)):
        log.info("KV cache in %s: %s; %s; --kv-cache-dtype overrides it", rule.kv_format, rule.reason, rule.cost)
    reader = choose_backend(config, files, decoder, platform, asked, absent)
    chosen = reader.backend
    if asked == AUTO and chosen != backends[0]:
        reasons = "; ".join(map(str, backend_refusals(config, decoder, platform, backends[0])))
        if reader.is_fast:
            log.info("attention by %s: %s", chosen, reasons)
        else:
            log.warning("attention by %s, which is several times slower than %s: %s", chosen, backends[0], reasons)
    return settled(attention_backends=(chosen, *(name for name in backends if name != chosen)))


def absent_backends(platform: Platform) -> dict[str, Refusal]:
    """Those that this machine cannot run, and why. The compiled kernels of the CPU are looked for, or made, here."""
    if platform.device != "cpu":
        return presence.absent(platform, presence.look())
    try:
        load()
    except KernelsMissing as missing:
        log.warning("running on torch in place of the compiled CPU kernels, several times slower: %s", missing)
        return {"cpu": Refusal(f"cpu: no compiled kernels: {missing}", "install g++, or use --attention-backend reference")}
    return {}


def _size(
    config: EngineConfig, decoder: DecoderConfig, platform: Platform, layout: KVLayout, profile: MemoryProfile | None = None
) -> tuple[KVCapacity, str]:
    """The cache's exact size, and what it follows from: bytes or tokens are fixed, and the format decides over the other.

    Fixed is what the user says, else a share of the memory, but for as many tokens as could ever be used. profile: what the rest
    of a GPU's memory is for; None: not known yet, so that this is what there can be at most.
    """
    cache, batched_tokens = config.cache, config.scheduler.max_num_batched_tokens
    if cache.kv_cache_memory_bytes is None:
        length = _longest(config, decoder)
        max_num_seqs = config.scheduler.max_num_seqs
        most_blocks = max_num_seqs * blocks_for_request(layout, length, batched_tokens) + 1
        most_bytes = max(most_blocks, cache.num_blocks_override or 0) * layout.block_bytes
        wanted_bytes, share = _share(cache.memory_utilization, platform, profile)
        sized_by = _BYTES_FIXED.format(share)
        if most_bytes <= wanted_bytes:
            wanted_bytes = most_bytes
            sized_by = _TOKENS_FIXED.format(f"--max-num-seqs: {max_num_seqs:,} requests of {length:,} tokens")
    else:
        wanted_bytes, sized_by = cache.kv_cache_memory_bytes, _BYTES_FIXED.format("--kv-cache-memory-bytes")
        free_bytes = available_memory_bytes(platform)
        if wanted_bytes > free_bytes:
            raise CapacityError(
                f"--kv-cache-memory-bytes {wanted_bytes} is more than the {free_bytes} bytes that are free on {platform.name} "
                f"(limit {platform.memory_limit_bytes} bytes); lower it"
            )
    if cache.num_blocks_override is not None:
        sized_by = _TOKENS_FIXED.format("--num-gpu-blocks-override")
    capacity = size_cache(
        layout, wanted_bytes, config.model.max_model_len, decoder.max_position, batched_tokens, cache.num_blocks_override
    )
    return capacity, sized_by


def _share(utilization: float, platform: Platform, profile: MemoryProfile | None) -> tuple[int, str]:
    """The bytes that the cache may have, and in words: of what is free on a CPU, of the whole on a GPU, which is ours alone."""
    flag = f"--gpu-memory-utilization {utilization:g}"
    if profile is not None:
        return profile.cache_bytes(utilization), f"{flag} of {profile.total:,} bytes"
    free_bytes = available_memory_bytes(platform)
    if platform.device == "cpu":
        return int(free_bytes * utilization), f"{flag} of {free_bytes:,} free bytes"
    total_bytes = platform.memory_limit_bytes
    wanted_bytes = int(total_bytes * utilization)
    if wanted_bytes > free_bytes:
        raise CapacityError(
            f"{flag} x {total_bytes} bytes = {wanted_bytes} bytes, but only {free_bytes} bytes are free on {platform.name}; "
            f"end what else runs there, lower it, or use --kv-cache-memory-bytes"
        )
    return wanted_bytes, f"{flag} of {total_bytes:,} bytes"


def _refuse_check(config: EngineConfig) -> None:
    """A model that makes no logits cannot show what a KV format does to them."""
    if needs_calibration(config.cache.layer_dtypes) and config.cache.kv_check != "off":
        reason = f"{config.cache.layers_name} is checked at start by its effect on logits, and a model that pools makes none"
        raise UnsupportedError(Refusal(reason, "use --kv-check off, or another --kv-cache-dtype"))


def _longest(config: EngineConfig, decoder: DecoderConfig) -> int:
    """The most tokens that a request may have."""
    return decoder.max_position if config.model.max_model_len == AUTO_FIT else config.model.max_model_len


def _kv_layers(names: Sequence[str], layout: KVLayout) -> list[KVLayers]:
    """By the formats' names as users know them; the layout has those of arrangements."""
    specs = zip(names, layout.specs, strict=True)
    kinds = Counter((name, spec.sliding_window, page_bytes(spec) / spec.block_size) for name, spec in specs)
    return [
        KVLayers(format=name, num_layers=count, sliding_window=window, bytes_per_token=count * each)
        for (name, window, each), count in kinds.items()
    ]


def _info(
    config: EngineConfig,
    decoder: DecoderConfig,
    capacity: KVCapacity,
    runner: ModelRunner,
    phases: list[tuple[str, float]],
    adapters: list[LoadedAdapter],
) -> EngineInfo:
    return EngineInfo(
        model=config.model.model,
        architecture=decoder.architecture,
        dtype=config.model.dtype,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        vocab_size=decoder.vocab_size,
        max_model_len=capacity.max_model_len,
        eos_token_ids=list(decoder.eos_token_ids),
        max_logprobs=config.scheduler.max_logprobs,
        logprobs_mode=config.scheduler.logprobs_mode,
        batch_invariant=runner.is_batch_invariant,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_queued_reqs=config.scheduler.max_num_queued_reqs,
        max_num_queued_tokens=config.scheduler.max_num_queued_tokens,
        scheduling_policy=config.scheduler.policy,
        pooling=None if runner.head is None else runner.head.info,
        block_size=capacity.layout.unit_tokens,
        num_blocks=capacity.num_blocks,
        kv_cache_bytes=capacity.num_bytes,
        kv_cache_tokens=capacity.num_tokens,
        max_concurrency=capacity.max_concurrency,
        kv_layers=_kv_layers(config.cache.layer_dtypes, capacity.layout),
        enable_prefix_caching=config.cache.enable_prefix_caching,
        max_loras=0 if config.lora is None else config.lora.max_loras,
        adapters=adapters,
        phases=phases,
        report=[*config_lines(config), *runner.report, *capacity.lines()],
    )
