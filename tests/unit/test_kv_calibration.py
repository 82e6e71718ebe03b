"""What surrounds a calibration: which texts, which files, whose weights, and what `halfbyte calibrate` does with its flags."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from halfbyte.engine.kv_calibration import beside_model, calibration_paths, token_windows, weights_fingerprint
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints import cli
from halfbyte.entrypoints.commands import calibrate
from halfbyte.entrypoints.flags import parse
from halfbyte.errors import UserError
from halfbyte.kvcache.prefix_hash import extend_hashes
from halfbyte.model_runner.source import ModelFiles, locate
from halfbyte.model_runner.texts import calibration_files, sample_files

WORDS = [2 * letter for letter in "abcdefghijklmnopqrst"]
FINGERPRINT = "f" * 64


@pytest.fixture(autouse=True)
def keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "setup_logging", lambda level: None)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """In the place of the user's cache folder, as far as calibrations go."""
    monkeypatch.setattr("halfbyte.engine.kv_calibration.cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "kv_calibration"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model as far as files go: two shards of weights."""
    import numpy as np

    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    for shard in (1, 2):
        tensors = {f"layers.{shard}.{name}": np.arange(600, dtype=np.float32).reshape(20, 30) for name in ("q", "k")}
        save_file(tensors, path / f"model-{shard:05d}-of-00002.safetensors")
    return path


def files_of(path: Path) -> ModelFiles:
    return ModelFiles(str(path), "gguf" if path.suffix == ".gguf" else "hf", path)


def test_copies_of_weights_have_one_fingerprint(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    assert weights_fingerprint(files_of(tmp_path / "copy")) == weights_fingerprint(files_of(folder))
    (tmp_path / "a.gguf").write_bytes(b"weights" * 1000)
    (tmp_path / "b.gguf").write_bytes(b"weights" * 1000)
    assert weights_fingerprint(files_of(tmp_path / "a.gguf")) == weights_fingerprint(files_of(tmp_path / "b.gguf"))


def test_any_tensor_that_changes_changes_the_fingerprint(folder: Path) -> None:
    seen = {weights_fingerprint(files_of(folder))}
    for path in sorted(folder.glob("*.safetensors")):
        original = load_file(path)
        for name in original:
            changed = original[name].copy()
            changed[7, 11] += 1.0
            save_file({**original, name: changed}, path)
            seen.add(weights_fingerprint(files_of(folder)))
        save_file(original, path)
    assert len(seen) == 5 and weights_fingerprint(files_of(folder)) in seen


def test_a_large_file_is_sampled_from_end_to_end(tmp_path: Path) -> None:
    """Fine-tuning changes some of every matrix; 16 MiB are read in pages that lie 16 KiB apart."""
    path = tmp_path / "large.gguf"
    content = bytearray(16 << 20)
    path.write_bytes(content)
    seen = {weights_fingerprint(files_of(path))}
    for part in range(8):
        changed = content.copy()
        changed[part << 21 : (part << 21) + (32 << 10)] = b"\1" * (32 << 10)
        path.write_bytes(changed)
        seen.add(weights_fingerprint(files_of(path)))
    path.write_bytes(content + b"\0")
    seen.add(weights_fingerprint(files_of(path)))
    assert len(seen) == 10


def test_what_lies_beside_weights_is_no_weight(folder: Path) -> None:
    before = weights_fingerprint(files_of(folder))
    shutil.copy(folder / "model-00001-of-00002.safetensors", beside_model(files_of(folder)))
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "consolidated.safetensors")
    assert weights_fingerprint(files_of(folder)) == before


def test_calibrations_are_looked_for_beside_the_model_then_in_the_cache(folder: Path, cache: Path, tmp_path: Path) -> None:
    cached = cache / f"{FINGERPRINT}.safetensors"
    assert list(calibration_paths(files_of(folder), FINGERPRINT)) == [folder / "kv_calibration.safetensors", cached]
    (tmp_path / "m.gguf").touch()
    found = list(calibration_paths(files_of(tmp_path / "m.gguf"), FINGERPRINT))
    assert found == [tmp_path / "m.gguf.kv_calibration.safetensors", cached]


def test_windows_come_from_all_texts_in_turn(word_tokenizer: Callable[[bool], Tokenizer], tmp_path: Path) -> None:
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    long.write_text(" ".join(WORDS * 5), encoding="utf-8")
    short.write_text(" ".join(reversed(WORDS * 2)), encoding="utf-8")
    tokenizer = word_tokenizer(True)
    windows = token_windows(tokenizer, [long, short], 31, 1000)
    texts = {path: tokenizer.encode(path.read_text(), add_special_tokens=False) for path in (long, short)}
    first = [1]  # begun as a prompt is
    assert windows == [
        first + texts[long][:30],
        first + texts[short][:30],
        first + texts[long][30:60],
        first + texts[long][60:90],
    ]
    assert token_windows(tokenizer, [long, short], 31, 50) == [windows[0], windows[1][:19]]
    assert token_windows(tokenizer, [short], 17, 1000) == [], "tokens that see little of a text teach nothing"
    assert token_windows(tokenizer, [long], 31, 31 + 17) == windows[:1], "nor does what is left of a window"


def test_texts_to_fit_on_and_texts_to_judge_by_are_others() -> None:
    assert sample_files() and calibration_files()
    assert not {path.read_text() for path in sample_files()} & {path.read_text() for path in calibration_files()}


@pytest.mark.parametrize("content", [None, b"caf\xe9"])
def test_a_text_that_cannot_be_read(content: bytes | None, word_tokenizer: Callable[[bool], Tokenizer], tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"cannot read the text {path}: ") as caught:
        token_windows(word_tokenizer(False), [path], 64, 64)
    assert caught.value.param == "text"


@pytest.mark.parametrize("salt", [None, "of a user"])
def test_prefixes_of_another_calibration_are_other_prefixes(salt: str | None) -> None:
    tokens = list(range(32))
    found: dict[bytes, list[bytes]] = {content: [] for content in (b"", b"a" * 32, b"b" * 32)}
    for content, hashes in found.items():
        extend_hashes(hashes, tokens, 16, salt, content)
    assert len({digest for hashes in found.values() for digest in hashes}) == 6
    again: list[bytes] = []
    extend_hashes(again, tokens, 16, salt, b"a" * 32)
    assert again == found[b"a" * 32]


class FakeCalibration:
    """Remembers where it was saved; some places refuse."""

    fingerprint = FINGERPRINT

    def __init__(self, *refusing: Path) -> None:
        self.refusing = refusing

    def save(self, path: Path) -> None:
        if path in self.refusing:
            raise PermissionError(13, "Permission denied")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, word_tokenizer: Callable[[bool], Tokenizer]) -> SimpleNamespace:
    """`halfbyte calibrate` without a model: what it would measure, and what comes out."""
    seen = SimpleNamespace(found=FakeCalibration(), calls=[], tokenizer=word_tokenizer(False))

    def measure(options: Any, files: ModelFiles, windows: list[list[int]]) -> FakeCalibration:
        seen.calls.append((options, files, windows))
        return seen.found

    monkeypatch.setattr(calibrate, "measure", measure)
    monkeypatch.setattr(
        calibrate, "load_front", lambda options: SimpleNamespace(files=locate(options.model), tokenizer=seen.tokenizer)
    )
    monkeypatch.setattr(calibrate, "config_from_files", lambda files, overrides: SimpleNamespace(max_position=512))
    monkeypatch.setattr(calibrate, "_report", lambda found, path, model, is_found: [f"{path} {model} {is_found}"])
    return seen


def test_a_users_model_keeps_its_calibration_beside_it(
    folder: Path, cache: Path, measured: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["calibrate", str(folder)]) == 0
    beside = folder / "kv_calibration.safetensors"
    assert beside.is_file() and not cache.exists()
    assert capsys.readouterr().out == f"{beside} {folder} True\n"
    [(options, files, windows)] = measured.calls
    assert options.model == str(folder) and files.path == folder
    assert max(map(len, windows)) == 512, "no more than the model has positions"


def test_a_folder_that_cannot_be_written_to(
    folder: Path, cache: Path, measured: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    beside, cached = folder / "kv_calibration.safetensors", cache / f"{FINGERPRINT}.safetensors"
    measured.found = FakeCalibration(beside)
    assert cli.main(["calibrate", str(folder)]) == 0
    assert cached.is_file() and str(cached) in capsys.readouterr().out
    measured.found = FakeCalibration(beside, cached)
    assert cli.main(["calibrate", str(folder)]) == 1
    error = capsys.readouterr().err
    assert (
        f"cannot be written to {beside} (Permission denied) or {cached} (Permission denied); name a file with --output" in error
    )


def test_a_model_that_was_fetched_has_it_in_the_cache(cache: Path, tmp_path: Path) -> None:
    files = ModelFiles("owner/name", "hf", tmp_path, commit="c" * 40)
    assert list(calibrate._places(files, FINGERPRINT)) == [cache / f"{FINGERPRINT}.safetensors"]
    catalogue = ModelFiles("smollm2-135m", "gguf", tmp_path / "m.gguf")
    assert list(calibrate._places(catalogue, FINGERPRINT)) == [cache / f"{FINGERPRINT}.safetensors"]


def test_output_text_and_sizes(
    folder: Path, cache: Path, measured: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for text in texts:
        text.write_text(" ".join(WORDS * 20), encoding="utf-8")
    output = tmp_path / "out.safetensors"
    words = ["--text", *map(str, texts), "--output", str(output), "--max-tokens", "250", "--length", "100", "--num-threads", "1"]
    assert cli.main(["calibrate", str(folder), *words]) == 0
    assert output.is_file() and not beside_model(files_of(folder)).exists()
    assert capsys.readouterr().out == f"{output} {folder} False\n"
    [(options, _, windows)] = measured.calls
    assert [len(window) for window in windows] == [100, 100, 50] and options.num_threads == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "nothing.txt"], "--text: 'nothing.txt' is not a file"),
        (["--output", "nowhere/out.safetensors"], "--output: 'nowhere/out.safetensors' must be a file in a folder that exists"),
        (["--output", "."], "--output: '.' must be a file"),
        (["--length", "63"], "--length must be at least 64, got 63"),
        (["--length", "513"], "--length 513 is more than the 512 positions of this model"),
        (["--max-tokens", "10"], "--max-tokens must be at least 64, got 10"),
        (["--max-num-seqs", "2"], "unknown flag --max-num-seqs"),
        (["--kv-calibration", "x"], "unknown flag --kv-calibration"),
    ],
)
def test_mistakes_are_said_before_anything_is_measured(
    words: list[str], message: str, folder: Path, measured: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["calibrate", str(folder), *words]) in (1, 2)
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert not measured.calls


def test_a_text_that_is_too_short(
    folder: Path, measured: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for content in ("", "aa bb"):
        (tmp_path / "text.txt").write_text(content)
        assert cli.main(["calibrate", str(folder), "--text", str(tmp_path / "text.txt")]) == 1
        assert "text.txt have fewer than 64 tokens; give more" in capsys.readouterr().err
    assert not measured.calls


def test_flags_are_those_that_matter() -> None:
    names = {flag.name for flag in calibrate.FLAGS}
    assert {"model", "dtype", "device", "num-threads", "attention-backend", "text", "output", "length", "max-tokens"} <= names
    assert not any(name.startswith("kv-") or name.startswith("max-num") for name in names)
    assert parse("calibrate", "", calibrate.FLAGS, ["m", "--dtype", "float32"]).engine == {"model": "m", "dtype": "float32"}
