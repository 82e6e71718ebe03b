"""`halfbyte bench kernels` without its kernels: flags, limits, tables; and the numbers of `benchmarks/roofline.py`."""

from __future__ import annotations

import json
import re
import shlex
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from benchmarks import roofline
from benchmarks.compare import Case as ComparedCase
from benchmarks.roofline import Costs, Limit, Machine, Row, StoredTensor, costs_of, decode_limit, prefill_limit, settings_of
from halfbyte.entrypoints import cli
from halfbyte.entrypoints.bench import kernels
from halfbyte.entrypoints.bench.kernels import MAX_OPS, Case, Plan, Work, describe, limit_s, make_plan, measure, table_line
from halfbyte.entrypoints.flags import UsageError, parse
from halfbyte.errors import UserError
from halfbyte.kernels.cpu.library import KernelsMissing
from halfbyte.model_runner.decoder_config import DecoderConfig, RopeConfig
from halfbyte.model_runner.source import ModelFiles

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/bench_kernels.md").read_text()
LIMITS: dict[str, Any] = {
    "read_bytes_per_s": 100e9,
    "read_bytes_per_s_1": 60e9,
    "flops_per_s": 400e9,
    "flops_per_s_1": 200e9,
    "isa": "avx2",
    "num_threads": 2,
}
LINEAR = Work("linear", "3072x576", "bf16", 4, num_bytes=2_000_000, num_flops=4_000_000)


def test_limit_is_the_larger_of_both() -> None:
    assert limit_s(LINEAR, LIMITS) == (2e-5, "memory")
    assert limit_s(Work("norm", "576", "f32", 1, num_bytes=0, num_flops=4_000), LIMITS) == (1e-8, "arithmetic")
    assert limit_s(Work("linear", "1x1", "f32", 8, num_bytes=100, num_flops=800), LIMITS) == (2e-9, "arithmetic")


def test_runs_take_turns_through_the_copies_after_a_warm_up() -> None:
    """A run is 20 ms at the limit's speed: 10 operations of 2 ms, on 35 copies."""
    ran: list[tuple[int, int]] = []
    times = iter(range(100))
    case = Case(
        Work("linear", "", "", 1, num_bytes=200_000_000, num_flops=1), 35, lambda first, n: lambda: ran.append((first, n))
    )
    times_s = measure(case, LIMITS, 5, clock=lambda: next(times))
    cycle = [(0, 10), (10, 10), (20, 10)]
    assert ran == cycle + cycle + cycle[:2]
    assert times_s == [0.1] * 5


@pytest.mark.parametrize(
    ("num_bytes", "num_copies", "num_ops"),
    [(10**12, 7, 1), (1, 7, 7), (1, 10 * MAX_OPS, MAX_OPS)],
    ids=["slow", "few copies", "tiny"],
)
def test_operations_of_a_run(num_bytes: int, num_copies: int, num_ops: int) -> None:
    made: list[tuple[int, int]] = []

    def make(first: int, num_ops: int) -> Any:
        made.append((first, num_ops))
        return lambda: None

    measure(Case(Work("", "", "", 1, num_bytes, 0), num_copies, make), LIMITS, 2)
    assert {found for _, found in made} == {num_ops}
    assert [first for first, _ in made] == list(range(0, num_copies - num_ops + 1, num_ops))[:2]


def test_a_row_of_the_result() -> None:
    row = describe(LINEAR, LIMITS, [3e-5, 4e-5, 5e-5])
    assert row == {
        "kernel": "linear",
        "shape": "3072x576",
        "storage": "bf16",
        "num_rows": 4,
        "num_bytes": 2_000_000,
        "num_flops": 4_000_000,
        "time_s": {"median": 4e-5, "min": 3e-5, "max": 5e-5},
        "bytes_per_s": pytest.approx(50e9),
        "flops_per_s": pytest.approx(100e9),
        "limit_s": 2e-5,
        "bound": "memory",
        "share_of_limit": 0.5,
    }
    words = ["linear", "3072x576", "bf16", "4", "40.0", "30.0", "50.0", "50.0", "100.0", "50%", "memory"]
    assert table_line(row).split() == words
    assert len(table_line(row)) <= len(kernels.HEADING)


def test_flags_become_a_plan() -> None:
    assert make_plan({}) == Plan()
    given = {"weights": ["q4_k"], "rows": ["2"], "shapes": ["512x768"], "heads": "8x2x128", "decode": ["3x70"], "num_iters": 4}
    plan = make_plan(given | {"kernels": ["linear", "decode"], "kv_cache_dtype": "float16"})
    assert (plan.weights, plan.rows, plan.shapes, plan.heads) == (("q4_k",), (2,), ((512, 768),), (8, 2, 128))
    assert (plan.kernels, plan.decode, plan.num_iters) == (("linear", "decode"), ((3, 70),), 4)
    assert (plan.kv_cache_dtype, plan.prefill) == ("float16", Plan().prefill)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kernels": ["liner"]}, "--kernels: 'liner' is not one of linear, embedding, norm, decode, prefill"),
        ({"weights": ["q9"]}, "--weights: 'q9' is not one of f32, bf16, f16, q8_0, "),
        ({"rows": ["0"]}, "--rows: '0' is not like 8"),
        ({"shapes": ["576"]}, "--shape: '576' is not like 3072x576"),
        ({"decode": ["8x-1"]}, "--decode: '8x-1' is not like 8x128"),
        ({"prefill": ["1x2x3"]}, "--prefill: '1x2x3' is not like 1x1024"),
        ({"heads": "9x2x64"}, "--heads must be QUERY_HEADSxKV_HEADSxHEAD_DIM, up to 64 query heads for each kv head, "),
        ({"heads": "2x1x63"}, "--heads must be "),
        ({"heads": "2x1x514"}, "--heads must be "),
        ({"heads": "65x1x64"}, "--heads must be "),
        ({"weights": ["q4_k"]}, "--shape 3072x576: q4_k weights come in groups of 256 inputs, got 576"),
    ],
)
def test_plans_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan(given)
    assert str(caught.value).startswith(message)


def test_unmeasured_kernels_restrict_nothing() -> None:
    assert make_plan({"weights": ["q4_k"], "kernels": ["norm"]}).weights == ("q4_k",)


class FakeEngine:
    """Notes its threads, its instruction set and its end."""

    made: list[tuple[int, str]] = []
    num_closed = 0

    def __init__(self, num_threads: int, isa: str) -> None:
        self.made.append((num_threads, isa))

    def close(self) -> None:
        FakeEngine.num_closed += 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, bench_command: None) -> list[Any]:
    """A machine with known limits whose kernels do nothing. What was measured: threads and instruction set, then kernels."""
    seen: list[Any] = []

    def cases(kernel: str, engine: Any, plan: Plan) -> Iterator[Case]:
        seen.append(kernel)
        yield Case(LINEAR, 1, lambda first, num_ops: lambda: None)

    def limits(num_threads: int, isa: str) -> dict[str, Any]:
        seen.append((num_threads, isa))
        return LIMITS

    monkeypatch.setattr("halfbyte.kernels.cpu.library.instruction_sets", lambda: ["avx2", "portable"])
    monkeypatch.setattr("halfbyte.kernels.cpu.library.CpuEngine", FakeEngine)
    monkeypatch.setattr("halfbyte.kernels.cpu.limits.measure", limits)
    monkeypatch.setattr(kernels, "cases", cases)
    monkeypatch.setattr(FakeEngine, "made", [])
    monkeypatch.setattr(FakeEngine, "num_closed", 0)
    return seen


def test_command(machine: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = ["--num-threads", "2", "--isa", "portable", "--kernels", "linear", "decode", "--output-json", str(path)]
    assert cli.main(["bench", "kernels", *words]) == 0
    assert machine == [(2, "portable"), "linear", "decode"]
    assert (FakeEngine.made, FakeEngine.num_closed) == ([(2, "portable")], 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Limits of 2 threads (avx2), and of one:"
    assert lines[1].split() == ["100.0", "60.0", "GB/s", "from", "memory"]
    assert lines[2].split() == ["400.0", "200.0", "GFLOP/s", "of", "float32", "multiply-adds"]
    assert [line.split()[0] for line in lines[4:]] == ["kernel", "linear", "linear"]
    document = json.loads(path.read_text())
    assert document["limits"] == LIMITS and document["environment"]["machine"] == {"cpu": "a cpu"}
    assert document["plan"]["kernels"] == ["linear", "decode"] and document["plan"]["heads"] == [9, 3, 64]
    assert [row["kernel"] for row in document["rows"]] == ["linear", "linear"]


def test_the_best_instruction_set_is_used(machine: list[Any]) -> None:
    assert cli.main(["bench", "kernels", "--num-threads", "1", "--kernels", "norm"]) == 0
    assert machine == [(1, "avx2"), "norm"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--isa", "avx512"], "--isa: 'avx512' does not run here, avx2, portable do"),
        (["--num-threads", "0"], "--num-threads must be in [1, 1024], got 0"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype: 'fp8' is not one of float32, bfloat16, float16"),
        (["--model", "m"], "unknown flag --model"),
    ],
)
def test_wrong_flags(words: list[str], message: str, machine: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernels", *words]) == 2
    assert capsys.readouterr().err.startswith(f"halfbyte: error: {message}") and not machine


def test_without_kernels_it_is_one_line(
    machine: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> list[str]:
        raise KernelsMissing("no C++ compiler is installed")

    monkeypatch.setattr("halfbyte.kernels.cpu.library.instruction_sets", missing)
    assert cli.main(["bench", "kernels"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "halfbyte: error: there are no compiled kernels to measure: no C++ compiler is installed\n"
    assert not captured.out and not machine


def test_examples_of_the_page_parse() -> None:
    examples = re.findall(r"^halfbyte bench kernels ?(.*)$", "\n".join(re.findall(r"```sh\n(.*?)```", PAGE, re.S)), re.M)
    assert len(examples) >= 2
    for words in examples:
        make_plan(parse("bench kernels", "", kernels.FLAGS, shlex.split(words)).command)
    assert all(f"`--{flag.name}`" in PAGE for flag in kernels.FLAGS if flag.name not in ("output-json", "log-level"))


def config(**changes: Any) -> DecoderConfig:
    """SmolLM2-135M."""
    values: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "max_position": 8192,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=1e5),
        "layer_windows": (None,) * 30,
        "tie_embeddings": True,
    }
    return DecoderConfig(**values | changes)


def smollm2(type_name: str = "BF16", item_bytes: int = 2) -> list[StoredTensor]:
    in_layer = {
        "self_attn.q_proj": (576, 576),
        "self_attn.k_proj": (192, 576),
        "self_attn.v_proj": (192, 576),
        "self_attn.o_proj": (576, 576),
        "mlp.gate_proj": (1536, 576),
        "mlp.up_proj": (1536, 576),
        "mlp.down_proj": (576, 1536),
        "input_layernorm": (576,),
        "post_attention_layernorm": (576,),
    }
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(30) for name, shape in in_layer.items()}
    shapes |= {"model.embed_tokens.weight": (49152, 576), "model.norm.weight": (576,)}
    return [StoredTensor(name, shape, type_name, int(np.prod(shape)) * item_bytes) for name, shape in shapes.items()]


def test_costs_of_a_known_model() -> None:
    model = costs_of(smollm2(), config(), "auto", "auto")
    assert model.weight_bytes == 2 * 134_515_008  # its parameters: 269 MB
    assert model.body_flops == 2 * 106_168_320  # 0.212 GFLOP
    assert model.body_flops + model.head_flops == 2 * (106_168_320 + 28_311_552)  # 0.269 GFLOP
    assert model.kv_token_bytes == 23_040
    assert model.num_keys(100) * model.attention_key_flops == 4 * 9 * 64 * 100 * 30


def test_costs_of_other_precisions() -> None:
    wide = costs_of(smollm2(), config(), "float32", "auto")
    assert (wide.weight_bytes, wide.kv_token_bytes) == (4 * 134_515_008, 46_080)
    assert costs_of(smollm2(), config(), "float32", "bfloat16").kv_token_bytes == 23_040
    assert costs_of(smollm2("Q8_0", 1), config(), "bfloat16", "auto").weight_bytes == 134_515_008, "blocks stay as they are"


def test_a_separate_head_is_read_instead_of_the_embedding() -> None:
    tensors = [*smollm2(), StoredTensor("lm_head.weight", (49152, 576), "F32", 4 * 28_311_552)]
    tied = costs_of(tensors, config(), "auto", "auto")
    untied = costs_of(tensors, config(tie_embeddings=False), "auto", "auto")
    assert tied == costs_of(smollm2(), config(), "auto", "auto")
    assert untied.weight_bytes - tied.weight_bytes == 2 * 28_311_552
    assert (untied.body_flops, untied.head_flops) == (tied.body_flops, tied.head_flops)


def test_a_window_bounds_what_is_seen() -> None:
    assert [SMALL.num_keys(context) for context in (1, 2, 3, 4, 5)] == [2, 4, 6, 7, 8]


SMALL = Costs(weight_bytes=1000, body_flops=100, head_flops=20, kv_key_bytes=8, attention_key_flops=4, windows=(None, 3))


def test_decode_limit() -> None:
    """Two requests at contexts 3, 4, 5: 12, 14 and 16 keys; 1096, 1112, 1128 bytes; 288, 296, 304 operations."""
    assert decode_limit(SMALL, Machine(100.0, 1e9), 2, 2, 4) == Limit(pytest.approx(6 / 33.36, rel=1e-12), "memory")
    assert decode_limit(SMALL, Machine(1e9, 10.0), 2, 2, 4) == Limit(pytest.approx(6 / 88.8, rel=1e-12), "arithmetic")


def test_prefill_limit() -> None:
    """Two prompts of 4 tokens: 2 * (2 + 4 + 6 + 7) keys and 2 heads make 992 operations; 16 keys written, 1128 bytes."""
    assert prefill_limit(SMALL, Machine(1e9, 10.0), 2, 4) == Limit(pytest.approx(8 / 99.2, rel=1e-12), "arithmetic")
    assert prefill_limit(SMALL, Machine(100.0, 1e9), 2, 4) == Limit(pytest.approx(8 / 11.28, rel=1e-12), "memory")


def speeds(**medians: float) -> dict[str, Any]:
    return {engine: {"tokens_per_s": {"median": median, "min": 0.0, "max": 9e9}} for engine, median in medians.items()}


RESULT: dict[str, Any] = {
    "benchmark": "compare",
    "limits": {"read_bytes_per_s": 100.0, "flops_per_s": 1e9},
    "spec": {
        "prompt_len": 2,
        "output_len": 4,
        "engines": {"ours": {"adapter": "halfbyte", "model": "{models}/m", "dtype": "bfloat16"}, "theirs": {"model": "t"}},
    },
    "summary": {
        "d2": {"decode": speeds(ours=3 / 33.36, theirs=1.5 / 33.36), "prefill": speeds(ours=7.0)},
        "p4x2": {"prefill": speeds(ours=8 / 11.28)},
    },
}


def test_rows_and_their_table() -> None:
    found = roofline.rows(RESULT, SMALL, Machine(100.0, 1e9))
    assert [row.case for row in found] == [ComparedCase("d2", 2, 2, 4), ComparedCase("p4x2", 2, 4, 1)]
    assert [list(row.tokens_per_s) for row in found] == [["ours", "theirs"], ["ours"]]
    assert list(roofline.table_lines(found)) == [
        "| case | limit, tokens/s | bound by | ours | theirs |",
        "|---|---:|---|---:|---:|",
        "| d2 | 0.2 | memory | 0.1 (50%) | 0.0 (25%) |",
        "| p4x2 | 0.7 | memory | 0.7 (100%) |  |",
    ]


def test_picture(tmp_path: Path) -> None:
    machine = Machine(100.0, 1e9)
    roofline.draw(roofline.rows(RESULT, SMALL, machine), SMALL, machine, "m", tmp_path / "out.svg")
    assert "limit of the machine" in (tmp_path / "out.svg").read_text()
    prefills = [Row(ComparedCase("p4", 1, 4, 1), Limit(1.0, "memory"), {"ours": 1.0})]
    with pytest.raises(UserError, match="no decode case"):
        roofline.draw(prefills, SMALL, machine, "m", tmp_path / "none.svg")


def test_settings_are_those_of_the_first_engine() -> None:
    def of(**changes: Any) -> dict[str, Any]:
        return {"spec": {"engines": {"ours": {"model": "m", **changes}, "theirs": {"model": "t", "dtype": "float32"}}}}

    assert settings_of(of(), None) == ("m", "auto", "auto")
    assert settings_of(of(dtype="float16", options={"kv_cache_dtype": "float32"}), "n") == ("n", "float16", "float32")
    assert settings_of(RESULT, "n") == ("n", "bfloat16", "auto")
    with pytest.raises(UserError, match="say where that is with --model"):
        settings_of(RESULT, None)
    with pytest.raises(UserError, match="quantization int8"):
        settings_of(of(options={"quantization": "int8"}), None)
    with pytest.raises(UserError, match="dtype 'fp8' is not one of auto, float32"):
        settings_of(of(options={"kv_cache_dtype": "fp8"}), None)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot read "), ("[]", "is not a result of"), ('{"benchmark": "compare", "limits": null}', "holds no limits")],
)
def test_results_that_say_nothing(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    assert roofline.main([str(path)]) == 2
    assert message in capsys.readouterr().err


def test_script_with_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Llama with one layer, one head of 4, 8 hidden, 16 in the middle and 32 words."""
    path, result, picture = tmp_path / "m.gguf", tmp_path / "result.json", tmp_path / "out.png"
    write_gguf(path)
    result.write_text(json.dumps(RESULT))
    assert roofline.main([str(result), "--model", str(path), "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    # 32 * 8 + 4 * 4 * 8 + 3 * 16 * 8 + 3 * 8 = 792 weights, 512 of them in the layers' matrices; K and V are 4 numbers each
    assert lines[0].startswith("m.gguf: 0.0 MB of weights per step, 16 bytes of K and V per token, 0.000 GFLOP per token")
    assert picture.read_bytes().startswith(b"\x89PNG")
    model = roofline.costs(ModelFiles("m", "gguf", path), "bfloat16")
    assert model == Costs(2 * 792, 2 * 512, 2 * 256, 16, 16, (None,))
    assert roofline.costs(ModelFiles("m", "gguf", path)).weight_bytes == 4 * 792


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(1)
    writer.add_key_length(4)
    writer.add_value_length(4)
    writer.add_rope_dimension_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {"token_embd": (32, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    shapes |= {f"blk.0.attn_{name}": (4, 8) for name in "qkv"} | {"blk.0.attn_output": (8, 4)}
    shapes |= {"blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_tensors_of_a_folder(tmp_path: Path) -> None:
    header = json.dumps({"model.norm.weight": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(6))
    found = list(roofline.stored_tensors(ModelFiles("m", "hf", tmp_path)))
    assert found == [StoredTensor("model.norm.weight", (3,), "BF16", 6)]
