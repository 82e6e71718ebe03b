"""`resolve()`: every value, where it came from, and what each wrong one is answered with."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from halfbyte import config
from halfbyte.config import (
    CacheConfig,
    EngineConfig,
    EngineOptions,
    ExecutionConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from halfbyte.errors import UnsupportedError, UserError
from halfbyte.platform import Platform
from halfbyte.resolve import (
    BLOCK_SIZES,
    DTYPES,
    LOAD_FORMATS,
    UNSUPPORTED_KV_CACHE_DTYPES,
    ModelFacts,
    config_lines,
    flag_of,
    resolve,
)

CPU = Platform(device="cpu", name="CPU", num_threads=6, memory_limit_bytes=2**34, native_bf16=True)
OLD_CPU = replace(CPU, native_bf16=False)
GPU = Platform(device="cuda", name="GPU", num_threads=6, memory_limit_bytes=2**36, native_bf16=True, capability=(9, 0))
ROCM = replace(GPU, device="rocm", capability=None)
FACTS = ModelFacts(
    architecture="LlamaForCausalLM", dtype="bfloat16", max_position=8192, vocab_size=49152, layer_windows=(None, 512, 512, None)
)
KV_FORMATS = ("bfloat16", "float16", "float32", "fp8_e4m3", "nvfp4", "kv4")


def resolved(platform: Platform = CPU, facts: ModelFacts = FACTS, **options: Any) -> EngineConfig:
    return resolve(EngineOptions(**options), facts, platform)


def resolved_kv(facts: ModelFacts = FACTS, plan: list[str] | None = None, **options: Any) -> EngineConfig:
    """In a build with more than the plain formats."""
    return resolve(EngineOptions(**options), facts, CPU, kv_formats=KV_FORMATS, kv_plan=plan)


def test_defaults_on_a_cpu() -> None:
    found = resolved()
    assert found.model == ModelConfig(
        model="smollm2-135m",
        tokenizer="smollm2-135m",
        revision=None,
        load_format="auto",
        hf_overrides={},
        runner="generate",
        convert="none",
        dtype="bfloat16",
        quantization="auto",
        cpu_activations="auto",
        device="cpu",
        max_model_len=8192,
        seed=None,
        num_threads=6,
    )
    assert found.cache == CacheConfig(
        block_size=16,
        kv_cache_dtype="bfloat16",
        layer_dtypes=("bfloat16",) * 4,
        first_tokens=None,
        kv_calibration=None,
        kv_check="refuse",
        kv_cache_memory_bytes=None,
        memory_utilization=0.5,
        num_blocks_override=None,
        enable_prefix_caching=True,
    )
    assert found.scheduler == SchedulerConfig(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_num_queued_reqs=None,
        max_num_queued_tokens=None,
        long_prefill_token_threshold=0,
        enable_chunked_prefill=True,
        max_num_mixed_tokens=0,
        policy="fcfs",
        max_logprobs=20,
        logprobs_mode="raw_logprobs",
    )
    assert found.attention_backend == "reference"


def test_the_token_budget_holds_a_token_of_each_request() -> None:
    assert resolved(max_num_seqs=4096).scheduler.max_num_batched_tokens == 4096
    with pytest.raises(UserError, match="--max-num-seqs 4096 is more than --max-num-batched-tokens 2048"):
        resolved(max_num_seqs=4096, max_num_batched_tokens=2048)


def test_defaults_on_a_gpu() -> None:
    found = resolved(GPU)
    assert (found.scheduler.max_num_seqs, found.cache.memory_utilization, found.model.device) == (256, 0.92, "cuda")


def test_every_field_has_an_origin() -> None:
    found = resolved(seed=1, block_size=32, scheduling_policy="priority")
    names = {f.name for part in (found.model, found.cache, found.scheduler, found.execution) for f in fields(part)}
    names.add("attention_backend")
    assert set(found.origins) == names - {"layer_dtypes"}, "which follow from others"
    assert set(found.origins.values()) <= {"default", "flag", "checkpoint", "platform"}
    assert {name for name, origin in found.origins.items() if origin == "flag"} == {"seed", "block_size", "policy"}
    assert found.origins["max_model_len"] == "checkpoint" and found.origins["num_threads"] == "platform"


def test_steps_are_scheduled_ahead_where_something_else_computes() -> None:
    asked = {
        (p.device, given): resolved(p, async_scheduling=given).scheduler for p in (CPU, GPU) for given in (None, False, True)
    }
    assert {key for key, found in asked.items() if found.async_scheduling} == {("cpu", True), ("cuda", None), ("cuda", True)}
    assert resolved(GPU).origins["async_scheduling"] == "platform"
    with pytest.raises(UserError, match="--async-scheduling must be true or false"):
        resolved(async_scheduling="auto")


def test_prompts_give_way_to_streams_on_a_cpu() -> None:
    limits = {
        (platform.device, streams): resolve(EngineOptions(), FACTS, platform, streams=streams).scheduler.max_num_mixed_tokens
        for platform in (CPU, GPU)
        for streams in (False, True)
    }
    assert limits == {("cpu", False): 0, ("cpu", True): 24, ("cuda", False): 0, ("cuda", True): 0}
    given = EngineOptions(max_num_mixed_tokens=5)
    assert resolve(given, FACTS, CPU).scheduler.max_num_mixed_tokens == 5


@pytest.mark.parametrize("option", [f.name for f in fields(EngineOptions)])
def test_every_option_changes_the_configuration_or_belongs_to_the_front_end(option: str) -> None:
    """No accepted flag does nothing: each option reaches EngineConfig, except where files are found before it exists."""
    changed: dict[str, Any] = {
        **dict.fromkeys(("model", "tokenizer", "revision"), "other"),
        "load_format": "dummy",
        "hf_overrides": {"rope_theta": 1},
        "dtype": "float32",
        "quantization": "none",
        "cpu_activations": "int8",
        "device": "cpu",
        **dict.fromkeys(("enable_prefix_caching", "enable_chunked_prefill"), False),
        "async_scheduling": True,
        "scheduling_policy": "priority",
        "logprobs_mode": "raw_logits",
        "kv_cache_dtype": "float32",
        "kv_calibration": "a file",
        "kv_check": "warn",
        "gpu_memory_utilization": 0.25,
        "attention_backend": "reference",
        "enforce_eager": True,
        "cudagraph_mode": "none",
        "compile": "native",
        "runner": "pooling",
        "convert": "embed",
    }
    if option in ("hf_token", "download_dir"):
        return
    if option in ("kv_cache_plan", "kv_cache_dtype_skip_layers"):  # they say what single layers have
        assert skipping_or_planned(option).cache.layer_dtypes == ("bfloat16", "nvfp4", "nvfp4", "nvfp4")
        return
    if option == "cudagraph_capture_sizes":  # of graphs, which a CPU does not have
        assert resolved(GPU, cudagraph_capture_sizes=["8", 2]).execution.cudagraph_capture_sizes == (2, 8)
        return
    if option in ("lora_modules", "max_loras", "max_lora_rank"):  # mean nothing without adapters
        given = {option: ["a=/adapters/a"] if option == "lora_modules" else 2}
        assert resolved(enable_lora=True, **given).lora != resolved(enable_lora=True).lora
        return
    changed["enable_lora"] = True
    back_ends = {"attention_backends": ("cpu", "reference")} if option == "cpu_activations" else {}
    found = resolve(EngineOptions(**{option: changed.get(option, 32)}), FACTS, CPU, **back_ends)
    assert found != resolved() or found.origins != resolved().origins
    assert option == "enable_lora" or "flag" in found.origins.values()


def skipping_or_planned(option: str) -> EngineConfig:
    if option == "kv_cache_plan":
        return resolved_kv(kv_cache_plan="a file", plan=["bfloat16", "nvfp4", "nvfp4", "nvfp4"])
    return resolved_kv(kv_cache_dtype="nvfp4", kv_cache_dtype_skip_layers=["0"])


@pytest.mark.parametrize(
    ("platform", "checkpoint", "asked", "dtype", "origin"),
    [
        (CPU, "bfloat16", "auto", "bfloat16", "checkpoint"),
        (CPU, "float32", "auto", "float32", "checkpoint"),
        (CPU, "float16", "auto", "float16", "checkpoint"),
        (OLD_CPU, "bfloat16", "auto", "float32", "platform"),
        (OLD_CPU, "float16", "auto", "float32", "platform"),
        (OLD_CPU, "float32", "auto", "float32", "checkpoint"),
        (OLD_CPU, "float32", "bfloat16", "bfloat16", "flag"),
        (GPU, "float32", "auto", "bfloat16", "platform"),
        (GPU, "float16", "auto", "float16", "checkpoint"),
        (ROCM, "bfloat16", "auto", "bfloat16", "checkpoint"),
        (GPU, "bfloat16", "float", "float32", "flag"),
        (CPU, "bfloat16", "half", "float16", "flag"),
    ],
)
def test_dtype(platform: Platform, checkpoint: str, asked: str, dtype: str, origin: str) -> None:
    found = resolved(platform, replace(FACTS, dtype=checkpoint), dtype=asked)
    assert (found.model.dtype, found.origins["dtype"]) == (dtype, origin)
    assert (found.cache.kv_cache_dtype, found.origins["kv_cache_dtype"]) == (dtype, origin), "auto KV is the model's type"


def test_compiled_kernels_keep_16_bit_weights_on_any_cpu() -> None:
    found = resolve(EngineOptions(), FACTS, OLD_CPU, attention_backends=("cpu", "reference"))
    assert (found.attention_backend, found.model.dtype, found.origins["dtype"]) == ("cpu", "bfloat16", "checkpoint")
    asked = resolve(EngineOptions(attention_backend="reference"), FACTS, OLD_CPU, attention_backends=("cpu", "reference"))
    assert (asked.attention_backend, asked.model.dtype) == ("reference", "float32")


@pytest.mark.parametrize("platform", [CPU, GPU])
@pytest.mark.parametrize("name", ["quantization", "cpu_activations"])
def test_int8_needs_the_compiled_kernels(name: str, platform: Platform) -> None:
    options = EngineOptions(**{name: "int8"})
    if platform is CPU:
        assert getattr(resolve(options, FACTS, CPU, attention_backends=("cpu", "reference")).model, name) == "int8"
    with pytest.raises(UnsupportedError, match=f"{flag_of(name)} int8 needs the compiled CPU kernels"):
        resolve(options, FACTS, platform, attention_backends=("reference",))


def test_kv_cache_dtype_of_its_own() -> None:
    found = resolved(kv_cache_dtype="float32")
    assert (found.model.dtype, found.cache.kv_cache_dtype, found.origins["kv_cache_dtype"]) == ("bfloat16", "float32", "flag")


@pytest.mark.parametrize(
    ("asked", "length", "origin"), [(None, 8192, "checkpoint"), (-1, -1, "flag"), (8192, 8192, "flag"), (1, 1, "flag")]
)
def test_max_model_len(asked: int | None, length: int, origin: str) -> None:
    found = resolved(max_model_len=asked)
    assert (found.model.max_model_len, found.origins["max_model_len"]) == (length, origin)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_KV_CACHE_DTYPES))
def test_known_kv_formats_are_refused_with_what_works(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"--kv-cache-dtype {name} is not supported") as caught:
        resolved(kv_cache_dtype=name)
    assert "possible here: auto, bfloat16, float16, float32" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "format"),
    [
        ("fp8", "fp8_e4m3"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("half", "float16"),
        ("k:fp8,v:nvfp4", "k:fp8_e4m3,v:nvfp4"),
        ("v:nvfp4,k:half", "v:nvfp4,k:float16"),
    ],
)
def test_kv_formats_by_their_other_names(asked: str, format: str) -> None:
    found = resolved_kv(kv_cache_dtype=asked)
    assert (found.cache.kv_cache_dtype, found.origins["kv_cache_dtype"]) == (format, "flag")
    assert found.cache.layer_dtypes == (format,) * 4


@pytest.mark.parametrize("asked", ["k:fp8,v:nvfp3", "k:fp8,v:", "k:auto,v:nvfp4", "v:kv9,k:nvfp4"])
def test_both_sides_of_a_pair_are_formats(asked: str) -> None:
    with pytest.raises(UserError, match=f"--kv-cache-dtype {asked}: K and V can each be one of bfloat16, .*, got ") as caught:
        resolved_kv(kv_cache_dtype=asked)
    assert caught.value.param == "kv_cache_dtype"


@pytest.mark.parametrize("asked", ["k:fp8", "k:fp8,k:fp8", "k:fp8,v:fp8,v:fp8", "fp8,nvfp4"])
def test_what_is_no_pair(asked: str) -> None:
    with pytest.raises(UserError, match="--kv-cache-dtype must be one of auto, .*, or k:FORMAT,v:FORMAT"):
        resolved_kv(kv_cache_dtype=asked)


@pytest.mark.parametrize("origin", ["checkpoint", "rule for LlamaForCausalLM"])
def test_auto_takes_what_the_checkpoint_or_a_rule_asks_for(origin: str) -> None:
    facts = replace(FACTS, kv_format="fp8_e4m3", kv_origin=origin)
    found = resolved_kv(facts)
    assert (found.cache.kv_cache_dtype, found.origins["kv_cache_dtype"]) == ("fp8_e4m3", origin)
    assert f"kv_cache_dtype=fp8_e4m3 ({origin})" in config_lines(found)[1]
    found = resolved_kv(facts, kv_cache_dtype="nvfp4")
    assert (found.cache.kv_cache_dtype, found.origins["kv_cache_dtype"]) == ("nvfp4", "flag")


@pytest.mark.parametrize(
    ("words", "skipped"),
    [
        ([], []),
        (["0"], [0]),
        ([0, "3"], [0, 3]),
        (["sliding_window"], [1, 2]),
        (["3", "sliding_window"], [1, 2, 3]),
    ],
)
def test_skipped_layers_stay_in_the_models_dtype(words: list[Any], skipped: list[int]) -> None:
    found = resolved_kv(kv_cache_dtype="nvfp4", kv_cache_dtype_skip_layers=words, dtype="float16")
    assert [layer for layer, name in enumerate(found.cache.layer_dtypes) if name == "float16"] == skipped
    assert set(found.cache.layer_dtypes) <= {"float16", "nvfp4"} and found.cache.kv_cache_dtype == "nvfp4"


@pytest.mark.parametrize("word", ["4", "-1", "full_attention", "1.0", "0-3", -1])
def test_a_layer_that_is_none_cannot_be_skipped(word: Any) -> None:
    with pytest.raises(UserError, match="--kv-cache-dtype-skip-layers takes layer numbers from 0 to 3 and sliding_window, got"):
        resolved_kv(kv_cache_dtype="nvfp4", kv_cache_dtype_skip_layers=["0", word])


def test_a_plan_says_the_format_of_every_layer() -> None:
    plan = ["fp8_e4m3", "kv4", "k:fp8_e4m3,v:nvfp4", "bfloat16"]
    found = resolved_kv(kv_cache_plan="plan.json", plan=plan)
    assert found.cache.layer_dtypes == tuple(plan)


@pytest.mark.parametrize("layers", [1, 3, 5])
def test_a_plan_is_for_a_model_of_so_many_layers(layers: int) -> None:
    with pytest.raises(UserError, match=f"--kv-cache-plan plan.json is for {layers} layers, this model has 4"):
        resolved_kv(kv_cache_plan="plan.json", plan=["kv4"] * layers)


def test_formats_of_a_plan_are_those_of_the_build() -> None:
    with pytest.raises(UserError, match="must be one of auto, bfloat16, .*, got 'kv9'"):
        resolved_kv(kv_cache_plan="plan.json", plan=["kv4", "kv9", "kv4", "kv4"])
    with pytest.raises(UnsupportedError, match="fp8_inc is not supported"):
        resolved_kv(kv_cache_plan="plan.json", plan=["kv4", "kv4", "kv4", "fp8_inc"])


@pytest.mark.parametrize("other", [{"kv_cache_dtype": "fp8"}, {"kv_cache_dtype_skip_layers": ["0"]}])
def test_a_plan_stands_alone(other: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="--kv-cache-plan plan.json says the format of every layer; leave --kv-cache-dtype and"):
        resolved_kv(kv_cache_plan="plan.json", plan=["kv4"] * 4, **other)


def test_first_tokens_are_as_the_formats_want_them_unless_asked_for() -> None:
    assert resolved_kv(kv_cache_dtype="kv4").cache.first_tokens is None
    for asked in (0, 16, 256):
        found = resolved_kv(kv_cache_dtype="kv4", kv_cache_first_tokens=asked)
        assert (found.cache.first_tokens, found.origins["first_tokens"]) == (asked, "flag")


def test_calibration_and_check() -> None:
    found = resolved_kv(kv_cache_dtype="kv4", kv_calibration="a.safetensors", kv_check="off")
    assert (found.cache.kv_calibration, found.cache.kv_check) == ("a.safetensors", "off")
    assert found.origins["kv_calibration"] == found.origins["kv_check"] == "flag"


def test_refusals_are_collected() -> None:
    with pytest.raises(UnsupportedError) as caught:
        resolved(replace(GPU, capability=(7, 5)), kv_cache_dtype="fp8_inc", load_format="pt")
    assert len(caught.value.refusals) == 3
    message = str(caught.value)
    assert "\n" not in message and "7.5, 8.0 is the least" in message and "--load-format pt" in message and "fp8_inc" in message


def test_registries_of_other_floors_widen_the_choice() -> None:
    options = EngineOptions(kv_cache_dtype="nvfp4", attention_backend="auto")
    found = resolve(options, FACTS, CPU, kv_formats=("bfloat16", "nvfp4"), attention_backends=("triton", "reference"))
    assert (found.cache.kv_cache_dtype, found.attention_backend) == ("nvfp4", "triton")


WRONG: list[tuple[str, Any, str]] = [
    (
        "kv_cache_dtype",
        "fp9",
        "--kv-cache-dtype must be one of auto, bfloat16, float16, float32, or k:FORMAT,v:FORMAT, got 'fp9'",
    ),
    ("kv_cache_dtype", 8, "--kv-cache-dtype must be a text, got 8"),
    ("kv_cache_first_tokens", 8, "--kv-cache-first-tokens must be a multiple of 16, got 8"),
    ("kv_cache_first_tokens", 272, "--kv-cache-first-tokens must be an integer in [0, 256], got 272"),
    ("kv_check", "maybe", "--kv-check must be one of refuse, warn, off, got 'maybe'"),
    ("load_format", "zip", "--load-format must be one of auto, safetensors, gguf, dummy, got 'zip'"),
    ("dtype", "int4", "--dtype must be one of auto, bfloat16, float16, float32, got 'int4'"),
    ("dtype", 16, "--dtype must be a text, got 16"),
    ("attention_backend", "flash", "--attention-backend must be one of auto, reference, got 'flash'"),
    ("scheduling_policy", "lifo", "--scheduling-policy must be one of fcfs, priority, got 'lifo'"),
    ("logprobs_mode", "x", "--logprobs-mode must be one of raw_logprobs, processed_logprobs, raw_logits, processed_logits"),
    ("max_model_len", 8193, "--max-model-len 8193 is more than the 8192 positions of this LlamaForCausalLM checkpoint"),
    ("max_model_len", 0, "--max-model-len must be at least 1, or auto"),
    ("max_model_len", -2, "--max-model-len must be an integer in [-1, 2147483647], got -2"),
    ("max_model_len", "4096", "--max-model-len must be an integer in [-1, 2147483647], got '4096'"),
    ("max_model_len", 4096.0, "got 4096.0"),
    ("block_size", 17, "--block-size must be one of 1, 2, 4, 8, 16, 32, 64, 128, 256, got 17"),
    ("block_size", 512, "--block-size must be an integer in [1, 256], got 512"),
    ("gpu_memory_utilization", 0.0, "--gpu-memory-utilization must be in (0, 1], got 0.0"),
    ("gpu_memory_utilization", 1.01, "must be in (0, 1]"),
    ("gpu_memory_utilization", float("nan"), "must be in (0, 1]"),
    ("gpu_memory_utilization", "half", "must be a number in (0, 1], got 'half'"),
    ("kv_cache_memory_bytes", 0, "--kv-cache-memory-bytes must be an integer in [1,"),
    ("num_gpu_blocks_override", 1, "--num-gpu-blocks-override must be an integer in [2,"),
    ("max_num_seqs", 0, "--max-num-seqs must be an integer in [1,"),
    ("max_num_seqs", True, "--max-num-seqs must be an integer in [1, 2147483647], got True"),
    ("max_num_batched_tokens", 0, "--max-num-batched-tokens must be an integer in [1,"),
    ("max_num_queued_reqs", 0, "--max-num-queued-reqs must be an integer in [1,"),
    ("max_num_queued_tokens", -5, "--max-num-queued-tokens must be an integer in [1,"),
    ("long_prefill_token_threshold", -1, "--long-prefill-token-threshold must be an integer in [0,"),
    ("max_logprobs", -2, "--max-logprobs must be an integer in [-1,"),
    ("seed", 2**63, "--seed must be an integer in [-9223372036854775808, 9223372036854775807]"),
    ("num_threads", 0, "--num-threads must be an integer in [1, 1024], got 0"),
    ("enable_prefix_caching", "yes", "--enable-prefix-caching must be true or false, got 'yes'"),
    ("hf_overrides", "{}", "--hf-overrides must be a JSON object, got '{}'"),
]


@pytest.mark.parametrize(("option", "value", "message"), WRONG)
def test_wrong_value_is_one_line_with_the_flag(option: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolved(**{option: value})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.param == option


def test_without_chunked_prefill_a_step_holds_the_longest_prompt() -> None:
    assert resolved(enable_chunked_prefill=False).scheduler.max_num_batched_tokens == 8192
    assert resolved(enable_chunked_prefill=False, max_model_len=1024).scheduler.max_num_batched_tokens == 1024
    with pytest.raises(UserError, match="--max-num-batched-tokens 100 is less than the max_model_len 8192"):
        resolved(enable_chunked_prefill=False, max_num_batched_tokens=100)
    with pytest.raises(UserError, match="needs a fixed --max-model-len, got auto"):
        resolved(enable_chunked_prefill=False, max_model_len=-1)


def test_small_budget_lowers_the_default_batch() -> None:
    assert resolved(max_num_batched_tokens=8).scheduler.max_num_seqs == 8
    assert resolved(max_num_batched_tokens=8, max_num_seqs=8).scheduler.max_num_seqs == 8


def test_resolve_is_pure() -> None:
    options = EngineOptions(seed=7, hf_overrides={"a": 1})
    assert resolve(options, FACTS, CPU) == resolve(options, FACTS, CPU)
    assert options == EngineOptions(seed=7, hf_overrides={"a": 1})


def test_config_lines_show_origins() -> None:
    lines = config_lines(resolved(block_size=32))
    assert [line.split(":")[0].split("=")[0] for line in lines] == [
        "model",
        "cache",
        "scheduler",
        "execution",
        "attention_backend",
    ]
    assert "max_model_len=8192 (checkpoint)" in lines[0]
    assert "block_size=32 (flag)" in lines[1] and "enable_prefix_caching=True" in lines[1]
    assert not any("\n" in line for line in lines)


def test_flag_of() -> None:
    assert flag_of("max_model_len") == "--max-model-len"


def test_choices_hold_the_defaults() -> None:
    defaults = EngineOptions()
    assert defaults.dtype == DTYPES[0] and defaults.load_format == LOAD_FORMATS[0] and 16 in BLOCK_SIZES


def test_configuration_stays_small() -> None:
    """About 80 fields in all; a resolved field that repeats an option counts once."""
    parts = (EngineOptions, ServerConfig, ModelConfig, CacheConfig, SchedulerConfig, ExecutionConfig, LoraConfig, EngineConfig)
    assert len({f.name for part in parts for f in fields(part)}) <= 99
    assert {name for name, part in vars(config).items() if isinstance(part, type) and part.__module__ == config.__name__} == {
        part.__name__ for part in parts
    }, "a new part of the configuration must be counted here"


@pytest.mark.parametrize(
    "part", [EngineOptions, ServerConfig, ModelConfig, CacheConfig, SchedulerConfig, ExecutionConfig, LoraConfig, EngineConfig]
)
def test_configuration_is_frozen(part: Any) -> None:
    assert part.__dataclass_params__.frozen
