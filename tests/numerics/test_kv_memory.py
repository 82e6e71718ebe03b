"""One arithmetic for the memory of the cache: what `halfbyte kv-plan` says before the start is what the engine allocates, logs
and exports as metrics, to the byte; and of bytes and tokens, the one that is not fixed follows from the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from halfbyte import LLM
from halfbyte.engine import kv_calibration
from halfbyte.engine.metrics import EngineMetrics
from halfbyte.entrypoints import cli
from halfbyte.kernels.cpu.library import KernelsMissing, load
from halfbyte.types import EngineInfo

MODEL = "smollm2-135m"
NUM_LAYERS = 30
LENGTH = 300  # no multiple of a block
MEMORY_BYTES = 50_000_001  # no multiple of any block's bytes
# Flags of a format beside its name. The edges of the model in its own dtype: 4 layers of 30.
EDGES = ["--kv-cache-dtype-skip-layers", "0", "1", "28", "29"]
CASES: dict[str, tuple[str, list[str]]] = {
    "bfloat16": ("bfloat16", []),
    "fp8": ("fp8", []),
    "nvfp4": ("nvfp4", []),
    "kv4": ("kv4", []),
    "kv4, no first tokens": ("kv4", ["--kv-cache-first-tokens", "0"]),
    "kv6": ("kv6", []),
    "k:fp8,v:nvfp4": ("k:fp8,v:nvfp4", []),
    "k:bfloat16,v:kv4": ("k:bfloat16,v:kv4", []),
    "turboquant_4bit_nc": ("turboquant_4bit_nc", []),
    "nvfp4, edges skipped": ("nvfp4", EDGES),
    "kv4, edges skipped": ("kv4", EDGES),
    "fp8, first tokens": ("fp8", ["--kv-cache-first-tokens", "32"]),
    "nvfp4, windows skipped": ("nvfp4", ["--kv-cache-dtype-skip-layers", "sliding_window"]),
}
WINDOWED = "gemma3-270m"  # 15 layers of 18 with a window of 512 tokens
# From the most bytes per token to the fewest.
NARROWING = ["bfloat16", "fp8", "k:fp8,v:nvfp4", "nvfp4, edges skipped", "nvfp4"]


Plan = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Logged:
    """The numbers of the start-up lines."""

    block_bytes: int
    num_blocks: int
    num_bytes: int
    num_tokens: int
    sized_by: str


@pytest.fixture(scope="module", autouse=True)
def small_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Turns cost as many bytes whatever they were measured on: one short text, kept for the tests of this file alone."""
    try:
        load()
    except KernelsMissing as missing:
        pytest.skip(f"kv-plan reckons with the compiled kernels: {missing}")
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setattr(kv_calibration, "cache_folder", lambda: folder)
        patch.setattr(kv_calibration, "MAX_TOKENS", 64)
        yield


def started(case: str, model: str = MODEL, **options: Any) -> EngineInfo:
    """What an engine says of itself that was started with this case and these options, and ended."""
    name, flags = CASES[case]
    settings: dict[str, Any] = {"kv_cache_dtype": name, "kv_check": "off", "max_model_len": LENGTH, "num_threads": 1}
    if "--kv-cache-dtype-skip-layers" in flags:
        settings["kv_cache_dtype_skip_layers"] = flags[1:]
    elif flags:
        settings["kv_cache_first_tokens"] = int(flags[1])
    llm = LLM(model, **settings | options)
    llm.close()
    return llm.info


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    """plan(case, model) -> its row of `halfbyte kv-plan --json` for the same memory."""
    monkeypatch.setattr(cli, "setup_logging", lambda level: None)

    def run(case: str, model: str = MODEL) -> dict[str, Any]:
        name, flags = CASES[case]
        words = ["--memory", str(MEMORY_BYTES), "--max-model-len", str(LENGTH), "--platform", "cpu", "--kv-cache-dtype", name]
        assert cli.main(["kv-plan", model, "--json", *words, *flags]) == 0
        [row] = json.loads(capsys.readouterr().out)["formats"]
        assert isinstance(row, dict)
        return row

    return run


def logged(info: EngineInfo) -> Logged:
    """What a reader of the start-up lines sees."""
    lines = {line.partition(": ")[0]: line.partition(": ")[2] for line in info.report if line.startswith("KV ")}
    cache = re.match(r"([\d,]+) blocks x ([\d,]+) bytes = ([\d,]+) bytes;", lines["KV cache"])
    block = re.match(r".* = ([\d,]+) bytes;", lines["KV block"])
    tokens = re.search(r" = ([\d,]+) tokens$", lines["KV capacity"])
    assert cache and block and tokens
    num_blocks, block_bytes, num_bytes = (int(text.replace(",", "")) for text in cache.groups())
    assert int(block[1].replace(",", "")) == block_bytes
    return Logged(block_bytes, num_blocks, num_bytes, int(tokens[1].replace(",", "")), lines["KV size"])


def exported(info: EngineInfo) -> dict[str, str]:
    """The labels of the metric that describes the cache."""
    text = EngineMetrics(info, MODEL).render().decode()
    [family] = [family for family in text_string_to_metric_families(text) if family.name == "vllm:cache_config_info"]
    [sample] = family.samples
    return dict(sample.labels)


@pytest.mark.parametrize(
    ("model", "case"),
    [*((MODEL, case) for case in CASES), *((WINDOWED, case) for case in ("nvfp4", "kv4", "nvfp4, windows skipped"))],
)
def test_plan_log_and_metrics_are_the_engine(model: str, case: str, plan: Plan) -> None:
    info = started(case, model, kv_cache_memory_bytes=MEMORY_BYTES)
    row, lines, labels = plan(case, model), logged(info), exported(info)
    block_bytes, rest = divmod(info.kv_cache_bytes, info.num_blocks)
    assert rest == 0 and info.kv_cache_bytes <= MEMORY_BYTES < info.kv_cache_bytes + block_bytes, "and not a block more fits"

    assert (row["block_bytes"], row["num_blocks"], row["tokens"]) == (block_bytes, info.num_blocks, info.kv_cache_tokens)
    assert row["full_length_requests"] == info.max_concurrency and row["max_model_len"] == info.max_model_len == LENGTH
    assert row["backend"] == "cpu" and "attention_backend=cpu" in info.report
    assert (lines.block_bytes, lines.num_blocks) == (block_bytes, info.num_blocks)
    assert (lines.num_bytes, lines.num_tokens) == (info.kv_cache_bytes, info.kv_cache_tokens)
    assert labels["num_gpu_blocks"] == str(info.num_blocks) and labels["block_size"] == str(info.block_size)
    assert labels["kv_cache_memory_bytes"] == str(info.kv_cache_bytes)
    assert labels["kv_cache_size_tokens"] == str(info.kv_cache_tokens)
    assert labels["kv_cache_max_concurrency"] == f"{row['full_length_requests']:.2f}"


def test_known_bytes(plan: Plan) -> None:
    """30 layers of 3 KV heads of 64, K and V, 16 tokens to a block: bits per number are the only thing that differs."""
    numbers = NUM_LAYERS * 3 * 64 * 2 * 16
    assert plan("bfloat16")["block_bytes"] == numbers * 2
    assert plan("fp8")["block_bytes"] == numbers
    assert plan("nvfp4")["block_bytes"] == plan("kv4")["block_bytes"] == numbers * 9 // 16
    assert plan("k:fp8,v:nvfp4")["block_bytes"] == numbers * 25 // 32
    assert plan("nvfp4, edges skipped")["block_bytes"] == numbers * (26 * 9 + 4 * 32) // (30 * 16)


def test_with_fixed_bytes_tokens_rise() -> None:
    found = [started(case, kv_cache_memory_bytes=MEMORY_BYTES) for case in NARROWING]
    tokens = [info.kv_cache_tokens for info in found]
    assert tokens == sorted(set(tokens)) and len({info.kv_cache_bytes // 2**20 for info in found}) == 1
    assert {logged(info).sized_by for info in found} == {
        "bytes are fixed, by --kv-cache-memory-bytes; tokens follow from the format"
    }


@pytest.mark.parametrize(
    ("options", "by"),
    [
        ({"max_num_seqs": 3}, f"--max-num-seqs: 3 requests of {LENGTH} tokens"),
        ({"num_gpu_blocks_override": 58}, "--num-gpu-blocks-override"),
        ({"num_gpu_blocks_override": 58, "kv_cache_memory_bytes": MEMORY_BYTES}, "--num-gpu-blocks-override"),
    ],
)
def test_with_fixed_tokens_bytes_fall(options: dict[str, Any], by: str) -> None:
    """3 requests of 300 tokens: 57 blocks of 16, and block 0."""
    found = [started(case, **options) for case in NARROWING]
    assert {info.kv_cache_tokens for info in found} == {3 * LENGTH} and {info.num_blocks for info in found} == {58}
    num_bytes = [info.kv_cache_bytes for info in found]
    assert num_bytes == sorted(set(num_bytes), reverse=True)
    assert {logged(info).sized_by for info in found} == {f"tokens are fixed, by {by}; bytes follow from the format"}
    assert [logged(info).num_bytes for info in found] == num_bytes


def test_a_share_of_the_memory_fixes_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.engine.build.available_memory_bytes", lambda platform: 2 * MEMORY_BYTES)
    info = started("nvfp4", gpu_memory_utilization=0.5)
    by = f"--gpu-memory-utilization 0.5 of {2 * MEMORY_BYTES:,} free bytes"
    assert logged(info).sized_by == f"bytes are fixed, by {by}; tokens follow from the format"
    assert info.kv_cache_bytes == MEMORY_BYTES // logged(info).block_bytes * logged(info).block_bytes
