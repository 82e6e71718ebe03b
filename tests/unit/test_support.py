"""`halfbyte support`: its table, its JSON and its details say the same, from the registries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig

from halfbyte.entrypoints import cli
from halfbyte.entrypoints.commands import support
from halfbyte.kernels.attention import BACKENDS
from halfbyte.kernels.attention.vendors import VENDORS
from halfbyte.kvcache.formats import FORMATS
from halfbyte.platform import PLATFORM_NAMES

OUTCOMES = {"N": "reads natively", "K": "reads through our kernels", "L": "reads through our kernels", "-": "refused"}


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["support", *words]) == 0
    return capsys.readouterr().out


def cells(markdown: str) -> dict[str, dict[str, str]]:
    """format -> column -> mark, from the table of formats."""
    rows = [line.strip("| ").split(" | ") for line in markdown.splitlines() if line.startswith("| ")]
    first = next(index for index, row in enumerate(rows) if row[0] == "--kv-cache-dtype")
    header = rows[first]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows[first + 2 : first + 2 + len(FORMATS)]}


def test_json_equals_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    table = cells(shown(capsys, "--markdown"))
    stated: dict[str, Any] = json.loads(shown(capsys, "--json"))["kv_formats"]
    assert list(table) == list(stated) == list(FORMATS)
    for name, row in table.items():
        assert float(row["bytes"]) == stated[name]["bytes_per_token"]
        for platform in PLATFORM_NAMES:
            cell = stated[name]["platforms"][platform]
            assert OUTCOMES[row[platform]] == cell["outcome"], (name, platform)
            assert (row[platform] in "NK") is cell["is_fast"] and (cell["backend"] in BACKENDS) is (row[platform] != "-")


def test_each_format_has_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    stated = json.loads(shown(capsys, "--json"))["kv_formats"]
    found = {name: stated[name]["bytes_per_token"] for name in ("bfloat16", "fp8_e4m3", "nvfp4")}
    assert found == {"bfloat16": 4096, "fp8_e4m3": 2048, "nvfp4": 1152}


def test_vendors_and_model_rules_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for text in (shown(capsys), shown(capsys, "--markdown")):
        assert all(name in text for name in (*VENDORS, "not in this build", "GlmMoeDsaForCausalLM", "TTFT", "CUDA", "ROCm"))


def test_details_name_the_reader_and_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--platform", "sm90", "--kv-cache-dtype", "nvfp4_4over6")
    head, *lines = text.splitlines()
    assert head.startswith("nvfp4_4over6 on sm90: ") and head.endswith("reads through our kernels")
    assert len(lines) == len({*BACKENDS, *VENDORS})
    assert any(line.startswith("  flashinfer: kv_cache_dtype nvfp4_4over6 not supported on sm90") for line in lines)


def test_details_of_one_format_or_one_platform(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--kv-cache-dtype", "k:fp8,v:nvfp4")
    assert [line.split(":")[-2].split()[-1] for line in text.splitlines() if line.startswith("k:")] == list(PLATFORM_NAMES)
    text = shown(capsys, "--platform", "cpu")
    assert [line.split(" on cpu: ")[0] for line in text.splitlines() if " on cpu: " in line] == list(FORMATS)


def test_a_cell_that_nobody_reads(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the law nothing is left on a GPU: a dash in the table, and the reasons in the details."""
    monkeypatch.delitem(BACKENDS, "reference")
    for name in set(BACKENDS) - {"cpu"}:
        monkeypatch.delitem(BACKENDS, name)
    assert cells(shown(capsys, "--markdown"))["bfloat16"] | {"bytes": ""} == {
        "--kv-cache-dtype": "bfloat16",
        "bytes": "",
        **{platform: "K" if platform == "cpu" else "-" for platform in PLATFORM_NAMES},
    }
    text = shown(capsys, "--platform", "gfx942", "--kv-cache-dtype", "bfloat16")
    assert text.startswith("bfloat16 on gfx942: refused\n") and "aiter: not in this build" in text
    assert json.loads(shown(capsys, "--json"))["kv_formats"]["bfloat16"]["platforms"]["gfx942"]["refusals"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv-cache-dtype", "nvfp3"], "--kv-cache-dtype must be one of bfloat16, "),
        (["--platform", "sm70"], "--platform: 'sm70' is not one of cpu, sm80"),
        (["--markdown", "--json"], "--markdown is a form of the whole table"),
        (["--markdown", "--platform", "cpu"], "--markdown is a form of the whole table"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["support", *words]) in (1, 2)
    assert message in capsys.readouterr().err


def test_everything_advertised_is_possible_somewhere() -> None:
    """Each format is read on some platform, and each back end reads some format on some platform."""
    readers = {
        (name, backend)
        for name in FORMATS
        for platform in PLATFORM_NAMES
        for backend, answer in support._readings(platform, name).items()
        if isinstance(answer, support.Reader)
    }
    assert {name for name, _ in readers} == set(FORMATS)
    assert {backend for _, backend in readers} == set(BACKENDS)


def test_needs_no_package_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """Where none is installed, the table of the build is the same."""
    program = """
import sys
for name in ("triton", "flashinfer", "flash_attn"):
    sys.modules[name] = None
from halfbyte.entrypoints import cli
sys.exit(cli.main(["support", "--markdown"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown(capsys, "--markdown")


def test_a_models_decisions_from_its_tokenizer_and_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(LlamaConfig(num_hidden_layers=1).to_dict() | {"architectures": ["LlamaForCausalLM"]})
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert "this model has no chat template" in shown(capsys, "--model", str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}>")
    (tmp_path / "decision_temperatures.json").write_text('{"temperatures": {"noul": 2.5}}')
    lines = shown(capsys, "--model", str(tmp_path)).splitlines()
    assert lines[1:] == [
        "  choice: 255 options at most, temperature 1",
        "  noul: 2 options at most, temperature 2.5",
        "  score: 10 options at most, temperature 1",
    ]
    told = json.loads(shown(capsys, "--model", str(tmp_path), "--json"))
    assert told["decisions"]["choice"] == {"max_options": 255, "reason": None} and told["decisions"]["reader"] == "next_token"
    assert cli.main(["support", "--model", str(tmp_path), "--markdown"]) == 2
