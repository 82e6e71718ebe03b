"""GGUF files: a bounded parser of the header, and one tensor at a time as float32.

Knows the container (version 2 and 3, little endian) and trusts no number in it: every count and length is checked in exact
Python integers against the bytes that remain, before anything is read or allocated. It must not know models, tokenizers or
torch. Called by `decoder_config` (metadata), `checkpoint` (tensors) and `halfbyte.engine.gguf_tokenizer` (vocabulary).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from halfbyte.errors import ModelFileError

MAX_DIMS = 4
MAX_NAME_BYTES = 65_535
MAX_ARRAY_ITEMS = 1 << 24
MAX_ARRAY_DEPTH = 3
MAX_METADATA_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_NUMPY = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_ROW_ELEMENTS = 1 << 14


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `offset` counts from the start of the file; `shape` is outermost first, as torch counts."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class GGUFFile:
    """One GGUF file, parsed and checked when it is opened: ModelFileError says what is wrong with it, in one line.

    metadata: key -> int, float, bool, str, list (strings, nested arrays) or numpy array (numbers).
    tensors: name -> TensorInfo, in the order of the file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._map = _map_file(self.path)
        try:
            reader = _HeaderReader(self.path, self._map)
            self.version, num_tensors, num_keys = reader.preamble()
            self.metadata = reader.metadata(num_keys)
            self._refuse_parts()
            self.tensors = reader.tensors(num_tensors, self.metadata)
            _check_layout(self.path, len(self._map), self.tensors)
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._map.close()

    def _refuse_parts(self) -> None:
        count = self.metadata.get("split.count", 1)
        if isinstance(count, int) and count > 1:
            raise ModelFileError(f"{self.path} is one of {count} parts: join them first (gguf-split --merge)")

    @property
    def architecture(self) -> str:
        """`general.architecture`, the prefix of the model's own keys."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise ModelFileError(f"{self.path}: the metadata has no general.architecture")
        return value

    def read_rows(self, name: str) -> npt.NDArray[np.uint8]:
        """The blocks of a matrix as they are, one row of bytes per output, in new memory."""
        info = self.tensors[name]
        raw = np.frombuffer(self._map, dtype=np.uint8, count=info.num_bytes, offset=info.offset)
        return raw.reshape(info.shape[0], -1).copy()

    def read_tensor(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor, dequantised, as a new float32 array that shares nothing with the file."""
        info = self.tensors[name]
        raw = np.frombuffer(self._map, dtype=np.uint8, count=info.num_bytes, offset=info.offset)
        if info.type_name in _PLAIN:
            return raw.view(_PLAIN[info.type_name]).astype(np.float32).reshape(info.shape)
        try:
            values = dequantize(_in_long_rows(raw, info), GGMLQuantizationType[info.type_name])
        except NotImplementedError:
            raise ModelFileError(f"{self.path}: tensor {name} has type {info.type_name}, which cannot be read") from None
        return values.reshape(info.shape)


def can_dequantize(type_name: str) -> bool:
    """Whether `read_tensor` handles this type: some packed types exist only for kernels."""
    if type_name in _PLAIN:
        return True
    kind = GGMLQuantizationType[type_name]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _in_long_rows(raw: npt.NDArray[np.uint8], info: TensorInfo) -> npt.NDArray[np.uint8]:
    """The bytes as [rows, row bytes]. Blocks are independent, so short rows are joined: dequantising is per 16 rows."""
    num_rows = info.num_elements // info.shape[-1]
    join = 1
    while info.shape[-1] * join < _ROW_ELEMENTS and num_rows % (2 * join) == 0:
        join *= 2
    return raw.reshape(num_rows // join, -1)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise ModelFileError(f"{path} is cut off: a GGUF file has at least 24 bytes, this one has {size}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None


class _HeaderReader:
    """A cursor over the header that refuses to step past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def fail(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {message}")

    def need(self, num_bytes: int, what: str) -> None:
        """Raise unless `num_bytes` more bytes are there for `what`."""
        if num_bytes > self.size - self.position:
            expected = self.position + num_bytes
            raise self.fail(f"{what} does not fit: expected a file of at least {expected} bytes, found {self.size} bytes")

    def scalar(self, code: str, what: str) -> Any:
        width = struct.calcsize(code)
        self.need(width, what)
        (value,) = struct.unpack_from(code, self.data, self.position)
        self.position += width
        return value

    def string(self, what: str, max_bytes: int | None = None) -> str:
        length = self.scalar("<Q", f"the length of {what}")
        if max_bytes is not None and length > max_bytes:
            raise self.fail(f"{what} is {length} bytes long, at most {max_bytes} are allowed")
        self.need(length, what)
        raw = self.data[self.position : self.position + length]
        self.position += length
        return self.decode(raw, what)

    def decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not valid UTF-8") from None

    def preamble(self) -> tuple[int, int, int]:
        """(version, number of tensors, number of metadata keys)."""
        if self.data[:4] != b"GGUF":
            raise self.fail(f"not a GGUF file: it starts with {self.data[:4]!r}")
        self.position = 4
        version = self.scalar("<I", "the version")
        if version not in (2, 3):
            big_endian = version in (2 << 24, 3 << 24)
            found = "a big-endian file" if big_endian else f"version {version}"
            raise self.fail(f"GGUF version 2 or 3, little endian, is needed; this is {found}")
        num_tensors = self.scalar("<Q", "the tensor count")
        num_keys = self.scalar("<Q", "the metadata key count")
        self.check_count("the tensor count", num_tensors, MAX_TENSORS, _MIN_TENSOR_BYTES)
        self.check_count("the metadata key count", num_keys, MAX_METADATA_KEYS, _MIN_KEY_BYTES)
        return version, num_tensors, num_keys

    def check_count(self, what: str, count: int, limit: int, bytes_each: int) -> None:
        if count > limit:
            raise self.fail(f"{what} is {count}, at most {limit} are allowed")
        self.need(count * bytes_each, f"{what}, {count},")

    def metadata(self, num_keys: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for index in range(num_keys):
            key = self.string(f"metadata key {index}", MAX_NAME_BYTES)
            if key in values:
                raise self.fail(f"metadata key {key!r} occurs twice")
            values[key] = self.value(self.scalar("<I", f"the type of {key}"), key, 0)
        return values

    def value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], key)
        if kind == _STRING:
            return self.string(key)
        if kind != _ARRAY:
            raise self.fail(f"{key} has the unknown value type {kind}")
        if depth == MAX_ARRAY_DEPTH:
            raise self.fail(f"{key} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        return self.array(key, depth)

    def array(self, key: str, depth: int) -> Any:
        kind = self.scalar("<I", f"the element type of {key}")
        count = self.scalar("<Q", f"the length of {key}")
        if kind in _NUMPY:
            width = np.dtype(_NUMPY[kind]).itemsize
            self.need(count * width, f"{key}, an array of {count},")
            values = np.frombuffer(self.data, dtype=_NUMPY[kind], count=count, offset=self.position).copy()
            self.position += count * width
            return values
        self.check_count(f"the length of {key}", count, MAX_ARRAY_ITEMS, 12 if kind == _ARRAY else 8)
        if kind == _STRING:
            return self.strings(count, key)
        return [self.value(kind, key, depth + 1) for _ in range(count)]

    def strings(self, count: int, key: str) -> list[str]:
        """`count` strings in one tight loop: vocabularies have a quarter of a million."""
        data, position, size = self.data, self.position, self.size
        length_at = struct.Struct("<Q").unpack_from
        raw = []
        for _ in range(count):
            start = position + 8
            position = start + length_at(data, position)[0] if start <= size else size + 1
            if position > size:
                self.position = min(start, size)
                self.need(position - self.position, f"a string of {key}")
            raw.append(data[start:position])
        self.position = position
        try:
            return [text.decode("utf-8") for text in raw]
        except UnicodeDecodeError:
            raise self.fail(f"{key} holds a string that is not valid UTF-8") from None

    def tensors(self, count: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        alignment = self.alignment(metadata)
        relative: dict[str, TensorInfo] = {}
        for index in range(count):
            info = self.tensor(f"tensor {index}", alignment)
            if info.name in relative:
                raise self.fail(f"tensor {info.name!r} occurs twice")
            relative[info.name] = info
        start = -(-self.position // alignment) * alignment
        return {
            name: TensorInfo(name, info.shape, info.type_name, start + info.offset, info.num_bytes)
            for name, info in relative.items()
        }

    def alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise self.fail(f"general.alignment must be a power of two up to {MAX_ALIGNMENT}, got {value!r}")
        return value

    def tensor(self, what: str, alignment: int) -> TensorInfo:
        """One entry, its offset still relative to the start of the tensor data."""
        name = self.string(f"the name of {what}", MAX_NAME_BYTES)
        num_dims = self.scalar("<I", f"the rank of {name}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.fail(f"tensor {name} has {num_dims} dimensions, 1 to {MAX_DIMS} are allowed")
        dims = [self.scalar("<Q", f"dimension {axis} of {name}") for axis in range(num_dims)]
        kind = self.scalar("<I", f"the type of {name}")
        offset = self.scalar("<Q", f"the offset of {name}")
        if kind not in GGMLQuantizationType.__members__.values() or GGMLQuantizationType(kind) not in GGML_QUANT_SIZES:
            raise self.fail(f"tensor {name} has the unknown type {kind}")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        type_name = GGMLQuantizationType(kind).name
        if any(dim == 0 for dim in dims) or dims[0] % block:
            raise self.fail(f"tensor {name} of type {type_name} cannot have dimensions {dims}: rows come in blocks of {block}")
        if offset % alignment:
            raise self.fail(f"tensor {name} lies at offset {offset}, which is not a multiple of {alignment}")
        num_bytes = math.prod(dims) // block * block_bytes
        return TensorInfo(name, tuple(reversed(dims)), type_name, offset, num_bytes)


def _check_layout(path: Path, size: int, tensors: dict[str, TensorInfo]) -> None:
    """Every tensor inside the file, none over another."""
    ordered = sorted(tensors.values(), key=lambda info: info.offset)
    end = max((info.offset + info.num_bytes for info in ordered), default=0)
    if end > size:
        raise ModelFileError(f"{path} is cut off: its tensors need {end} bytes, the file has {size} bytes")
    for before, after in zip(ordered, ordered[1:], strict=False):
        if before.offset + before.num_bytes > after.offset:
            raise ModelFileError(f"{path}: tensors {before.name} and {after.name} overlap")
