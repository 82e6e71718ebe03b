"""`halfbyte kv-plan` on configurations without weights: exact bytes and tokens, refusals, JSON and table alike, the roofline."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfbyte.entrypoints import cli
from halfbyte.entrypoints.commands import kv_plan
from halfbyte.entrypoints.kv_plan.plan import FormatPlan
from halfbyte.entrypoints.kv_plan.units import parse_bytes, parse_bytes_per_s
from halfbyte.kernels.cpu import limits
from halfbyte.kernels.cpu.library import KernelsMissing
from halfbyte.kvcache.formats import FORMATS
from halfbyte.model_runner.catalogue import CATALOGUE
from halfbyte.platform import PLATFORM_NAMES, cache_folder

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
GEMMA: dict[str, Any] = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 12,
    "num_key_value_heads": 4,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 128,
    "max_position_embeddings": 32768,
}
GIB = 2**30
# matrices of a layer (q and o, k and v, three of the MLP), and the head
LLAMA_WEIGHT_BYTES = 2 * (32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 128256 * 4096)

Plan = Callable[..., dict[str, Any]]


def write_model(folder: Path, config: dict[str, Any] = LLAMA) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with nothing but config.json: 32 layers of 8 KV heads of 128."""
    return write_model(tmp_path / "llama")


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """plan(model, flags...) -> what --json prints; `formats` by name."""

    def run(model: str, *words: str) -> dict[str, Any]:
        assert cli.main(["kv-plan", model, "--json", *words]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found | {"formats": {row["kv_cache_dtype"]: row for row in found["formats"]}}

    return run


@pytest.mark.parametrize(
    ("name", "bytes_per_token", "by_bytes"),
    [("bfloat16", 131_072, 327_680), ("fp8_e4m3", 65_536, 655_360), ("nvfp4", 36_864, 1_165_084)],
)
def test_known_numbers_at_40_gib(model: str, plan: Plan, name: str, bytes_per_token: int, by_bytes: int) -> None:
    row = plan(model, "--memory", "40GiB", "--platform", "sm90")["formats"][name]
    assert (row["bytes_per_token"], row["tokens_by_bytes"]) == (bytes_per_token, by_bytes)
    assert row["layer_kinds"] == [{"sliding_window": None, "num_layers": 32, "bytes_per_token": bytes_per_token // 32}]
    assert row["block_bytes"] == 16 * bytes_per_token
    num_blocks = 40 * GIB // row["block_bytes"]
    assert row["num_blocks"] == num_blocks
    assert row["tokens"] == 16 * (num_blocks - 1), "whole blocks, and block 0 holds none"
    assert row["full_length_requests"] == (num_blocks - 1) / 512


def test_every_format_of_the_build_is_there(model: str, plan: Plan) -> None:
    found = plan(model, "--memory", "1GiB", "--platform", "gfx950")
    assert {*found["formats"], *(row["kv_cache_dtype"] for row in found["refused"])} == set(FORMATS)


@pytest.mark.parametrize("platform", PLATFORM_NAMES)
def test_json_equals_the_table(model: str, plan: Plan, platform: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--memory", "3GiB", "--platform", platform, "--bandwidth", "2TB/s", "--batch", "2", "--context", "100")
    found = plan(model, *words)["formats"]
    assert cli.main(["kv-plan", model, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, row in found.items():
        [line] = [line for line in lines if line.startswith(f"{name} ")]
        _, reader, *cells = re.split(r"\s{2,}", line)
        assert (reader, cells[1]) == (row["backend"], f"32 x {row['layer_kinds'][0]['bytes_per_token']:,}")
        numbers = [row[key] for key in ("bytes_per_token", "block_bytes", "tokens_by_bytes", "tokens")]
        assert [int(cell.replace(",", "")) for cell in (cells[0], *cells[2:5])] == numbers
        assert cells[5:] == [f"{row['full_length_requests']:,.2f}", f"{row['max_tokens_per_s']:,.1f}"]


def test_hybrid_models_have_their_kinds(tmp_path: Path, plan: Plan) -> None:
    """10 layers hold at most a window: a request needs far less than its tokens times the bytes of a token."""
    words = ("--memory", "4GiB", "--platform", "sm100", "--max-num-batched-tokens", "512", "--kv-cache-dtype", "fp8")
    [row] = plan(write_model(tmp_path / "gemma", GEMMA), *words)["formats"].values()
    assert row["layer_kinds"] == [
        {"sliding_window": 512, "num_layers": 10, "bytes_per_token": 1024},
        {"sliding_window": None, "num_layers": 2, "bytes_per_token": 1024},
    ]
    assert row["bytes_per_token"] == 12 * 1024
    # a group of full layers holds all 32,768 tokens; five of windows hold ceil((511 + 512) / 16) + 1 blocks each
    assert row["block_bytes"] == 2 * 16 * 1024
    assert row["full_length_requests"] == (4 * GIB // row["block_bytes"] - 1) / (2048 + 5 * 65)
    assert row["tokens"] > 4 * row["tokens_by_bytes"]


def test_a_window_bounds_what_a_step_reads(tmp_path: Path, plan: Plan) -> None:
    words = ("--kv-cache-dtype", "bfloat16", "--platform", "sm90", "--bandwidth", "1TB/s", "--batch", "3")
    model = write_model(tmp_path / "gemma", GEMMA)
    found = plan(model, *words, "--context", "10000")
    step_bytes = found["weight_bytes"] + 3 * (10 * 512 + 2 * 10_000) * 2048
    assert found["formats"]["bfloat16"]["max_tokens_per_s"] == pytest.approx(3e12 / step_bytes, rel=1e-12)


@pytest.mark.skipif("kv4" not in FORMATS, reason="this build has no kv4")
def test_first_tokens_in_the_models_dtype_take_blocks_of_their_own(model: str, plan: Plan) -> None:
    """The first 16 tokens of each request in bfloat16 need 4 blocks of 16 kv4 tokens instead of 1."""
    words = ("--memory", "1GiB", "--platform", "sm90", "--kv-cache-dtype", "kv4", "nvfp4")
    found = plan(model, *words)["formats"]
    assert found["kv4"]["block_bytes"] == found["nvfp4"]["block_bytes"]
    assert found["nvfp4"]["full_length_requests"] == (found["nvfp4"]["num_blocks"] - 1) / 512
    assert found["kv4"]["full_length_requests"] == (found["kv4"]["num_blocks"] - 1) / (4 + 511)
    tiny = plan(model, *words, "--block-size", "1")
    assert [row["kv_cache_dtype"] for row in tiny["refused"]] == ["kv4"]


def test_pairs_lie_between_their_sides(model: str, plan: Plan) -> None:
    found = plan(model, "--kv-cache-dtype", "k:fp8,v:nvfp4", "fp8", "nvfp4", "--platform", "sm90")["formats"]
    pair, fp8, nvfp4 = (found[name]["bytes_per_token"] for name in ("k:fp8,v:nvfp4", "fp8_e4m3", "nvfp4"))
    assert 2 * pair == fp8 + nvfp4
    assert found["nvfp4"]["tokens_by_bytes"] is found["nvfp4"]["tokens"] is None, "without a memory"


def test_refused_formats_have_their_reason(tmp_path: Path, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    """Heads of 72 have no blocks of 16."""
    model = write_model(tmp_path / "odd", LLAMA | {"head_dim": 72})
    found = plan(model, "--platform", "sm90")
    refused = {row["kv_cache_dtype"]: row["refusals"] for row in found["refused"]}
    assert "bfloat16" in found["formats"] and "nvfp4" in refused
    assert "72" in refused["nvfp4"][0]["reason"] and refused["nvfp4"][0]["fix"]
    assert cli.main(["kv-plan", model, "--platform", "sm90"]) == 0
    after = capsys.readouterr().out.split("Refused on sm90:")[1]
    assert all(f"  {name}: {rows[0]['reason']}" in after for name, rows in refused.items())


def test_a_back_end_that_cannot_run_there_refuses_all(model: str, plan: Plan) -> None:
    found = plan(model, "--platform", "sm90", "--attention-backend", "cpu")
    assert not found["formats"] and len(found["refused"]) == len(FORMATS)


def test_r1_an_unknown_format_is_a_mistake(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kv-plan", model, "--kv-cache-dtype", "nvfp3"]) == 1
    assert "--kv-cache-dtype must be one of auto, bfloat16" in capsys.readouterr().err


def test_r19_a_memory_that_holds_no_request_says_what_would_fit(
    model: str, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--memory", "600MiB", "--platform", "sm90", "--kv-cache-dtype", "bfloat16", "fp8", "--bandwidth", "1TB/s")
    found = plan(model, *words)["formats"]
    assert found["fp8_e4m3"]["tokens"] and found["fp8_e4m3"]["too_small"] is None
    assert found["bfloat16"]["tokens"] is None and found["bfloat16"]["max_tokens_per_s"] is None
    assert "the estimated largest --max-model-len is 4784" in found["bfloat16"]["too_small"]
    assert cli.main(["kv-plan", model, *words]) == 0
    assert f"bfloat16: {found['bfloat16']['too_small']}" in capsys.readouterr().out


def test_the_longest_length_can_be_fitted(model: str, plan: Plan) -> None:
    words = ("--memory", "600MiB", "--platform", "sm90", "--kv-cache-dtype", "bfloat16", "fp8", "--max-model-len", "auto")
    found = plan(model, *words)["formats"]
    assert [found[name]["max_model_len"] for name in ("bfloat16", "fp8_e4m3")] == [4784, 8192]


def test_a_longer_block_costs_its_rest(model: str, plan: Plan) -> None:
    """100 tokens are 7 blocks of 16 or 1 of 256."""
    words = ("--memory", "1GiB", "--platform", "sm90", "--max-model-len", "100", "--kv-cache-dtype", "bfloat16")
    small, large = (plan(model, *words, "--block-size", str(size))["formats"]["bfloat16"] for size in (16, 256))
    assert small["block_bytes"] * 16 == large["block_bytes"] and small["bytes_per_token"] == large["bytes_per_token"]
    assert (small["full_length_requests"], large["full_length_requests"]) == (511 / 7, 31.0)


def test_roofline(model: str, plan: Plan) -> None:
    words = ("--platform", "sm90", "--bandwidth", "3.35TB/s", "--batch", "8", "--context", "4096", "--memory", "40GiB")
    found = plan(model, *words)
    assert found["weight_bytes"] == LLAMA_WEIGHT_BYTES
    for row in found["formats"].values():
        step_bytes = LLAMA_WEIGHT_BYTES + 8 * 4096 * row["bytes_per_token"]
        assert row["max_tokens_per_s"] == pytest.approx(8 * 3.35e12 / step_bytes, rel=1e-12)


def test_a_batch_that_does_not_fit_has_no_speed(model: str, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    """1 GiB holds 1023 blocks of fp8; two requests of 8192 tokens need 1024."""
    words = ("--memory", "1GiB", "--platform", "sm90", "--bandwidth", "1TB/s", "--batch", "2", "--kv-cache-dtype")
    assert plan(model, *words, "nvfp4", "--context", "4096")["formats"]["nvfp4"]["max_tokens_per_s"]
    row = plan(model, *words, "fp8")["formats"]["fp8_e4m3"]
    assert row["batch_too_large"] and row["max_tokens_per_s"] is None
    assert cli.main(["kv-plan", model, *words, "fp8"]) == 0
    assert "batch too large" in capsys.readouterr().out


def test_weights_by_what_is_there(tmp_path: Path, plan: Plan) -> None:
    """The index, else the files' sizes, else the configuration; without the embedding, of which a token reads one row."""
    embedding_bytes = 2 * 100 * 4096
    folder = tmp_path / "small"
    model = write_model(folder, LLAMA | {"vocab_size": 100})
    assert plan(model, "--platform", "cpu")["weight_bytes"] == LLAMA_WEIGHT_BYTES - 2 * (128256 - 100) * 4096
    (folder / "model-00001-of-00001.safetensors").write_bytes(b"\0" * 1_000_000)
    (folder / "consolidated.safetensors").write_bytes(b"\0" * 5_000_000)
    assert plan(model, "--platform", "cpu")["weight_bytes"] == 1_000_000 - embedding_bytes
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 2_000_000}}))
    assert plan(model, "--platform", "cpu")["weight_bytes"] == 2_000_000 - embedding_bytes
    write_model(folder, LLAMA | {"vocab_size": 100, "tie_word_embeddings": True})
    assert plan(model, "--platform", "cpu")["weight_bytes"] == 2_000_000


def test_weights_are_never_opened(tmp_path: Path, plan: Plan) -> None:
    """A file that is no safetensors file disturbs nothing: its size is all that is asked."""
    model = write_model(tmp_path / "broken")
    with (tmp_path / "broken/model.safetensors").open("wb") as file:
        file.truncate(2 * GIB)
    found = plan(model, "--platform", "cpu")
    assert found["weight_bytes"] == 2 * GIB - 2 * 128256 * 4096
    assert found["formats"]["bfloat16"]["bytes_per_token"] == 131_072


@pytest.mark.parametrize(("name", "kinds"), [("smollm2-135m", [(None, 30)]), ("gemma3-270m", [(512, 15), (None, 3)])])
def test_gguf_models_of_the_catalogue(name: str, kinds: list[tuple[int | None, int]], plan: Plan) -> None:
    path = cache_folder() / "models" / CATALOGUE[name].file_name
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    found = plan(str(path), "--memory", "1GiB", "--platform", "cpu")
    row = found["formats"]["bfloat16"]
    assert [(kind["sliding_window"], kind["num_layers"]) for kind in row["layer_kinds"]] == kinds
    assert 0.9 * path.stat().st_size < found["weight_bytes"] < path.stat().st_size
    assert row["backend"] == "cpu" and row["tokens"] > 0


def test_auto_is_the_checkpoints_type(tmp_path: Path, plan: Plan) -> None:
    model = write_model(tmp_path / "half", LLAMA | {"torch_dtype": "float16"})
    found = plan(model, "--kv-cache-dtype", "auto", "--platform", "sm90")
    assert found["auto"] == {"kv_cache_dtype": "float16", "reason": "from the checkpoint"}
    assert list(found["formats"]) == ["float16"]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_picture(model: str, tmp_path: Path, ending: str) -> None:
    target = tmp_path / f"plan.{ending}"
    words = ["--memory", "1GiB", "--platform", "sm90", "--kv-cache-dtype", "bfloat16", "nvfp4"]
    assert cli.main(["kv-plan", model, *words, "--plot", str(target)]) == 0
    start = target.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in start


def test_picture_draws_what_the_plan_says(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte.entrypoints.kv_plan import picture

    seen: list[FormatPlan] = []
    monkeypatch.setattr(picture, "draw", lambda plans, title, path: seen.extend(plans))
    assert cli.main(["kv-plan", model, "--platform", "sm90", "--plot", str(tmp_path / "a.png")]) == 0
    assert [row.name for row in seen] == [name for name in FORMATS if not name.endswith("_ds_mla")]
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    assert cli.main(["kv-plan", model, "--plot", str(tmp_path / "a.png")]) == 1


def test_measured_bandwidth(model: str, plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kv_plan, "detect_platform", lambda: kv_plan.platform_named("cpu"))
    monkeypatch.setattr(limits, "measure", lambda num_threads: {"read_bytes_per_s": 5e9 * num_threads})
    assert plan(model, "--measure")["bytes_per_s"] == 5e9

    def missing(num_threads: int) -> None:
        raise KernelsMissing("no compiler")

    monkeypatch.setattr(limits, "measure", missing)
    assert cli.main(["kv-plan", model, "--measure"]) == 1
    assert "--measure needs the compiled CPU kernels: no compiler; use --bandwidth" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "40 potatoes"], "--memory: '40 potatoes' is not an amount of memory: write 40GiB"),
        (["--memory", "0GiB"], "--memory: '0GiB' must be at least one byte"),
        (["--bandwidth", "fast"], "--bandwidth: 'fast' is not a bandwidth: write 3.35TB/s"),
        (["--batch", "0", "--bandwidth", "1TB/s"], "--batch must be at least 1, got 0"),
        (["--context", "9000", "--bandwidth", "1TB/s"], "--context 9000 is more than the 8192 tokens"),
        (["--batch", "2"], "--batch is for tokens/s, which need --bandwidth or --measure"),
        (["--bandwidth", "1TB/s", "--measure"], "give one of them"),
        (["--measure", "--platform", "cpu"], "--measure is for the CPU of this machine"),
        (["--block-size", "24"], "--block-size must be one of"),
        (["--max-model-len", "9000"], "--max-model-len 9000 is more than the 8192 positions"),
        (["--platform", "sm70"], "--platform: 'sm70' is not one of cpu"),
        (["--plot", "plan.docx"], "--plot: plan.docx must end in one of"),
        (["--kv-cache-dtype", "k:fp8"], "--kv-cache-dtype must be one of"),
        (["--tensor-parallel-size", "2"], "unknown flag --tensor-parallel-size"),
    ],
)
def test_mistakes_name_the_flag(model: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kv-plan", model, *words]) in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("40GiB", 40 * GIB),
        ("40GB", 40 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("100kB", 100_000),
        ("100KB", 100_000),
        ("7B", 7),
        ("4096", 4096),
        ("4G", 4 * GIB),
    ],
)
def test_amounts(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes == parse_bytes_per_s(f"{text}/s")


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e3GiB", "1GiBs", "1 G iB", "0.5B"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)
