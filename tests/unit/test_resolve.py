"""`resolve()`: every value, where it came from, and what each wrong one is answered with."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from halfbyte import config
from halfbyte.config import CacheConfig, EngineConfig, EngineOptions, ModelConfig, SchedulerConfig, ServerConfig
from halfbyte.errors import UnsupportedError, UserError
from halfbyte.platform import Platform
from halfbyte.resolve import BLOCK_SIZES, DTYPES, LOAD_FORMATS, ModelFacts, config_lines, flag_of, resolve

CPU = Platform(device="cpu", name="CPU", num_threads=6, memory_limit_bytes=2**34, native_bf16=True)
OLD_CPU = replace(CPU, native_bf16=False)
GPU = Platform(device="cuda", name="GPU", num_threads=6, memory_limit_bytes=2**36, native_bf16=True, capability=(9, 0))
ROCM = replace(GPU, device="rocm", capability=None)
FACTS = ModelFacts(architecture="LlamaForCausalLM", dtype="bfloat16", max_position=8192, vocab_size=49152, num_layers=30)


def resolved(platform: Platform = CPU, facts: ModelFacts = FACTS, **options: Any) -> EngineConfig:
    return resolve(EngineOptions(**options), facts, platform)


def test_defaults_on_a_cpu() -> None:
    found = resolved()
    assert found.model == ModelConfig(
        model="smollm2-135m",
        tokenizer="smollm2-135m",
        revision=None,
        load_format="auto",
        hf_overrides={},
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
    names = {f.name for part in (found.model, found.cache, found.scheduler) for f in fields(part)} | {"attention_backend"}
    assert set(found.origins) == names
    assert set(found.origins.values()) <= {"default", "flag", "checkpoint", "platform"}
    assert {name for name, origin in found.origins.items() if origin == "flag"} == {"seed", "block_size", "policy"}
    assert found.origins["max_model_len"] == "checkpoint" and found.origins["num_threads"] == "platform"


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
        "scheduling_policy": "priority",
        "logprobs_mode": "raw_logits",
        "kv_cache_dtype": "float32",
        "gpu_memory_utilization": 0.25,
        "attention_backend": "reference",
    }
    if option in ("hf_token", "download_dir"):
        return
    back_ends = {"attention_backends": ("cpu", "reference")} if option == "cpu_activations" else {}
    found = resolve(EngineOptions(**{option: changed.get(option, 32)}), FACTS, CPU, **back_ends)
    assert found != resolved() or found.origins != resolved().origins
    assert "flag" in found.origins.values()


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


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "nvfp4", "int8_per_token_head", "turboquant_k8v4"])
def test_known_kv_formats_are_refused_with_what_works(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"--kv-cache-dtype {name} is not supported yet") as caught:
        resolved(kv_cache_dtype=name)
    assert "possible here: auto, bfloat16, float16, float32" in str(caught.value)


def test_refusals_are_collected() -> None:
    with pytest.raises(UnsupportedError) as caught:
        resolved(replace(GPU, capability=(7, 5)), kv_cache_dtype="fp8", load_format="pt")
    assert len(caught.value.refusals) == 3
    message = str(caught.value)
    assert "\n" not in message and "7.5, 8.0 is the least" in message and "--load-format pt" in message and "fp8" in message


def test_registries_of_other_floors_widen_the_choice() -> None:
    options = EngineOptions(kv_cache_dtype="fp8", attention_backend="auto")
    found = resolve(options, FACTS, CPU, kv_formats=("bfloat16", "fp8"), attention_backends=("triton", "reference"))
    assert (found.cache.kv_cache_dtype, found.attention_backend) == ("fp8", "triton")


WRONG: list[tuple[str, Any, str]] = [
    ("kv_cache_dtype", "fp9", "--kv-cache-dtype must be one of auto, bfloat16, float16, float32, got 'fp9'"),
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
    assert [line.split(":")[0].split("=")[0] for line in lines] == ["model", "cache", "scheduler", "attention_backend"]
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
    parts = (EngineOptions, ServerConfig, ModelConfig, CacheConfig, SchedulerConfig, EngineConfig)
    assert len({f.name for part in parts for f in fields(part)}) <= 80
    assert {name for name, part in vars(config).items() if isinstance(part, type) and part.__module__ == config.__name__} == {
        part.__name__ for part in parts
    }, "a new part of the configuration must be counted here"


@pytest.mark.parametrize("part", [EngineOptions, ServerConfig, ModelConfig, CacheConfig, SchedulerConfig, EngineConfig])
def test_configuration_is_frozen(part: Any) -> None:
    assert part.__dataclass_params__.frozen
