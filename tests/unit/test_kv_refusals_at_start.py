"""What cannot be is refused before weights are opened: starts from folders that hold nothing but `config.json`.

Each test runs `build_engine` on a platform that is only named. A refusal says what was asked, what is possible and which flag;
where only a vendor's kernels have a limit, our own readers take over and the start gets as far as the weights.

The numbers r1 to r19 are those of vLLM's refusals that users know. Without a test of their own:
- r10 and r16 (decode context parallelism): this build runs on one device, and its flags are refused as such (`test_flags`);
- r18 (MiniMax-M3's sparse attention): no such architecture here, which is r2's refusal;
- r20 (VLLM_KV_CACHE_LAYOUT): no environment variable changes results; a back end arranges its own cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halfbyte.config import EngineOptions
from halfbyte.engine import build
from halfbyte.engine.build import build_engine
from halfbyte.engine.kv_plan import write_plan
from halfbyte.errors import CapacityError, HalfbyteError, UnsupportedError, UserError
from halfbyte.kernels.attention import BACKENDS, presence
from halfbyte.kernels.attention.presence import Machine
from halfbyte.kernels.attention.vendors import VENDORS
from halfbyte.kernels.cpu.library import KernelsMissing
from halfbyte.kvcache.formats import FORMATS
from halfbyte.model_runner import runner
from halfbyte.platform import PLATFORM_NAMES, platform_named
from halfbyte.resolve import UNSUPPORTED_KV_CACHE_DTYPES

GIB = 2**30
NUM_LAYERS = 4
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
GEMMA = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
PLAIN_FORMATS = [name for name in FORMATS if not name.endswith("_ds_mla")]
FP8_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
GPUS = [name for name in PLATFORM_NAMES if name != "cpu"]
OURS_ALONE = Machine({"triton": "3.7.1"})
OTHER_THAN_SM10X = ["sm80", "sm86", "sm89", "sm90", "sm120", "sm121"]


class WeightsWanted(Exception):
    """The start went through all refusals and asks for the weights, with this configuration."""


Start = Callable[..., Any]


def with_scheme(**changes: Any) -> dict[str, Any]:
    """`LLAMA` as llm-compressor leaves it with a calibrated KV cache."""
    scheme = {**FP8_SCHEME, **changes}
    return LLAMA | {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """start(config.json, platform, options...) -> the configuration with which the weights would be loaded.

    machine: what is installed there; of what GPUs need, our own kernels unless it is said.
    """

    def load_runner(config: Any, *others: Any) -> Any:
        raise WeightsWanted(config)

    def run(config: dict[str, Any] = LLAMA, platform: str = "cpu", machine: Machine = OURS_ALONE, **options: Any) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(config))
        here = replace(platform_named(platform), memory_limit_bytes=64 * GIB)
        monkeypatch.setattr(build, "detect_platform", lambda device: here)
        monkeypatch.setattr(presence, "look", lambda: machine)
        with pytest.raises(WeightsWanted) as wanted:
            build_engine(EngineOptions(model=str(tmp_path), **options))
        return wanted.value.args[0]

    monkeypatch.setattr(runner, "load_runner", load_runner)
    monkeypatch.setattr(build, "available_memory_bytes", lambda platform: 64 * GIB)
    monkeypatch.setattr(build, "load", lambda: None)  # the compiled kernels
    return run


@pytest.fixture
def refusal(start: Start) -> Callable[..., str]:
    """The same for a start that ends before that: its error in one line."""

    def run(*args: Any, error: type[HalfbyteError] = UnsupportedError, **options: Any) -> str:
        with pytest.raises(error) as caught:
            start(*args, **options)
        message = str(caught.value)
        assert "\n" not in message
        return message

    return run


@pytest.mark.parametrize("platform", PLATFORM_NAMES)
def test_a_plain_start_asks_for_the_weights(platform: str, start: Start) -> None:
    config = start(LLAMA, platform)
    assert config.cache.layer_dtypes == ("bfloat16",) * NUM_LAYERS
    assert config.attention_backend == ("cpu" if platform == "cpu" else "triton")


@pytest.mark.parametrize("name", ["nvfp3", "fp4", "FP8", "", "k:fp8", "k:fp8,k:nvfp4", "fp8,nvfp4"])
def test_r1_unknown_formats(name: str, refusal: Callable[..., str]) -> None:
    message = refusal(kv_cache_dtype=name, error=UserError)
    assert message.startswith("--kv-cache-dtype must be one of auto, bfloat16, ") and f"got {name!r}" in message
    assert all(f"{known}," in message for known in FORMATS)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_KV_CACHE_DTYPES))
def test_r1_formats_of_others_are_no_typing_mistakes(name: str, refusal: Callable[..., str]) -> None:
    assert refusal(kv_cache_dtype=name).startswith(f"--kv-cache-dtype {name} is not supported; possible here: auto, bfloat16")


@pytest.mark.parametrize("wrong", ["nvfp3", "auto", "fp8_ds_mla", ""])
@pytest.mark.parametrize("side", ["k", "v"])
def test_r1_sides_of_a_pair(side: str, wrong: str, refusal: Callable[..., str]) -> None:
    """A record of one latent has no K that could be had without its V."""
    name = ",".join(f"{each}:{wrong if each == side else 'fp8'}" for each in "kv")
    message = refusal(kv_cache_dtype=name, error=UserError)
    assert message.startswith(f"--kv-cache-dtype {name}: K and V can each be one of bfloat16, ")
    assert message.endswith(f"got {wrong!r}") and "nvfp4_ds_mla" not in message


def test_r2_mla(refusal: Callable[..., str]) -> None:
    """No model with MLA runs here, so that the model is refused; and records of a latent are refused for all others."""
    deepseek = LLAMA | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    message = refusal(deepseek, "sm100", kv_cache_dtype="nvfp4")
    assert "architecture DeepseekV3ForCausalLM is not supported; supported are LlamaForCausalLM" in message
    for name in set(FORMATS) - set(PLAIN_FORMATS):
        message = refusal(LLAMA, "sm100", kv_cache_dtype=name)
        assert f"kv_cache_dtype {name} not supported without MLA" in message
        assert f"use --kv-cache-dtype {name.removesuffix('_ds_mla')}" in message


@pytest.mark.parametrize("platform", ["cpu", "sm90"])
@pytest.mark.parametrize("name", ["fp8_e5m2", "k:fp8_e5m2,v:fp8", "k:fp8,v:fp8_e5m2"])
def test_r3_fp8_e5m2_misreads_the_scales_of_a_checkpoint(
    platform: str, name: str, start: Start, refusal: Callable[..., str]
) -> None:
    message = refusal(with_scheme(), platform, kv_cache_dtype=name)
    assert "fp8_e5m2 would misread them; use --kv-cache-dtype fp8_e4m3 or bfloat16" in message
    assert start(LLAMA, platform, kv_cache_dtype=name).cache.layer_dtypes, "without such scales it may be"
    assert start(with_scheme(), platform).cache.kv_cache_dtype == "fp8_e4m3"
    assert start(with_scheme(), platform, kv_cache_dtype="bfloat16").cache.kv_cache_dtype == "bfloat16"


def test_r3_in_a_plan(tmp_path: Path, refusal: Callable[..., str]) -> None:
    write_plan(tmp_path / "plan.json", ["fp8"] * (NUM_LAYERS - 1) + ["fp8_e5m2"], {})
    assert "fp8_e5m2 would misread them" in refusal(with_scheme(), kv_cache_plan=str(tmp_path / "plan.json"))


def test_r3_scales_of_nvfp4(tmp_path: Path, start: Start, refusal: Callable[..., str]) -> None:
    """ModelOpt says so in a file of its own. Under its scales, which are 6 times smaller, 8-bit numbers would saturate."""
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "NVFP4"}}))
    assert start(LLAMA, "sm90").cache.kv_cache_dtype == "nvfp4"
    message = refusal(LLAMA, "sm90", kv_cache_dtype="fp8")
    assert "the checkpoint's KV scales are for nvfp4" in message and "use --kv-cache-dtype nvfp4 or bfloat16" in message


def test_r4_a_back_end_that_was_asked_for(refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(LLAMA, "sm90", attention_backend="cpu")
    assert message == "the cpu attention back end does not run on cuda; leave --attention-backend out"
    message = refusal(LLAMA | {"head_dim": 72}, "cpu", attention_backend="cpu", kv_cache_dtype="fp8")
    assert "reads fp8_e4m3 KV in tiles of 16" in message and message.endswith(", or --attention-backend reference")
    message = refusal(attention_backend="triton9", error=UserError)
    assert message == "--attention-backend must be one of auto, cpu, reference, got 'triton9'"

    def missing() -> None:
        raise KernelsMissing("no compiler")

    monkeypatch.setattr(build, "load", missing)
    message = refusal(LLAMA, "cpu", attention_backend="cpu")
    assert message == "cpu: no compiled kernels: no compiler; install g++, or use --attention-backend reference"


@pytest.mark.parametrize("platform", PLATFORM_NAMES)
@pytest.mark.parametrize("name", sorted(set(VENDORS) - set(BACKENDS)))
def test_r4_vendors_kernels_are_refused_by_name(name: str, platform: str, refusal: Callable[..., str]) -> None:
    """With the vendor's own limit where there is one, else as not in this build; what to do instead stands behind it."""
    reason, _, fix = refusal(LLAMA, platform, attention_backend=name).partition("; ")
    assert reason.startswith(f"{name}: ")
    if reason == f"{name}: not in this build":
        assert fix == f"this build has {', '.join(BACKENDS)}"
    else:
        assert "not supported" in reason and fix == "use --attention-backend auto or another --kv-cache-dtype"


@pytest.mark.parametrize("platform", PLATFORM_NAMES)
def test_r5_a_format_that_nobody_reads(platform: str, refusal: Callable[..., str]) -> None:
    """Heads of 72 are no blocks of 16, whoever reads; the reason stands there once."""
    for name in ("nvfp4", "nvfp4_4over6", "kv4"):
        message = refusal(LLAMA | {"head_dim": 72}, platform, kv_cache_dtype=name)
        assert "KV has blocks of 16 numbers, got head dim 72; use --kv-cache-dtype fp8" in message
        assert message.count("got head dim 72") == 1


def test_r5_what_is_advised_is_possible(start: Start) -> None:
    assert start(LLAMA | {"head_dim": 72}, "cpu", kv_cache_dtype="fp8").attention_backend == "reference"


@pytest.mark.parametrize("platform", OTHER_THAN_SM10X)
def test_r6_nvfp4_with_heads_of_64(platform: str, start: Start, refusal: Callable[..., str]) -> None:
    """FlashInfer's fa2 prefill misreads it; ours does not."""
    small = LLAMA | {"head_dim": 64}
    message = refusal(small, platform, kv_cache_dtype="nvfp4", attention_backend="flashinfer")
    assert message.startswith(f"flashinfer: head size 64 not supported with nvfp4 on {platform}: ")
    assert start(small, platform, kv_cache_dtype="nvfp4").cache.layer_dtypes == ("nvfp4",) * NUM_LAYERS


def test_r7_sinks(refusal: Callable[..., str]) -> None:
    """No model with sinks runs here."""
    sinks = LLAMA | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    assert "architecture GptOssForCausalLM is not supported" in refusal(sinks, "sm90", kv_cache_dtype="nvfp4")


@pytest.mark.parametrize("platform", OTHER_THAN_SM10X)
def test_r8_nvfp4_4over6_off_sm10x(platform: str, start: Start, refusal: Callable[..., str]) -> None:
    message = refusal(LLAMA, platform, kv_cache_dtype="nvfp4_4over6", attention_backend="flashinfer")
    assert message.startswith(f"flashinfer: kv_cache_dtype nvfp4_4over6 not supported on {platform}: ")
    assert start(LLAMA, platform, kv_cache_dtype="nvfp4_4over6").cache.kv_cache_dtype == "nvfp4_4over6"


@pytest.mark.parametrize("platform", ["sm100", "sm103"])
def test_r9_nvfp4_on_sm10x_needs_no_library_of_kernels(platform: str, start: Start) -> None:
    assert start(LLAMA, platform, kv_cache_dtype="nvfp4").attention_backend == "triton"


@pytest.mark.parametrize("platform", ["sm100", "sm103"])
def test_r9_flashinfer_needs_its_finished_kernels(platform: str, start: Start, refusal: Callable[..., str]) -> None:
    """Told before weights are read, with the command that brings them; without asking for it, our own kernels run."""
    machine = Machine({"triton": "3.7.1", "flashinfer": "0.7.2.post1"}, compiles=True)
    message = refusal(LLAMA, platform, machine, kv_cache_dtype="nvfp4", attention_backend="flashinfer")
    assert message.startswith(f"flashinfer: NVIDIA's kernels for {platform} (cubins) are not on this machine; ")
    assert message.endswith("run `halfbyte download-kernels`")
    assert start(LLAMA, platform, machine, kv_cache_dtype="nvfp4").attention_backend == "triton"
    whole = replace(machine, has_cubins=True)
    assert start(LLAMA, platform, whole, kv_cache_dtype="nvfp4").attention_backend == "flashinfer"


@pytest.mark.parametrize("name", ["bfloat16", "nvfp4"])
def test_r11_attention_that_looks_ahead(name: str, refusal: Callable[..., str]) -> None:
    """Such a model reads whole texts and keeps nothing of them; it cannot be made to generate either."""
    looks_ahead = GEMMA | {"use_bidirectional_attention": True}
    assert "--kv-cache-dtype is for models with a KV cache" in refusal(looks_ahead, "sm90", kv_cache_dtype=name)
    message = refusal(looks_ahead, "sm90", kv_cache_dtype=name, runner="generate", error=UserError)
    assert "does not generate text" in message


@pytest.mark.parametrize("platform", GPUS)
def test_r12_fp8_needs_flash_attention_3_or_4(platform: str, start: Start, refusal: Callable[..., str]) -> None:
    message = refusal(LLAMA, platform, kv_cache_dtype="fp8", attention_backend="flash_attn")
    if platform == "sm90":
        assert message.startswith("flash_attn: sm90 needs the package flash_attn_interface, which is not installed; build ")
    elif platform in ("sm100", "sm103"):
        assert message.startswith(f"flash_attn: version 4, which {platform} needs, is not called by this build; ")
    elif platform.startswith("sm"):
        assert f"fp8_e4m3 not supported on {platform}: FP8 KV needs its version 3 (SM90) or 4 (SM10x)" in message
    assert start(LLAMA, platform, kv_cache_dtype="fp8").cache.kv_cache_dtype == "fp8_e4m3"


@pytest.mark.parametrize("platform", ["cpu", "sm80", "sm90"])
def test_r13_scales_per_head(platform: str, start: Start) -> None:
    """Any of our readers takes a scale per head; so do the vendors', which get it with queries and outputs."""
    assert start(with_scheme(strategy="attn_head"), platform).cache.kv_cache_dtype == "fp8_e4m3"
    machine = Machine({"triton": "3.7.1", "flashinfer": "0.7.2.post1"}, compiles=True)
    config = start(with_scheme(strategy="attn_head"), platform, machine)
    assert config.attention_backend == ("cpu" if platform == "cpu" else "flashinfer")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_bits": 4}, "r14: type 'float', num_bits 4 is not supported, only float of 8 bits"),
        ({"type": "int"}, "r14: type 'int', num_bits 8 is not supported, only float of 8 bits"),
        ({"strategy": "channel"}, "r15: strategy 'channel' is not supported, only tensor and attn_head"),
        ({"symmetric": False}, "r15: asymmetric numbers are not supported"),
        ({"dynamic": True}, "r15: dynamic scales are not supported"),
    ],
)
def test_r14_r15_schemes(changes: dict[str, Any], reason: str, start: Start, refusal: Callable[..., str]) -> None:
    scheme = with_scheme(**changes)
    for options in ({}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "k:bfloat16,v:nvfp4"}):
        message = refusal(scheme, "sm90", **options)
        assert reason.partition(": ")[2] in message and "pass a --kv-cache-dtype that needs no scales" in message
    for name in ("bfloat16", "int8_per_token_head"):
        assert start(scheme, "sm90", kv_cache_dtype=name).cache.kv_cache_dtype == name, "as it is advised"


def test_r17_kernels_for_mla_on_other_models(refusal: Callable[..., str]) -> None:
    for name in ("flashinfer_mla", "flashmla"):
        message = refusal(LLAMA, "sm100", attention_backend=name, block_size=64)
        assert message.startswith(f"{name}: attention without MLA not supported")
    assert "must be one of" in refusal(LLAMA, "sm120", attention_backend="flashinfer_mla_sparse", error=UserError)


@pytest.mark.parametrize("platform", ["cpu", "sm90"])
@pytest.mark.parametrize(("name", "token_bytes"), [("bfloat16", 4 * 2 * 2 * 256), ("nvfp4", 4 * 2 * 2 * 72)])
def test_r19_memory_that_holds_no_request(
    platform: str, name: str, token_bytes: int, start: Start, refusal: Callable[..., str]
) -> None:
    """Bytes of the user, too few for 4096 tokens; what would fit does fit."""
    num_bytes = 100 * 16 * token_bytes
    options = {"kv_cache_dtype": name, "kv_cache_memory_bytes": num_bytes}
    message = refusal(LLAMA, platform, **options, error=CapacityError)
    assert f"one request of 4096 tokens needs 257 blocks x {16 * token_bytes} bytes" in message
    assert f"{num_bytes} bytes are available; the estimated largest --max-model-len is 1584" in message
    assert start(LLAMA, platform, **options, max_model_len=1584)
    assert "largest --max-model-len is 1584" in refusal(LLAMA, platform, **options, max_model_len=1585, error=CapacityError)


def test_r19_more_than_the_machine_has(start: Start, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(LLAMA, kv_cache_memory_bytes=65 * GIB, error=CapacityError)
    assert message.startswith(f"--kv-cache-memory-bytes {65 * GIB} is more than the {64 * GIB} bytes that are free")
    assert "--num-gpu-blocks-override 9999999 needs" in refusal(LLAMA, num_gpu_blocks_override=9999999, error=CapacityError)
    message = refusal(LLAMA, num_gpu_blocks_override=256, error=CapacityError)
    assert "needs 257 blocks" in message and message.endswith("raise --kv-cache-memory-bytes or --num-gpu-blocks-override")
    assert start(LLAMA, num_gpu_blocks_override=257)
    monkeypatch.setattr(build, "available_memory_bytes", lambda platform: 2**20)
    assert "the estimated largest --max-model-len is" in refusal(LLAMA, error=CapacityError), "nor beside the weights"


@pytest.mark.parametrize("platform", ["cpu", "sm90"])
def test_blocks_of_one_token_hold_none_of_the_first(platform: str, start: Start, refusal: Callable[..., str]) -> None:
    message = refusal(LLAMA, platform, kv_cache_dtype="kv4", block_size=1)
    assert message.startswith("a block of 1 tokens of kv4 KV holds none of the first 16 tokens, which stay in bfloat16")
    assert message.endswith("use --block-size 16")
    assert start(LLAMA, platform, kv_cache_dtype="kv4", block_size=16)


def test_small_blocks_on_the_compiled_kernels(
    start: Start, refusal: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    """Refused where those kernels are asked for. Else the slow reader takes over, and says so."""
    message = refusal(LLAMA, kv_cache_dtype="kv4", block_size=8, attention_backend="cpu")
    assert "reads kv4 KV in tiles of 16: block size 8" in message
    assert message.endswith("use --block-size 16 or a multiple, or --attention-backend reference")
    assert not caplog.records
    assert start(LLAMA, kv_cache_dtype="kv4", block_size=8).attention_backend == "reference"
    [record] = caplog.records
    assert record.getMessage().startswith("attention by reference, which is several times slower than cpu: ")
    assert "use --block-size 16 or a multiple" in record.getMessage()


def test_first_tokens_count_for_what_a_back_end_reads(start: Start, refusal: Callable[..., str]) -> None:
    """The compiled kernels read bfloat16 in any block, but for first tokens, which they want in tiles."""
    options: dict[str, Any] = {"kv_cache_dtype": "bfloat16", "block_size": 8, "attention_backend": "cpu"}
    assert start(LLAMA, **options)
    assert "bfloat16 KV in tiles of 16: block size 8" in refusal(LLAMA, **options, kv_cache_first_tokens=16)


@pytest.mark.parametrize("count", [7, -16, 272])
def test_odd_first_tokens(count: int, refusal: Callable[..., str]) -> None:
    message = refusal(kv_cache_dtype="kv4", kv_cache_first_tokens=count, error=UserError)
    assert message.startswith("--kv-cache-first-tokens must be ") and message.endswith(f"got {count}")
    assert "a multiple of 16" in message or "in [0, 256]" in message


@pytest.mark.parametrize("word", [str(NUM_LAYERS), "-1", "1.5", "first", ""])
def test_skipped_layers_that_are_none(word: str, refusal: Callable[..., str]) -> None:
    message = refusal(kv_cache_dtype="nvfp4", kv_cache_dtype_skip_layers=["0", word], error=UserError)
    assert message == f"--kv-cache-dtype-skip-layers takes layer numbers from 0 to 3 and sliding_window, got {word!r}"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\0",
        b"[]",
        b"{}",
        b'{"version": 1}',
        b'{"version": 2, "layers": ["fp8"]}',
        b'{"version": 1, "layers": []}',
    ]
    + [b'{"version": 1, "layers": [1]}', b"[" * 100_000],
)
def test_a_plan_that_is_none(content: bytes, tmp_path: Path, refusal: Callable[..., str]) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert f"--kv-cache-plan {path}" in refusal(kv_cache_plan=str(path), error=UserError)


def test_a_plan_that_is_not_there(tmp_path: Path, refusal: Callable[..., str]) -> None:
    for path in (tmp_path / "no.json", tmp_path):
        assert refusal(kv_cache_plan=str(path), error=UserError).startswith(f"cannot read --kv-cache-plan {path}: ")


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["fp8"], UserError, "is for 1 layers, this model has 4"),
        (["fp8", "fp8", "fp8", "nvfp3"], UserError, "must be one of auto, bfloat16, .* got 'nvfp3'"),
        (["fp8", "fp8", "fp8", "auto"], UserError, "must name the format of every layer, got 'auto'"),
        (["fp8", "fp8", "fp8", "fp8_inc"], UnsupportedError, "fp8_inc is not supported; possible here"),
        (["fp8", "fp8", "fp8", "fp8_ds_mla"], UnsupportedError, "fp8_ds_mla not supported without MLA"),
    ],
)
def test_plans_that_cannot_be(names: list[str], error: type[HalfbyteError], message: str, tmp_path: Path, start: Start) -> None:
    write_plan(tmp_path / "plan.json", names, {})
    with pytest.raises(error, match=message):
        start(kv_cache_plan=str(tmp_path / "plan.json"))


def test_a_plan_may_use_every_spelling(tmp_path: Path, start: Start) -> None:
    write_plan(tmp_path / "plan.json", ["fp8", "half", "k:fp8,v:nvfp4", "kv4"], {})
    names = start(kv_cache_plan=str(tmp_path / "plan.json")).cache.layer_dtypes
    assert names == ("fp8_e4m3", "float16", "k:fp8_e4m3,v:nvfp4", "kv4")


@pytest.mark.parametrize("platform", ["cpu", "sm80", "gfx950"])
@pytest.mark.parametrize("name", PLAIN_FORMATS)
def test_every_format_that_is_advertised_starts(platform: str, name: str, start: Start) -> None:
    assert start(LLAMA, platform, kv_cache_dtype=name).cache.layer_dtypes == (name,) * NUM_LAYERS
