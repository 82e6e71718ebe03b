"""Published advisories that concern pure functions, files and the dependencies; test ids are the advisories' own.

The requests are in tests/e2e/test_advisories.py. docs/security.md maps every advisory to its test; that the map is right is
tested here too.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import pickle
import re
import struct
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from halfbyte.engine.messages import AbortRequests, AddRequests, EngineSpawn, FromEngine, ToEngine
from halfbyte.errors import HalfbyteError
from halfbyte.model_runner.safetensors_files import check_folder
from halfbyte.model_runner.source import locate

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("halfbyte", "kvcache", "kernels", "model_runner", "engine", "entrypoints")
PRODUCT = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))


class Canary:
    """Unpickling it would end the tests."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return sys.exit, ("a pickle was loaded",)


# --- messages between the processes ------------------------------------------------------------------------------------

FRAMES = {
    "CVE-2024-9053-pickle": pickle.dumps(Canary()),
    "CVE-2026-93034-ext": msgspec.msgpack.encode(msgspec.msgpack.Ext(1, pickle.dumps(Canary()))),
    "CVE-2026-93034-wrapped": msgspec.msgpack.encode({"type": "AddRequests", "requests": [msgspec.msgpack.Ext(5, b"x")]}),
    "CVE-2026-93034-tag": msgspec.msgpack.encode({"type": "PickleWrapper", "data": pickle.dumps(Canary())}),
    "CVE-2026-94570-short": msgspec.msgpack.encode(AbortRequests(["a"]))[:-1],
    "CVE-2026-94570-type": msgspec.msgpack.encode({"type": "AbortRequests", "request_ids": [1]}),
    "CVE-2026-94570-list": msgspec.msgpack.encode([1, 2]),
    "CVE-2026-94570-missing": msgspec.msgpack.encode({"type": "AddRequests"}),
    "CVE-2026-94570-empty": b"",
}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=list(FRAMES))
@pytest.mark.parametrize("kind", [ToEngine, FromEngine, EngineSpawn], ids=["to", "from", "spawn"])
def test_only_known_messages_are_decoded(frame: bytes, kind: Any) -> None:
    with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
        msgspec.msgpack.decode(frame, type=kind)


def test_the_decoders_have_no_hooks() -> None:
    """CVE-2026-93034: a hook is where extension types come back to life."""
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                assert not {keyword.arg for keyword in node.keywords} & {"ext_hook", "dec_hook"}, f"{path}:{node.lineno}"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(AddRequests([])), type=ToEngine) == AddRequests([])


# --- what code may do --------------------------------------------------------------------------------------------------


def test_files_and_configurations_are_not_checked_by_assertions() -> None:
    """CVE-2026-41523: under -O an assertion is gone. `assert x is not None` only tells the type checker."""
    names = ("gguf", "gguf_config", "decoder_config", "safetensors_files", "checkpoint", "source", "catalogue", "loader")
    paths = [ROOT / "model_runner" / f"{name}.py" for name in names]
    paths += [ROOT / "engine" / f"{name}.py" for name in ("limits", "requests", "tokenizer", "gguf_tokenizer")]
    for path in [*paths, ROOT / "halfbyte" / "types.py", ROOT / "halfbyte" / "resolve.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assert):
                assert re.fullmatch(r"[\w.]+ is not None", ast.unparse(node.test)), f"{path}:{node.lineno}"


def test_nothing_but_the_client_commands_is_an_http_client() -> None:
    """CVE-2026-34753: one door to the network. Models come through huggingface_hub and pip, which `source` calls."""
    # they talk to the server that a user names; `batch_routes` does so, or calls its own application without a socket
    commands = {"http_client.py", "load_generator.py", "startup.py", "batch_routes.py"}
    clients = {"httpx", "requests", "aiohttp", "urllib3", "pycurl"}
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom):
                found = {f"{node.module}.{alias.name}" for alias in node.names}
            for name in found:
                outward = name.split(".")[0] in clients or name.startswith(("urllib.request", "http.client", "ftplib"))
                assert not outward or path.name in commands, f"{path}:{node.lineno} imports {name}"


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "trust_remote_code": True, "auto_map": {"AutoConfig": "canary.Canary", "AutoTokenizer": "canary.Canary"},
    "quantization_config": None, "text_config": {"trust_remote_code": True, "auto_map": {"AutoConfig": "canary.Canary"}},
}  # fmt: skip
SCRIPT = """
import sys
from pathlib import Path
from halfbyte.engine.tokenizer import load_tokenizer
from halfbyte.errors import HalfbyteError
from halfbyte.model_runner.decoder_config import config_from_files
from halfbyte.model_runner.source import ModelFiles
assert False, "must run under -O"
for folder in sys.argv[1:]:
    files = ModelFiles("m", "hf", Path(folder))
    for load in (lambda: config_from_files(files, {}), lambda: load_tokenizer(files)):
        try:
            print(type(load()).__name__)
        except HalfbyteError as error:
            print(type(error).__name__, str(error).count("\\n"))
print(sorted(name for name in sys.modules if "canary" in name or "models." in name and ".convert_" in name))
"""


def test_a_folder_runs_no_code_and_is_checked_without_assertions(tmp_path: Path) -> None:
    """CVE-2025-66448, CVE-2026-5241, CVE-2026-41523, CVE-2024-11392, CVE-2026-65119: under -O too."""
    tokenizer = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}
    changes: list[dict[str, Any]] = [{}, {"hidden_act": "__import__('canary')"}, {"hidden_act": "torch.load"}]
    for index, change in enumerate(changes):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "canary.py").write_text("raise SystemExit('the canary ran')")
        (folder / "config.json").write_text(json.dumps(CONFIG | change))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        auto = {"auto_map": CONFIG["auto_map"], "trust_remote_code": True, "tokenizer_class": "Canary"}
        (folder / "tokenizer_config.json").write_text(json.dumps(auto))
    command = [sys.executable, "-O", "-c", SCRIPT, *(str(tmp_path / str(index)) for index in range(len(changes)))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *results, imported = done.stdout.splitlines()
    assert results[:2] == ["DecoderConfig", "Tokenizer"] and imported == "[]"
    assert [line.split()[0] for line in results[2::2]] == ["UnsupportedError"] * 2 and results[2].endswith(" 0"), results


# --- model files -------------------------------------------------------------------------------------------------------


def test_a_broken_file_is_no_reason_to_read_a_pickle(tmp_path: Path) -> None:
    """CVE-2026-15976, CVE-2025-24357"""
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Canary()))
    for raw in (b"", b"\x80\x04", struct.pack("<Q", 2**40) + b"{}", pickle.dumps(Canary())):
        (tmp_path / "model.safetensors").write_bytes(raw)
        with pytest.raises(HalfbyteError, match=r"model\.safetensors"):
            check_folder(tmp_path)


@pytest.mark.parametrize(
    "name", ["a\0b", "\0", "x" * 5000, f"{'x' * 300}/{'y' * 300}", "../../etc/passwd", "o/n\0", "a\nb/c", "~nobody/x"]
)
def test_names_of_models_are_one_line_errors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2024-37032"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(HalfbyteError) as caught:
        locate(name)
    assert "\n" not in str(caught.value)


# --- dependencies ------------------------------------------------------------------------------------------------------

FIXED_IN = {
    "CVE-2025-27516": ("jinja2", "3.1.6"),
    "CVE-2026-24747": ("torch", "2.10.0"),
    "CVE-2025-32434": ("torch", "2.6.0"),
    "CVE-2025-62727": ("starlette", "0.49.1"),
    "CVE-2026-48710": ("starlette", "1.0.1"),
    "CVE-2025-6638": ("transformers", "4.53.0"),
    "CVE-2026-5241": ("transformers", "5.2.1"),
}


@pytest.mark.parametrize(("name", "fixed_in"), FIXED_IN.values(), ids=list(FIXED_IN))
def test_dependencies_have_their_fixes(name: str, fixed_in: str) -> None:
    assert Version(importlib.metadata.version(name)) >= Version(fixed_in)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floors = [r.specifier for r in map(Requirement, declared) if r.name.lower() == name]
    assert floors, f"pyproject.toml has no floor for {name}"
    assert not list(floors[0].filter([str(Version(f"{fixed_in}.dev0")), "0.1"], prereleases=True))
    assert any(Version(part.version) >= Version(fixed_in) for part in floors[0] if part.operator == ">=")


# --- the document ------------------------------------------------------------------------------------------------------

SECURITY = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", SECURITY)))


def test_the_document_names_tests() -> None:
    assert len(NAMED) > 40


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda value: value)
def test_named_tests_exist(path: str, name: str) -> None:
    assert re.search(rf"^(?:async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("path", ["tests/e2e/test_advisories.py", "tests/unit/test_advisories_unit.py"])
def test_every_tested_advisory_is_in_the_document(path: str) -> None:
    ids = set(re.findall(r"(?:CVE|PYSEC)-\d{4}-\d+|GHSA(?:-\w{4}){3}", (ROOT / path).read_text(encoding="utf-8")))
    assert not {advisory for advisory in ids if advisory not in SECURITY}


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"`(--[a-z-]+)", SECURITY))))
def test_flags_exist(flag: str) -> None:
    name = flag.removeprefix("--").removeprefix("no-")  # of a switch that is on by default
    assert f'"{name}"' in (ROOT / "entrypoints" / "flag_table.py").read_text(encoding="utf-8")
