"""Safetensors folders: a broken, missing or extra file is one line with the file, what was expected and what was found."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from halfbyte.errors import ModelFileError
from halfbyte.model_runner.safetensors_files import MAX_HEADER_BYTES, check_folder, read_header, stored_dtype


def entry(dtype: str = "F32", shape: list[int] | None = None, begin: int = 0, end: int = 16) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [4] if shape is None else shape, "data_offsets": [begin, end]}


def container(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


TWO = container({"__metadata__": {"format": "pt"}, "a": entry(), "b": entry("BF16", [2, 3], 16, 28)}, b"\0" * 28)


def problem(folder: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        check_folder(folder)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


@pytest.fixture
def single(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(TWO)
    return tmp_path / "model.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for number, name in ((1, "a"), (2, "b")):
        (tmp_path / f"model-0000{number}-of-00002.safetensors").write_bytes(container({name: entry()}, b"\0" * 16))
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def test_a_whole_file(single: Path) -> None:
    headers = check_folder(single.parent)
    assert list(headers) == [single] and headers[single]["b"].shape == (2, 3)
    assert stored_dtype(single.parent) == "float32"


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 40, len(TWO) // 2, len(TWO) * 99 // 100, len(TWO) - 1])
def test_a_cut_file_names_both_sizes(single: Path, keep: int) -> None:
    single.write_bytes(TWO[:keep])
    message = problem(single.parent)
    assert "cut off" in message and f"found {keep} bytes" in message
    header_end = 8 + struct.unpack("<Q", TWO[:8])[0]
    if keep >= header_end:
        assert f"expected {len(TWO)} bytes" in message


def test_bytes_after_the_last_tensor(single: Path) -> None:
    single.write_bytes(TWO + b"x")
    assert f"expected {len(TWO)} bytes, found {len(TWO) + 1} bytes" in problem(single.parent)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_headers_of_absurd_length(single: Path, length: int) -> None:
    single.write_bytes(container({}, b"", length))
    assert "not a safetensors file" in problem(single.parent)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"not json", "JSON"),
        (b"\xff\xff", "JSON"),
        (b"[" * 100_000, "JSON"),
        ([], "JSON object"),
        (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "a": {}}', "twice"),
        ({"a": entry("F13")}, "unknown type"),
        ({"a": entry(shape=[5])}, "needs 20 bytes, has 16"),
        ({"a": entry(shape=[2**62, 4])}, "needs"),
        ({"a": entry(shape=[-4])}, "no valid shape"),
        ({"a": entry(shape=[True] * 4)}, "no valid shape"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "no valid shape"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}, "no valid shape"),
        ({"a": "x"}, "unknown type"),
        ({"a": entry(), "b": entry(begin=8, end=24)}, "begins at 8"),
        ({"a": entry(), "b": entry(begin=20, end=36)}, "begins at 20"),
    ],
)
def test_malformed_headers(single: Path, header: Any, expected: str) -> None:
    data_bytes = 16
    if isinstance(header, dict):
        data_bytes = max(
            (e["data_offsets"][1] for e in header.values() if isinstance(e, dict) and "data_offsets" in e), default=16
        )
    single.write_bytes(container(header, b"\0" * data_bytes))
    assert expected in problem(single.parent)


def test_whole_shards(sharded: Path) -> None:
    assert [sorted(tensors) for tensors in check_folder(sharded).values()] == [["a"], ["b"]]


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    message = problem(sharded)
    assert "model-00002-of-00002.safetensors is missing" in message and "lists 2 files, 1 are there" in message
    (sharded / "model.safetensors.index.json").unlink()
    assert "model-00002-of-00002.safetensors is missing" in problem(sharded)


def test_a_cut_shard_is_found_before_anything_is_loaded(sharded: Path) -> None:
    path = sharded / "model-00002-of-00002.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5])
    assert f"{path.name} is cut off: expected {size} bytes, found {size - 5} bytes" in problem(sharded)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/model.safetensors", "model.bin", 7, None, "a/b.safetensors"])
def test_an_index_may_only_name_files_beside_it(sharded: Path, name: Any) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "not the name of a safetensors file" in problem(sharded)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_without_a_map(sharded: Path, index: dict[str, Any]) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "weight_map" in problem(sharded)


def test_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    weight_map = {"a": "model-00001-of-00002.safetensors", "c": "model-00001-of-00002.safetensors"}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "does not hold c" in problem(sharded)


def test_pickles_are_refused(tmp_path: Path) -> None:
    assert "no *.safetensors" in problem(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin is a pickle" in problem(tmp_path)


def test_a_second_layout_of_the_same_weights_is_left_alone(single: Path) -> None:
    (single.parent / "consolidated.safetensors").write_bytes(b"broken")
    assert list(check_folder(single.parent)) == [single]


def test_missing_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"absent\.safetensors"):
        read_header(tmp_path / "absent.safetensors")
    assert stored_dtype(tmp_path) is None
