"""`resolve()`: from what was asked (`EngineOptions`) to what runs (`EngineConfig`), with the origin of every value.

Pure: reads no file, no environment and no clock; the same three arguments give the same answer. Wrong values raise UserError
naming the flag and what is possible; combinations that this build does not have are collected into one UnsupportedError.
Called by `halfbyte.engine.build` before weights are read. Registries of higher floors come in as names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from halfbyte.config import DEFAULT_MODEL, CacheConfig, DType, EngineConfig, EngineOptions, ModelConfig, SchedulerConfig
from halfbyte.errors import Refusal, UnsupportedError, UserError
from halfbyte.platform import Platform
from halfbyte.resolve_execution import COMPILE_MODES, GRAPH_MODES, execution_refusals, resolve_execution
from halfbyte.resolve_lora import MOST_LORA_RANK, MOST_LORAS, lora_refusals, resolve_lora

AUTO_FIT = -1
DTYPES = ("auto", "bfloat16", "float16", "float32")
DTYPE_ALIASES: Mapping[str, str] = {"half": "float16", "float": "float32"}
QUANTIZATIONS = ("auto", "none", "int8")
CPU_ACTIVATIONS = ("auto", "int8")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
SCHEDULING_POLICIES = ("fcfs", "priority")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")

# Names that vLLM knows and this build does not: they are refused as such, not as typing mistakes.
UNSUPPORTED_KV_CACHE_DTYPES = frozenset({"fp8_inc", "turboquant_k3v4_nc", "turboquant_3bit_nc"})
KV_ALIASES: Mapping[str, str] = {"fp8": "fp8_e4m3", **DTYPE_ALIASES}
MLA_RECORD = "_ds_mla"  # how formats end that keep one latent for K and V, so that neither side can be had alone
SLIDING_WINDOW = "sliding_window"
KV_CHECKS = ("refuse", "warn", "off")
FIRST_TOKENS_UNIT = 16
MAX_FIRST_TOKENS = 256
UNSUPPORTED_LOAD_FORMATS = frozenset(
    {"pt", "npcache", "tensorizer", "runai_streamer", "runai_streamer_sharded", "sharded_state", "mistral", "instanttensor"}
    | {"ipc_cache", "modelexpress"}
)

MIN_CUDA_CAPABILITY = (8, 0)
DEFAULT_BLOCK_SIZE = 16
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
# A step of 2048 prompt tokens takes a CPU long enough to hold up every stream; fewer cost no throughput there.
DEFAULT_MAX_NUM_BATCHED_TOKENS_CPU = 512
# Prompt tokens beside decodes: about what a CPU computes in the time in which it reads the weights once more.
DEFAULT_MAX_NUM_MIXED_TOKENS_CPU = 24
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_SEQS_CPU = 64
DEFAULT_MAX_LOGPROBS = 20
DEFAULT_MEMORY_UTILIZATION = 0.92
# Host memory is shared with everything else that runs there, a GPU's is not.
DEFAULT_MEMORY_UTILIZATION_CPU = 0.5

_MAX_COUNT = 2**31 - 1
_MAX_BYTES = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the model's configuration says, before any weight is read.

    dtype: the checkpoint's: float32, float16 or bfloat16. max_position: its longest context, in tokens. layer_windows: of each
    layer, None for full attention. kv_format: what its KV scales, or a rule for such models, ask for; kv_origin: which of them.
    pooling: what it pools for, None: it generates. usual_length: what it is to read where nobody says; None: max_position.
    """

    architecture: str
    dtype: str
    max_position: int
    vocab_size: int
    layer_windows: tuple[int | None, ...] = ()
    kv_format: str | None = None
    kv_origin: str = "checkpoint"
    pooling: str | None = None
    usual_length: int | None = None


def resolve(
    options: EngineOptions,
    facts: ModelFacts,
    platform: Platform,
    *,
    kv_formats: Sequence[str] = ("bfloat16", "float16", "float32"),
    attention_backends: Sequence[str] = ("reference",),
    streams: bool = False,
    kv_plan: Sequence[str] | None = None,
) -> EngineConfig:
    """The configuration that runs, frozen, with `origins` for each of its fields.

    kv_formats, attention_backends: the names that this build has, best first ("auto" takes the first back end).
    streams: whether somebody waits for each token, as behind a server; else only the time of the whole counts.
    kv_plan: the KV format of each layer, of the file that `kv_cache_plan` names.
    Raises UserError (a wrong value) or UnsupportedError (every refusal at once).
    """
    _check_types(options)
    refusals = list(_refusals(options, platform, kv_formats, attention_backends))
    if refusals:
        raise UnsupportedError(*refusals)
    pick = _Picker()
    asked = None if options.attention_backend == "auto" else options.attention_backend
    backend = pick("attention_backend", asked, _backend(options, attention_backends))
    model = _resolve_model(options, facts, platform, backend, pick)
    cache = _resolve_cache(options, model.dtype, facts, platform, pick, kv_formats, kv_plan)
    scheduler = _resolve_scheduler(options, model.max_model_len, platform, pick, streams)
    for name, choices in (("cudagraph_mode", GRAPH_MODES), ("compile", COMPILE_MODES)):
        _one_of(name, getattr(options, name), choices)
    execution = resolve_execution(options, scheduler.max_num_batched_tokens, platform.device, pick)
    for name, most in (("max_loras", MOST_LORAS), ("max_lora_rank", MOST_LORA_RANK)):
        _count(options, name, 1, most)
    return EngineConfig(
        model=model,
        cache=cache,
        scheduler=scheduler,
        execution=execution,
        attention_backend=backend,
        lora=resolve_lora(options, pick),
        origins=pick.origins,
    )


def config_lines(config: EngineConfig) -> list[str]:
    """The configuration as text: one line per part, each value with its origin unless that is a default."""
    lines = []
    for title in ("model", "cache", "scheduler", "execution"):
        part = getattr(config, title)
        names = [f.name for f in fields(part) if f.name != "layer_dtypes"]  # the runner tells of those that differ
        words = [_with_origin(name, getattr(part, name), config.origins) for name in names]
        lines.append(f"{title}: {' '.join(words)}")
    if (lora := config.lora) is not None:
        modules = ", ".join(module.name for module in lora.modules) or "none"
        counts = (_with_origin(name, getattr(lora, name), config.origins) for name in ("max_loras", "max_lora_rank"))
        lines.append(f"adapters: {' '.join(counts)}; at start: {modules}")
    lines.append(_with_origin("attention_backend", config.attention_backend, config.origins))
    return lines


def kv_cache_dtype_refusal(name: str, kv_formats: Sequence[str]) -> Refusal | None:
    """Why `--kv-cache-dtype name` cannot be used here; UserError when there is no such format anywhere."""
    possible = ("auto", *kv_formats)
    sides = name.split(",")
    if name in possible or KV_ALIASES.get(name) in possible:
        return None
    if sorted(side[:2] for side in sides) == ["k:", "v:"]:
        each = [known for known in kv_formats if not known.endswith(MLA_RECORD)]
        unknown = [side[2:] for side in sides if KV_ALIASES.get(side[2:], side[2:]) not in each]
        if not unknown:
            return None
        raise UserError(
            f"--kv-cache-dtype {name}: K and V can each be one of {', '.join(each)}, got {unknown[0]!r}",
            param="kv_cache_dtype",
        )
    if name in UNSUPPORTED_KV_CACHE_DTYPES:
        return Refusal(f"--kv-cache-dtype {name} is not supported", f"possible here: {', '.join(possible)}")
    raise UserError(
        f"--kv-cache-dtype must be one of {', '.join(possible)}, or k:FORMAT,v:FORMAT, got {name!r}", param="kv_cache_dtype"
    )


def load_format_refusal(name: str) -> Refusal | None:
    """The same for `--load-format`."""
    if name in LOAD_FORMATS:
        return None
    if name in UNSUPPORTED_LOAD_FORMATS:
        return Refusal(f"--load-format {name} is not supported yet", f"possible here: {', '.join(LOAD_FORMATS)}")
    raise UserError(f"--load-format must be one of {', '.join(LOAD_FORMATS)}, got {name!r}", param="load_format")


class _Picker:
    """Takes the first value that is there, and notes where it came from."""

    def __init__(self) -> None:
        self.origins: dict[str, str] = {}

    def __call__(self, field: str, given: Any, otherwise: Any, origin: str = "default") -> Any:
        self.origins[field] = origin if given is None else "flag"
        return otherwise if given is None else given


def _refusals(
    options: EngineOptions, platform: Platform, kv_formats: Sequence[str], attention_backends: Sequence[str]
) -> list[Refusal]:
    """Everything in the options that this build or machine does not have."""
    found = [kv_cache_dtype_refusal(options.kv_cache_dtype, kv_formats), load_format_refusal(options.load_format)]
    _one_of("attention_backend", options.attention_backend, ("auto", *attention_backends))
    for name in ("quantization", "cpu_activations"):
        is_compiled = platform.device == "cpu" and _backend(options, attention_backends) == "cpu"
        if getattr(options, name) == "int8" and not is_compiled:
            fix = f"leave {flag_of(name)} out, or use --device cpu with the cpu attention back end"
            found.append(Refusal(f"{flag_of(name)} int8 needs the compiled CPU kernels", fix))
    found += execution_refusals(options, platform.device, _backend(options, attention_backends)) + lora_refusals(options)
    if platform.capability is not None and platform.capability < MIN_CUDA_CAPABILITY:
        wanted, got = (f"{major}.{minor}" for major, minor in (MIN_CUDA_CAPABILITY, platform.capability))
        found.append(Refusal(f"{platform.name} has compute capability {got}, {wanted} is the least", "use --device cpu"))
    return [refusal for refusal in found if refusal is not None]


def _backend(options: EngineOptions, attention_backends: Sequence[str]) -> str:
    return attention_backends[0] if options.attention_backend == "auto" else options.attention_backend


def _resolve_model(options: EngineOptions, facts: ModelFacts, platform: Platform, backend: str, pick: _Picker) -> ModelConfig:
    dtype, dtype_origin = _auto_dtype(facts, platform, backend)
    asked = _plain(options.dtype)
    _one_of("dtype", asked, DTYPES)
    return ModelConfig(
        model=pick("model", None if options.model == DEFAULT_MODEL else options.model, DEFAULT_MODEL),
        tokenizer=pick("tokenizer", options.tokenizer, options.model, "checkpoint"),
        revision=pick("revision", options.revision, None),
        load_format=pick("load_format", None if options.load_format == "auto" else options.load_format, "auto"),
        hf_overrides=pick("hf_overrides", options.hf_overrides, {}),
        runner=pick("runner", None if options.runner == "auto" else options.runner, _runner(facts), "checkpoint"),
        convert=pick(
            "convert", None if options.convert == "auto" else facts.pooling or "none", facts.pooling or "none", "checkpoint"
        ),
        dtype=cast(DType, pick("dtype", None if asked == "auto" else asked, dtype, dtype_origin)),
        quantization=pick("quantization", _given_choice(options, "quantization", QUANTIZATIONS), QUANTIZATIONS[0]),
        cpu_activations=pick("cpu_activations", _given_choice(options, "cpu_activations", CPU_ACTIVATIONS), CPU_ACTIVATIONS[0]),
        device=pick("device", None if options.device == "auto" else platform.device, platform.device, "platform"),
        max_model_len=_max_model_len(options, facts, pick),
        seed=pick("seed", _count(options, "seed", -(2**63), 2**63 - 1), None),
        num_threads=pick("num_threads", _count(options, "num_threads", 1, 1024), platform.num_threads, "platform"),
    )


def _runner(facts: ModelFacts) -> str:
    return "generate" if facts.pooling is None else "pooling"


def _auto_dtype(facts: ModelFacts, platform: Platform, backend: str) -> tuple[str, str]:
    """The checkpoint's own type where the machine computes in it, and where that came from.

    The compiled CPU kernels read 16-bit weights and compute in float32. Without them, a CPU that has no bf16 instructions
    emulates 16-bit types more slowly than it computes in float32, which holds them exactly.
    """
    if platform.device == "cpu":
        if backend != "cpu" and not platform.native_bf16 and facts.dtype != "float32":
            return "float32", "platform"
        return facts.dtype, "checkpoint"
    return ("bfloat16", "platform") if facts.dtype == "float32" else (facts.dtype, "checkpoint")


def _max_model_len(options: EngineOptions, facts: ModelFacts, pick: _Picker) -> int:
    given = _count(options, "max_model_len", AUTO_FIT, _MAX_COUNT)
    if given == 0:
        raise UserError(
            "--max-model-len must be at least 1, or auto (-1) for the longest that fits memory", param="max_model_len"
        )
    if given is not None and given > facts.max_position:
        raise UserError(
            f"--max-model-len {given} is more than the {facts.max_position} positions of this {facts.architecture} checkpoint; "
            f"use at most {facts.max_position}, or extend its rotary embedding with --hf-overrides",
            param="max_model_len",
        )
    usual = min(facts.usual_length or facts.max_position, facts.max_position)
    return int(pick("max_model_len", given, usual, "checkpoint"))


def _resolve_cache(
    options: EngineOptions,
    dtype: DType,
    facts: ModelFacts,
    platform: Platform,
    pick: _Picker,
    kv_formats: Sequence[str],
    kv_plan: Sequence[str] | None,
) -> CacheConfig:
    utilization = options.gpu_memory_utilization
    if utilization is not None and not 0.0 < utilization <= 1.0:
        raise UserError(f"--gpu-memory-utilization must be in (0, 1], got {utilization}", param="gpu_memory_utilization")
    on_cpu = platform.device == "cpu"
    default_utilization = DEFAULT_MEMORY_UTILIZATION_CPU if on_cpu else DEFAULT_MEMORY_UTILIZATION
    block_size = _count(options, "block_size", 1, BLOCK_SIZES[-1])
    if block_size is not None and block_size not in BLOCK_SIZES:
        raise UserError(f"--block-size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {block_size}", param="block_size")
    kv = _pick_kv_format(options, dtype, facts, pick)
    first_tokens = _count(options, "kv_cache_first_tokens", 0, MAX_FIRST_TOKENS)
    if first_tokens is not None and first_tokens % FIRST_TOKENS_UNIT:
        raise UserError(
            f"--kv-cache-first-tokens must be a multiple of {FIRST_TOKENS_UNIT}, got {first_tokens}",
            param="kv_cache_first_tokens",
        )
    # block 0 is never handed out, so that a pool needs two
    num_blocks = _count(options, "num_gpu_blocks_override", 2, _MAX_COUNT)
    return CacheConfig(
        block_size=pick("block_size", block_size, DEFAULT_BLOCK_SIZE),
        kv_cache_dtype=kv,
        layer_dtypes=_layer_dtypes(options, kv, dtype, facts, kv_formats, kv_plan),
        first_tokens=pick("first_tokens", first_tokens, None),
        kv_calibration=pick("kv_calibration", options.kv_calibration, None),
        kv_check=pick("kv_check", _given_choice(options, "kv_check", KV_CHECKS), KV_CHECKS[0]),
        kv_cache_memory_bytes=pick("kv_cache_memory_bytes", _count(options, "kv_cache_memory_bytes", 1, _MAX_BYTES), None),
        memory_utilization=pick("memory_utilization", utilization, default_utilization, "platform" if on_cpu else "default"),
        num_blocks_override=pick("num_blocks_override", num_blocks, None),
        enable_prefix_caching=pick("enable_prefix_caching", options.enable_prefix_caching, True),
    )


def _pick_kv_format(options: EngineOptions, dtype: DType, facts: ModelFacts, pick: _Picker) -> str:
    """What the user says, else what the checkpoint's scales or the model's rule ask for, else the model's dtype."""
    asked = _format_name(options.kv_cache_dtype)
    otherwise = (dtype, pick.origins["dtype"]) if facts.kv_format is None else (facts.kv_format, facts.kv_origin)
    return str(pick("kv_cache_dtype", None if asked == "auto" else asked, *otherwise))


def _format_name(name: str) -> str:
    """Without aliases, also in pairs: k:fp8,v:nvfp4 is k:fp8_e4m3,v:nvfp4."""
    if "," not in name:
        return KV_ALIASES.get(name, name)
    return ",".join(side[:2] + KV_ALIASES.get(side[2:], side[2:]) for side in name.split(","))


def _layer_dtypes(
    options: EngineOptions,
    kv_format: str,
    dtype: DType,
    facts: ModelFacts,
    kv_formats: Sequence[str],
    kv_plan: Sequence[str] | None,
) -> tuple[str, ...]:
    """Each layer's format: that of the plan, or of the whole cache but for the layers that are skipped."""
    num_layers = len(facts.layer_windows)
    if kv_plan is None:
        skipped = _skipped_layers(options, facts)
        return tuple(dtype if layer in skipped else kv_format for layer in range(num_layers))
    flag = f"--kv-cache-plan {options.kv_cache_plan}"
    if options.kv_cache_dtype != "auto" or options.kv_cache_dtype_skip_layers:
        raise UserError(
            f"{flag} says the format of every layer; leave --kv-cache-dtype and its skip list out", param="kv_cache_plan"
        )
    if len(kv_plan) != num_layers:
        raise UserError(f"{flag} is for {len(kv_plan)} layers, this model has {num_layers}", param="kv_cache_plan")
    if "auto" in kv_plan:
        raise UserError(f"{flag} must name the format of every layer, got 'auto'", param="kv_cache_plan")
    refusals = [refusal for name in dict.fromkeys(kv_plan) if (refusal := kv_cache_dtype_refusal(name, kv_formats))]
    if refusals:
        raise UnsupportedError(*refusals)
    return tuple(map(_format_name, kv_plan))


def _skipped_layers(options: EngineOptions, facts: ModelFacts) -> frozenset[int]:
    """The layers that --kv-cache-dtype-skip-layers names: indices, or all with a sliding window."""
    found: set[int] = set()
    flag, num_layers = "--kv-cache-dtype-skip-layers", len(facts.layer_windows)
    for word in options.kv_cache_dtype_skip_layers or ():
        if word == SLIDING_WINDOW:
            found |= {layer for layer, window in enumerate(facts.layer_windows) if window is not None}
        elif str(word).isdecimal() and int(word) < num_layers:
            found.add(int(word))
        else:
            raise UserError(
                f"{flag} takes layer numbers from 0 to {num_layers - 1} and {SLIDING_WINDOW}, got {word!r}",
                param="kv_cache_dtype_skip_layers",
            )
    return frozenset(found)


def _resolve_scheduler(
    options: EngineOptions, max_model_len: int, platform: Platform, pick: _Picker, streams: bool
) -> SchedulerConfig:
    chunked = pick("enable_chunked_prefill", options.enable_chunked_prefill, True)
    budget = _token_budget(options, max_model_len, chunked, platform, pick)
    return SchedulerConfig(
        max_num_seqs=_max_num_seqs(options, budget, platform, pick),
        max_num_batched_tokens=budget,
        max_num_queued_reqs=pick("max_num_queued_reqs", _count(options, "max_num_queued_reqs", 1, _MAX_COUNT), None),
        max_num_queued_tokens=pick("max_num_queued_tokens", _count(options, "max_num_queued_tokens", 1, _MAX_COUNT), None),
        long_prefill_token_threshold=pick(
            "long_prefill_token_threshold", _count(options, "long_prefill_token_threshold", 0, _MAX_COUNT), 0
        ),
        max_num_mixed_tokens=_mixed_tokens(options, chunked and streams and platform.device == "cpu", chunked, pick),
        enable_chunked_prefill=chunked,
        # On a CPU the thread that schedules computes, too, so that nothing would overlap.
        async_scheduling=pick("async_scheduling", options.async_scheduling, platform.device != "cpu", "platform"),
        policy=pick("policy", _given_choice(options, "scheduling_policy", SCHEDULING_POLICIES), SCHEDULING_POLICIES[0]),
        max_logprobs=pick("max_logprobs", _count(options, "max_logprobs", -1, _MAX_COUNT), DEFAULT_MAX_LOGPROBS),
        logprobs_mode=pick("logprobs_mode", _given_choice(options, "logprobs_mode", LOGPROBS_MODES), LOGPROBS_MODES[0]),
    )


def _mixed_tokens(options: EngineOptions, limits: bool, chunked: bool, pick: _Picker) -> int:
    given = _count(options, "max_num_mixed_tokens", 0, _MAX_COUNT)
    if given and not chunked:
        raise UserError("--max-num-mixed-tokens cuts prompts into chunks; leave chunked prefill on", param="max_num_mixed_tokens")
    default = DEFAULT_MAX_NUM_MIXED_TOKENS_CPU if limits else 0
    return int(pick("max_num_mixed_tokens", given, default, "platform" if limits else "default"))


def _token_budget(options: EngineOptions, max_model_len: int, chunked: bool, platform: Platform, pick: _Picker) -> int:
    """max_num_batched_tokens. A step must hold a token of each request, and without chunked prefill the longest prompt."""
    given = _count(options, "max_num_batched_tokens", 1, _MAX_COUNT)
    if not chunked and max_model_len == AUTO_FIT:
        raise UserError("--no-enable-chunked-prefill needs a fixed --max-model-len, got auto", param="enable_chunked_prefill")
    if not chunked and given is not None and given < max_model_len:
        raise UserError(
            f"--max-num-batched-tokens {given} is less than the max_model_len {max_model_len}, so that a long prompt would never "
            "fit into a step; raise it, lower --max-model-len or leave chunked prefill on",
            param="max_num_batched_tokens",
        )
    on_cpu = platform.device == "cpu"
    default = DEFAULT_MAX_NUM_BATCHED_TOKENS_CPU if on_cpu else DEFAULT_MAX_NUM_BATCHED_TOKENS
    default = max(default, _count(options, "max_num_seqs", 1, _MAX_COUNT) or 0, 0 if chunked else max_model_len)
    return int(pick("max_num_batched_tokens", given, default, "platform" if on_cpu else "default"))


def _max_num_seqs(options: EngineOptions, budget: int, platform: Platform, pick: _Picker) -> int:
    """Requests that run at once; a decode takes one token of the budget each, so there are never more than that."""
    given = _count(options, "max_num_seqs", 1, _MAX_COUNT)
    if given is not None and given > budget:
        raise UserError(
            f"--max-num-seqs {given} is more than --max-num-batched-tokens {budget}: a step could not serve them all; "
            f"use at most {budget} or raise --max-num-batched-tokens",
            param="max_num_seqs",
        )
    on_cpu = platform.device == "cpu"
    default = min(budget, DEFAULT_MAX_NUM_SEQS_CPU if on_cpu else DEFAULT_MAX_NUM_SEQS)
    return int(pick("max_num_seqs", given, default, "platform" if on_cpu else "default"))


def _check_types(options: EngineOptions) -> None:
    """Options also arrive from Python, unparsed."""
    for name in (
        "model",
        "load_format",
        "dtype",
        "quantization",
        "cpu_activations",
        "device",
        "kv_cache_dtype",
        "kv_check",
        "scheduling_policy",
        "logprobs_mode",
        "attention_backend",
        "cudagraph_mode",
        "compile",
        "runner",
        "convert",
    ):
        if not isinstance(getattr(options, name), str):
            raise UserError(f"{flag_of(name)} must be a text, got {getattr(options, name)!r}", param=name)
    for name in ("kv_cache_plan", "kv_calibration"):
        if not isinstance(getattr(options, name), str | None):
            raise UserError(f"{flag_of(name)} must be the name of a file, got {getattr(options, name)!r}", param=name)
    for name in ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager", "async_scheduling", "enable_lora"):
        if not isinstance(getattr(options, name), bool | None):
            raise UserError(f"{flag_of(name)} must be true or false, got {getattr(options, name)!r}", param=name)
    utilization = options.gpu_memory_utilization
    if utilization is not None and (isinstance(utilization, bool) or not isinstance(utilization, int | float)):
        raise UserError(
            f"--gpu-memory-utilization must be a number in (0, 1], got {utilization!r}", param="gpu_memory_utilization"
        )
    if options.hf_overrides is not None and not isinstance(options.hf_overrides, Mapping):
        raise UserError(f"--hf-overrides must be a JSON object, got {options.hf_overrides!r}", param="hf_overrides")


def _count(options: EngineOptions, name: str, low: int, high: int) -> int | None:
    value: int | None = getattr(options, name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high):
        raise UserError(f"{flag_of(name)} must be an integer in [{low}, {high}], got {value!r}", param=name)
    return value


def _given_choice(options: EngineOptions, name: str, choices: Sequence[str]) -> str | None:
    """The option if it differs from its default, which is the first choice."""
    value = getattr(options, name)
    _one_of(name, value, choices)
    return None if value == choices[0] else cast(str, value)


def _one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UserError(f"{flag_of(name)} must be one of {', '.join(choices)}, got {value!r}", param=name)


def flag_of(name: str) -> str:
    """The command-line flag of an option."""
    return "--" + name.replace("_", "-")


def _plain(dtype: str) -> str:
    return DTYPE_ALIASES.get(dtype, dtype)


def _with_origin(name: str, value: Any, origins: Mapping[str, str]) -> str:
    origin = origins.get(name, "default")
    return f"{name}={value}" if origin == "default" else f"{name}={value} ({origin})"
