"""From options to a running core around an encoder: the same scheduler and core, and neither chunks nor a KV cache.

What concerns a cache, or how decoders are computed, is refused by its flag: an accepted one would do nothing. Called by
`halfbyte.engine.build`; torch is imported on the way.
"""

from __future__ import annotations

from dataclasses import fields, replace

from halfbyte.config import EngineConfig, EngineOptions
from halfbyte.engine.core import EngineCore
from halfbyte.engine.phases import Phases
from halfbyte.engine.scheduler import Scheduler
from halfbyte.errors import Refusal, UnsupportedError, UserError
from halfbyte.kvcache.manager import KVCacheManager
from halfbyte.kvcache.spec import KVLayout
from halfbyte.model_runner.decoder_config import DecoderConfig, config_from_files
from halfbyte.model_runner.encoder_config import EncoderConfig, encoder_config
from halfbyte.model_runner.pooling_plan import PoolingPlan, model_overrides
from halfbyte.model_runner.source import ModelFiles
from halfbyte.platform import Platform
from halfbyte.pooling import PoolingInfo
from halfbyte.resolve import AUTO_FIT, ModelFacts, config_lines, flag_of, resolve
from halfbyte.types import EngineInfo

# The options that an encoder has no use for
WITHOUT_USE = frozenset(
    {
        *("quantization", "cpu_activations", "attention_backend", "cudagraph_mode", "cudagraph_capture_sizes", "compile"),
        *("block_size", "kv_cache_dtype", "kv_cache_dtype_skip_layers", "kv_cache_first_tokens", "kv_cache_plan"),
        *("kv_calibration", "kv_check", "kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"),
        *("long_prefill_token_threshold", "max_num_mixed_tokens", "max_logprobs", "logprobs_mode"),
        *("enable_lora", "lora_modules", "max_loras", "max_lora_rank"),
    }
)
NO_CACHE = KVLayout((), (), ())


def build_encoder(
    options: EngineOptions, files: ModelFiles, plan: PoolingPlan, platform: Platform, phases: Phases
) -> tuple[EngineCore, EngineInfo]:
    """Start an engine for an encoder. HalfbyteError as `build_engine`."""
    _refuse(options)
    encoder = _configuration(options, files, plan)
    phases.end("read configuration")
    config = _resolve(options, encoder, plan, platform)
    from halfbyte.model_runner.encoder_runner import EncoderRunner

    phases.end("resolve configuration, import torch")
    runner = EncoderRunner(config, files, encoder, plan)
    phases.end("load weights")
    runner.warm_up()
    phases.end("warm up")
    scheduler = config.scheduler
    manager = KVCacheManager(
        NO_CACHE, 2, enable_prefix_caching=False, max_num_batched_tokens=scheduler.max_num_batched_tokens
    )  # two: the null block, and one that nobody asks for
    core = EngineCore(
        Scheduler(scheduler, manager, max_model_len=config.model.max_model_len),
        runner,
        async_scheduling=scheduler.async_scheduling,
    )
    return core, _info(config, encoder, runner.head.info, runner.report, phases)


def _configuration(options: EngineOptions, files: ModelFiles, plan: PoolingPlan) -> EncoderConfig | DecoderConfig:
    overrides = model_overrides(options, plan)
    if plan.reads_both_ways:
        return config_from_files(files, overrides, may_read_both_ways=True)
    return encoder_config(files, overrides)


def _refuse(options: EngineOptions) -> None:
    defaults = EngineOptions()
    given = [f.name for f in fields(options) if getattr(options, f.name) != getattr(defaults, f.name)]
    refusals = [
        Refusal(f"{flag_of(name)} is for models with a KV cache", "leave it out") for name in given if name in WITHOUT_USE
    ]
    for name in ("enable_prefix_caching", "enable_chunked_prefill"):
        if getattr(options, name):
            refusals.append(Refusal(f"{flag_of(name)}: an encoder computes each text whole, at once", "leave it out"))
    if refusals:
        raise UnsupportedError(*refusals)


def _resolve(
    options: EngineOptions, encoder: EncoderConfig | DecoderConfig, plan: PoolingPlan, platform: Platform
) -> EngineConfig:
    facts = ModelFacts(
        architecture=encoder.architecture,
        dtype=encoder.checkpoint_dtype,
        max_position=encoder.max_position,
        vocab_size=encoder.vocab_size,
        pooling=plan.task,
        usual_length=plan.max_tokens,
    )
    length = None if options.max_model_len == AUTO_FIT else options.max_model_len
    longest = length or min(plan.max_tokens or encoder.max_position, encoder.max_position)
    budget = options.max_num_batched_tokens
    if budget is not None and budget < longest:
        raise UserError(
            f"--max-num-batched-tokens {budget} is less than the max_model_len {longest}; an encoder computes a text in one"
            " step; raise it, or lower --max-model-len",
            param="max_num_batched_tokens",
        )
    whole = replace(options, max_model_len=length, enable_chunked_prefill=False, enable_prefix_caching=False)
    return resolve(whole, facts, platform, attention_backends=("torch",))


def _info(
    config: EngineConfig, encoder: EncoderConfig | DecoderConfig, pooling: PoolingInfo, report: list[str], phases: Phases
) -> EngineInfo:
    model, scheduler = config.model, config.scheduler
    limits = f"scheduler: max_num_seqs={scheduler.max_num_seqs} max_num_batched_tokens={scheduler.max_num_batched_tokens}"
    return EngineInfo(
        model=model.model,
        architecture=encoder.architecture,
        dtype=model.dtype,
        kv_cache_dtype="none",
        vocab_size=encoder.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=list(encoder.eos_token_ids),
        max_logprobs=0,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_queued_reqs=scheduler.max_num_queued_reqs,
        max_num_queued_tokens=scheduler.max_num_queued_tokens,
        scheduling_policy=scheduler.policy,
        pooling=pooling,
        block_size=0,
        num_blocks=0,
        kv_cache_bytes=0,
        kv_cache_tokens=0,
        max_concurrency=float(scheduler.max_num_seqs),
        enable_prefix_caching=False,
        phases=phases.done,
        report=[config_lines(config)[0], limits, *report],
    )
