"""The safetensors files of a folder: which there are, and whether each is whole, from their headers alone.

Knows the container and the shard index; trusts no number in them. Nothing is loaded here: `checkpoint` reads tensors after
everything was checked, so that a truncated shard is one line at once. It must not know models or torch.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from halfbyte.errors import ModelFileError
from halfbyte.model_runner.source import read_json

MAX_HEADER_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"
KV_CALIBRATION_NAME = "kv_calibration.safetensors"

_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of a header: dtype as safetensors spells it, shape, and its bytes [begin, end) after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def check_folder(folder: Path) -> dict[Path, dict[str, StoredTensor]]:
    """Every shard with its header, after all of them were found complete. ModelFileError names the first file that is not."""
    index = folder / INDEX_NAME
    if not index.is_file():
        return {path: read_header(path) for path in _shards_without_index(folder)}
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise ModelFileError(f"{index} has no weight_map")
    for tensor, name in shard_of.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelFileError(f"{index} puts {tensor} into {name!r}, which is not the name of a safetensors file")
    headers = {}
    for name in sorted(set(shard_of.values())):
        if not (folder / name).is_file():
            expected, found = len(set(shard_of.values())), len([n for n in set(shard_of.values()) if (folder / n).is_file()])
            raise ModelFileError(f"{folder / name} is missing: {INDEX_NAME} lists {expected} files, {found} are there")
        headers[folder / name] = read_header(folder / name)
    for tensor, name in shard_of.items():
        if tensor not in headers[folder / name]:
            raise ModelFileError(f"{folder / name} does not hold {tensor}, which {INDEX_NAME} expects there")
    return headers


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold weights: not the same ones in another layout, nor what is kept beside them."""
    names = (path.name for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    return [folder / name for name in sorted(names) if name != KV_CALIBRATION_NAME]


def _shards_without_index(folder: Path) -> list[Path]:
    found = weight_files(folder)
    if not found:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
        if pickles:
            raise ModelFileError(
                f"{folder} holds no safetensors; {pickles[0]} is a pickle, which can run code when it is read: "
                f"convert it to safetensors first"
            )
        raise ModelFileError(f"{folder} holds no *.safetensors file")
    single = [path for path in found if path.name == "model.safetensors"]
    if single:
        return single
    for path in found:
        if match := _SHARD.fullmatch(path.name):
            stem, total = match[1], int(match[3])
            for number in range(1, min(total, 100_000) + 1):
                shard = folder / f"{stem}-{number:05d}-of-{match[3]}.safetensors"
                if not shard.is_file():
                    raise ModelFileError(f"{shard} is missing: {path.name} says that there are {total} files")
    return found


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, checked against its size: byte ranges in order, without gap, overlap or anything after them."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 8:
                raise ModelFileError(f"{path} is cut off: expected at least 8 bytes, found {size} bytes")
            file.seek(0)
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ModelFileError(f"{path} is not a safetensors file: its header would have {length} bytes, of {size} in all")
            if 8 + length > size:
                raise ModelFileError(f"{path} is cut off: its header needs {8 + length} bytes, found {size} bytes")
            raw = file.read(length)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
    tensors = _parse(path, raw)
    end = max((tensor.end for tensor in tensors.values()), default=0)
    expected = 8 + length + end
    if size != expected:
        problem = "is cut off" if size < expected else "has bytes after its last tensor"
        raise ModelFileError(f"{path} {problem}: expected {expected} bytes, found {size} bytes")
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            raise ModelFileError(f"{path}: tensor {name} begins at {tensor.begin}, the one before it ends at {position}")
        position = tensor.end
    return tensors


def _parse(path: Path, raw: bytes) -> dict[str, StoredTensor]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            raise ModelFileError(f"{path}: its header names something twice")
        return values

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise ModelFileError(f"{path}: its header is not valid JSON") from None
    if not isinstance(header, dict):
        raise ModelFileError(f"{path}: its header is not a JSON object")
    return {name: _tensor(path, name, entry) for name, entry in header.items() if name != "__metadata__"}


def _tensor(path: Path, name: str, entry: Any) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if dtype not in _BITS:
        raise ModelFileError(f"{path}: tensor {name} has the unknown type {dtype!r}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelFileError(f"{path}: tensor {name} has no valid shape and data_offsets")
    bits = math.prod(shape) * _BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise ModelFileError(f"{path}: tensor {name} {dtype}{shape} needs {-(-bits // 8)} bytes, has {offsets[1] - offsets[0]}")
    return StoredTensor(dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def stored_dtype(folder: Path) -> str | None:
    """The dtype of most bytes of the first readable shard, for configurations that name none; None when there is no shard."""
    for path in sorted(folder.glob("*.safetensors")):
        amounts: dict[str, int] = {}
        for tensor in read_header(path).values():
            amounts[tensor.dtype] = amounts.get(tensor.dtype, 0) + tensor.end - tensor.begin
        if amounts:
            most = max(amounts, key=lambda dtype: amounts[dtype])
            return _DTYPES.get(most, most)
    return None
