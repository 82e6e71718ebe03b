"""The GGUF parser: what a writer wrote is read back, and no number in a file is believed before it is checked."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfbyte.errors import ModelFileError
from halfbyte.model_runner.gguf import MAX_ALIGNMENT, GGUFFile, can_dequantize

U32, F32, STRING, ARRAY, U64 = 4, 6, 8, 9, 10
HUGE = [2**31, 2**63, 2**64 - 1]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    counts = struct.pack("<I", len(dims) if num_dims is None else num_dims)
    return text(name) + counts + b"".join(struct.pack("<Q", d) for d in dims) + struct.pack("<IQ", kind, offset)


def file_bytes(keys: list[bytes] = (), tensors: list[bytes] = (), data: bytes = b"", **preamble: int) -> bytes:  # type: ignore[assignment]
    head = b"GGUF" + struct.pack(
        "<IQQ", preamble.get("version", 3), preamble.get("num_tensors", len(tensors)), preamble.get("num_keys", len(keys))
    )
    head += b"".join(keys) + b"".join(tensors)
    align = preamble.get("align", 32)
    return head + b"\0" * (-len(head) % align) + data


@pytest.fixture
def parse(tmp_path: Path) -> Callable[[bytes], GGUFFile]:
    def open_bytes(raw: bytes) -> GGUFFile:
        path = tmp_path / "model.gguf"
        path.write_bytes(raw)
        return GGUFFile(path)

    return open_bytes


def refusal(parse: Callable[[bytes], GGUFFile], raw: bytes) -> str:
    with pytest.raises(ModelFileError) as caught:
        parse(raw)
    message = str(caught.value)
    assert "model.gguf" in message and "\n" not in message
    return message


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, np.ndarray]]:
    """A file by the reference writer, with every kind of value and several kinds of tensor."""
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    values: dict[str, Any] = {"t.string": "häuser", "t.flag": True, "t.list": ["a", "", "ä€😀"], "t.numbers": [1, 2, 3]}
    writer.add_string("t.string", values["t.string"])
    writer.add_bool("t.flag", True)
    writer.add_array("t.list", values["t.list"])
    writer.add_array("t.numbers", values["t.numbers"])
    for name, add, value in (
        ("u8", writer.add_uint8, 255),
        ("i8", writer.add_int8, -128),
        ("u16", writer.add_uint16, 65535),
        ("i16", writer.add_int16, -5),
        ("u32", writer.add_uint32, 2**32 - 1),
        ("i32", writer.add_int32, -7),
        ("u64", writer.add_uint64, 2**64 - 1),
        ("i64", writer.add_int64, -(2**63)),
        ("f32", writer.add_float32, 0.5),
        ("f64", writer.add_float64, 0.1),
    ):
        add(f"t.{name}", value)
        values[f"t.{name}"] = value
    rng = np.random.default_rng(0)
    expected = {}
    for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0"):
        array = rng.standard_normal((6, 64)).astype(np.float32)
        quantised = gguf.quantize(array, GGMLQuantizationType[kind])
        writer.add_tensor(f"w.{kind}", quantised, raw_dtype=GGMLQuantizationType[kind])
        expected[f"w.{kind}"] = gguf.dequantize(quantised, GGMLQuantizationType[kind])
    writer.add_tensor("w.cube", rng.standard_normal((2, 3, 5)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, values, expected


def test_reads_what_the_reference_writer_wrote(written: tuple[Path, dict[str, Any], dict[str, np.ndarray]]) -> None:
    path, values, expected = written
    with GGUFFile(path) as file:
        assert file.architecture == "llama"
        for name, value in values.items():
            found = file.metadata[name]
            assert (found.tolist() if isinstance(found, np.ndarray) else found) == value, name
        for name, array in expected.items():
            read = file.read_tensor(name)
            assert read.dtype == np.float32 and np.array_equal(read, array), name
        assert file.tensors["w.cube"].shape == (2, 3, 5)
        assert all(info.offset % 64 == 0 for info in file.tensors.values())


def test_a_read_tensor_outlives_the_file(written: tuple[Path, dict[str, Any], dict[str, np.ndarray]]) -> None:
    path, _, expected = written
    with GGUFFile(path) as file:
        read = file.read_tensor("w.F32")
    assert np.array_equal(read, expected["w.F32"])


@pytest.mark.parametrize("kind", [k for k in GGML_QUANT_SIZES if can_dequantize(k.name)], ids=lambda kind: kind.name)
def test_every_readable_type_reads_as_the_reference_does(kind: GGMLQuantizationType, parse: Callable[[bytes], GGUFFile]) -> None:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 255, size=(12, 2 * block_bytes), dtype=np.uint8)
    file = parse(file_bytes(tensors=[tensor("w", [2 * block, 12], kind.value)], data=raw.tobytes()))
    with np.errstate(all="ignore"):
        if kind.name in ("F64", "I8", "I16", "I32", "I64"):
            names = {"F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
            expected = raw.view(names[kind.name]).astype(np.float32)
        else:
            expected = gguf.dequantize(raw, kind)
        assert np.array_equal(file.read_tensor("w"), expected, equal_nan=True)
    assert file.tensors["w"].shape == (12, 2 * block)


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("field", ["num_keys", "num_tensors"])
def test_counts_beyond_the_file_are_refused(field: str, count: int, parse: Callable[[bytes], GGUFFile]) -> None:
    assert ("metadata key count" if field == "num_keys" else "tensor count") in refusal(parse, file_bytes(**{field: count}))


@pytest.mark.parametrize("count", [1, 2, 40])
def test_small_counts_without_entries_are_refused(count: int, parse: Callable[[bytes], GGUFFile]) -> None:
    refusal(parse, file_bytes(num_keys=count))
    refusal(parse, file_bytes(num_tensors=count))


@pytest.mark.parametrize("dim", [0, *HUGE])
def test_dimensions_beyond_the_file_are_refused(dim: int, parse: Callable[[bytes], GGUFFile]) -> None:
    for dims in ([dim], [4, dim], [dim, dim, dim, dim]):
        refusal(parse, file_bytes(tensors=[tensor("w", dims)], data=b"\0" * 64))


def test_products_that_wrap_in_64_bits_are_refused(parse: Callable[[bytes], GGUFFile]) -> None:
    refusal(parse, file_bytes(tensors=[tensor("w", [2**32, 2**32])]))
    refusal(parse, file_bytes(tensors=[tensor("w", [2**62, 4])]))
    refusal(parse, file_bytes(tensors=[tensor("w", [4], offset=2**64 - 32)], data=b"\0" * 64))


@pytest.mark.parametrize("num_dims", [0, 5, 2**32 - 1])
def test_ranks_outside_the_format_are_refused(num_dims: int, parse: Callable[[bytes], GGUFFile]) -> None:
    assert "dimensions" in refusal(parse, file_bytes(tensors=[tensor("w", [1] * 5, num_dims=num_dims)], data=b"\0" * 64))


@pytest.mark.parametrize("length", [100, *HUGE])
def test_strings_longer_than_the_file_are_refused(length: int, parse: Callable[[bytes], GGUFFile]) -> None:
    prefix = struct.pack("<Q", length)
    refusal(parse, file_bytes([prefix + b"key"], num_keys=1))
    assert "k does not fit" in refusal(parse, file_bytes([key("k", STRING, prefix + b"abc")]))
    assert "a string of k" in refusal(parse, file_bytes([key("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + prefix)]))


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("kind", [0, U32, 7, STRING, ARRAY, U64, 12])
def test_arrays_longer_than_the_file_are_refused(kind: int, count: int, parse: Callable[[bytes], GGUFFile]) -> None:
    refusal(parse, file_bytes([key("k", ARRAY, struct.pack("<IQ", kind, count))]))


def test_a_tiny_file_that_claims_endless_nested_arrays_is_refused(parse: Callable[[bytes], GGUFFile]) -> None:
    payload = struct.pack("<IQ", ARRAY, 2**24) + struct.pack("<IQ", ARRAY, 0)
    refusal(parse, file_bytes([key("k", ARRAY, payload)]))


def test_nesting_is_limited(parse: Callable[[bytes], GGUFFile]) -> None:
    def nested(depth: int) -> bytes:
        payload = struct.pack("<IQ", U32, 1) + struct.pack("<I", 7)
        for _ in range(depth - 1):
            payload = struct.pack("<IQ", ARRAY, 1) + payload
        return file_bytes([key("k", ARRAY, payload)])

    assert np.asarray(parse(nested(3)).metadata["k"]).tolist() == [[[7]]]
    for depth in (4, 1000):
        assert "nests" in refusal(parse, nested(depth))


@pytest.mark.parametrize("kind", [13, 99, 2**32 - 1])
def test_unknown_value_types_are_refused(kind: int, parse: Callable[[bytes], GGUFFile]) -> None:
    assert "type" in refusal(parse, file_bytes([key("k", kind, b"\0" * 16)]))
    refusal(parse, file_bytes([key("k", ARRAY, struct.pack("<IQ", kind, 1) + b"\0" * 16)]))


@pytest.mark.parametrize("kind", [4, 5, 36, 9999, 2**32 - 1])
def test_unknown_tensor_types_are_refused(kind: int, parse: Callable[[bytes], GGUFFile]) -> None:
    assert f"unknown type {kind}" in refusal(parse, file_bytes(tensors=[tensor("w", [4], kind)], data=b"\0" * 64))


@pytest.mark.parametrize("alignment", [0, 3, 24, MAX_ALIGNMENT * 2, 2**31])
def test_alignments_that_are_no_bounded_power_of_two_are_refused(alignment: int, parse: Callable[[bytes], GGUFFile]) -> None:
    raw = file_bytes([key("general.alignment", U32, struct.pack("<I", alignment))])
    assert "general.alignment" in refusal(parse, raw)


def test_alignment_of_another_type_is_refused(parse: Callable[[bytes], GGUFFile]) -> None:
    assert "general.alignment" in refusal(parse, file_bytes([key("general.alignment", STRING, text("32"))]))


def test_tensor_offsets_are_checked(parse: Callable[[bytes], GGUFFile]) -> None:
    data = b"\0" * 64
    assert parse(file_bytes(tensors=[tensor("w", [16])], data=data)).tensors["w"].num_bytes == 64
    assert "multiple of 32" in refusal(parse, file_bytes(tensors=[tensor("w", [4], offset=4)], data=data))
    assert "need" in refusal(parse, file_bytes(tensors=[tensor("w", [16], offset=32)], data=data))
    assert "need" in refusal(parse, file_bytes(tensors=[tensor("w", [4], offset=2**40)], data=data))
    one_byte_short = file_bytes(tensors=[tensor("w", [16])], data=data[:-1])
    assert f"need {len(one_byte_short) + 1} bytes, the file has {len(one_byte_short)} bytes" in refusal(parse, one_byte_short)


def test_overlapping_tensors_are_refused(parse: Callable[[bytes], GGUFFile]) -> None:
    tensors = [tensor("a", [16]), tensor("b", [8], offset=32)]
    assert "overlap" in refusal(parse, file_bytes(tensors=tensors, data=b"\0" * 64))


def test_duplicates_are_refused(parse: Callable[[bytes], GGUFFile]) -> None:
    one = key("k", U32, struct.pack("<I", 1))
    assert "'k' occurs twice" in refusal(parse, file_bytes([one, one]))
    assert "'w' occurs twice" in refusal(
        parse, file_bytes(tensors=[tensor("w", [8]), tensor("w", [8], offset=32)], data=b"\0" * 64)
    )


def test_rows_that_are_no_whole_blocks_are_refused(parse: Callable[[bytes], GGUFFile]) -> None:
    assert "blocks of 32" in refusal(parse, file_bytes(tensors=[tensor("w", [33, 2], GGMLQuantizationType.Q8_0.value)]))


def test_invalid_utf8_is_refused(parse: Callable[[bytes], GGUFFile]) -> None:
    assert "UTF-8" in refusal(parse, file_bytes([key("k", STRING, text(b"\xff\xfe"))]))
    assert "UTF-8" in refusal(parse, file_bytes([key("k", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff"))]))


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "at least 24 bytes, this one has 0"),
        (b"GGUF", "at least 24 bytes, this one has 4"),
        (b"PK\3\4" + b"\0" * 40, "not a GGUF file"),
        (file_bytes(version=1), "version 1"),
        (file_bytes(version=4), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (file_bytes([key("split.count", U32, struct.pack("<I", 3))]), "one of 3 parts"),
    ],
)
def test_other_files_are_refused(raw: bytes, expected: str, parse: Callable[[bytes], GGUFFile]) -> None:
    assert expected in refusal(parse, raw)


def test_missing_and_unreadable_paths(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelFileError, match=str(path)):
            GGUFFile(path)


def test_sizes_beyond_32_bits_are_exact(tmp_path: Path) -> None:
    elements = 2**31 + 64
    raw = file_bytes(tensors=[tensor("w", [elements], GGMLQuantizationType.I8.value)])
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as file:
        file.write(raw)
        file.truncate(len(raw) + elements)
    with GGUFFile(path) as parsed:
        assert parsed.tensors["w"].num_bytes == elements
    with path.open("r+b") as file:
        file.truncate(len(raw) + elements - 1)
    with pytest.raises(ModelFileError, match=f"need {len(raw) + elements} bytes"):
        GGUFFile(path)


def small_file() -> bytes:
    keys = [
        key("general.architecture", STRING, text("llama")),
        key("a", ARRAY, struct.pack("<IQ", STRING, 3) + text("x") + text("") + text("yz")),
        key("n", ARRAY, struct.pack("<IQ", U32, 2) + struct.pack("<II", 1, 2)),
        key("f", F32, struct.pack("<f", 1.5)),
    ]
    return file_bytes(keys, [tensor("a", [8]), tensor("b", [4, 2], offset=32)], data=bytes(range(64)))


def test_every_cut_is_one_line_with_both_sizes(parse: Callable[[bytes], GGUFFile]) -> None:
    raw = small_file()
    parse(raw)
    for length in range(len(raw)):
        assert f"{length} bytes" in refusal(parse, raw[:length]) or length < 24


@settings(max_examples=300, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, len(small_file()) - 1), st.integers(0, 255)), min_size=1, max_size=6))
@example(edits=[(171, 88)])  # a tensor name that runs on over a line break
def test_damaged_files_are_refused_or_stay_inside_the_file(
    edits: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(small_file())
    for position, value in edits:
        raw[position] = value
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(raw)
    try:
        file = GGUFFile(path)
    except ModelFileError as error:
        assert "\n" not in str(error)
        return
    with file:
        assert all(info.offset > 0 and info.offset + info.num_bytes <= len(raw) for info in file.tensors.values())
