"""Weight matrices as the C++ kernels read them: cut into panels, at the precision of the file.

`pack_dense` takes tensors, `pack_rows` rows of GGUF blocks. Knows storage, nothing of models. Called while a model is loaded.

Shape letters: O outputs, E inputs, L bytes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.kernels.cpu import abi
from halfbyte.kernels.cpu.abi import WeightKind
from halfbyte.kernels.cpu.library import CpuEngine
from halfbyte.platform import huge_pages

_ALIGNMENT = 64
_KIND_OF_DTYPE = {torch.float32: WeightKind.F32, torch.bfloat16: WeightKind.BF16, torch.float16: WeightKind.F16}


@dataclass(slots=True)
class PackedMatrix:
    """[num_outputs, num_inputs] in panels. data: uint8, owned. bias: float32 [num_outputs], set later where there is one."""

    kind: WeightKind
    num_outputs: int
    num_inputs: int
    panel_bytes: int
    data: Tensor
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def structure(self, column: int, bias: int | None = None) -> abi.Matrix:
        """As the library has it. column: where its outputs go, or of an adapter's B, where its inputs lie; bias: an address."""
        shape = (self.kind, self.num_outputs, self.num_inputs)
        return abi.Matrix(self.data.data_ptr(), bias, self.panel_bytes, *shape, column)


class WeightMemory:
    """Memory for packed weights, in large pieces of huge pages: every step reads all weights, and would otherwise miss
    the TLB once per 4 KiB."""

    def __init__(self, piece_bytes: int = 64 << 20, first: Tensor | None = None) -> None:
        """first: memory to begin with, uint8."""
        self._piece_bytes = piece_bytes
        self._piece = torch.empty(0, dtype=torch.uint8) if first is None else first
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], at a multiple of 64, not initialised."""
        start = aligned(self._used)
        if start + num_bytes > self._piece.numel():
            memory = huge_pages(max(num_bytes, self._piece_bytes))
            self._piece, start = torch.frombuffer(memory, dtype=torch.uint8), 0
        self._used = start + num_bytes
        return self._piece[start : self._used]


def aligned(num_bytes: int) -> int:
    """The next place where a packed weight may begin."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def dense_kind(dtype: torch.dtype, *, pairs: bool = False) -> WeightKind:
    """How plain numbers of `dtype` are stored; pairs: see `pack_dense`."""
    return WeightKind.BF16_PAIRS if pairs else _KIND_OF_DTYPE[dtype]


def packed_bytes(engine: CpuEngine, kind: WeightKind, num_outputs: int, num_inputs: int) -> int:
    """Memory of a matrix in panels."""
    panel_bytes: int = engine.library.hb_panel_bytes(engine.handle, kind, num_inputs)
    return -(-num_outputs // engine.panel) * panel_bytes


def pack_dense(engine: CpuEngine, weight_OE: Tensor, memory: WeightMemory | None = None, *, pairs: bool = False) -> PackedMatrix:
    """A float32, bfloat16 or float16 weight, kept in its dtype. pairs: bfloat16, to be multiplied with bfloat16 activations."""
    weight_OE = weight_OE.contiguous()
    return pack_rows(engine, dense_kind(weight_OE.dtype, pairs=pairs), weight_OE.view(torch.uint8), weight_OE.shape[1], memory)


def quantize_int8(engine: CpuEngine, weight_OE: Tensor) -> Tensor:
    """Rows of Q8_0 blocks (uint8 [O, E / 32 * 34]): 32 inputs share a float16 scale, the greatest magnitude over 127."""
    num_outputs, num_inputs = weight_OE.shape
    assert weight_OE.dtype == torch.float32 and num_inputs % 32 == 0
    weight_OE = weight_OE.contiguous()
    rows_OL = torch.empty(num_outputs, num_inputs // 32 * 34, dtype=torch.uint8)
    engine.library.hb_quantize_q8_0(engine.handle, weight_OE.data_ptr(), num_outputs, num_inputs, rows_OL.data_ptr())
    return rows_OL


def pack_rows(
    engine: CpuEngine, kind: WeightKind, rows_OL: Tensor, num_inputs: int, memory: WeightMemory | None = None
) -> PackedMatrix:
    """Rows as the file has them (uint8, one row of blocks per output), into memory of their own or into `memory`."""
    assert rows_OL.dtype == torch.uint8 and rows_OL.is_contiguous()
    num_outputs = rows_OL.shape[0]
    panel_bytes: int = engine.library.hb_panel_bytes(engine.handle, kind, num_inputs)
    data = (memory or WeightMemory(0)).take(packed_bytes(engine, kind, num_outputs, num_inputs))
    engine.library.hb_pack(engine.handle, kind, rows_OL.data_ptr(), rows_OL.shape[1], num_outputs, num_inputs, data.data_ptr())
    return PackedMatrix(kind, num_outputs, num_inputs, panel_bytes, data)
