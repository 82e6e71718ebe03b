"""Adapters at one product as the C++ kernels read them: packed by seat, in memory that is taken when the server starts.

A seat's matrices are as large as its adapter's ranks; the table that the program points to is changed in place. Knows packed
weights and seats; knows no files and no requests. The law is `halfbyte.kernels.lora`.

Shape letters: N ranks of all parts, E inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halfbyte.kernels.cpu import abi
from halfbyte.kernels.cpu.abi import RowType
from halfbyte.kernels.cpu.library import CpuEngine
from halfbyte.kernels.cpu.weights import WeightMemory, aligned, dense_kind, pack_dense, packed_bytes
from halfbyte.kernels.lora import LoraPart


class PackedLora:
    """outputs: of each part of the product; rows: what the product reads. dtype: of the adapters' numbers. engine: packs them."""

    def __init__(
        self,
        engine: CpuEngine,
        outputs: Sequence[int],
        num_inputs: int,
        num_seats: int,
        max_rank: int,
        dtype: torch.dtype,
        rows: RowType,
        memory: WeightMemory,
    ) -> None:
        assert len(outputs) <= abi.MAX_PARTS
        self.max_ranks = max_rank * len(outputs)
        self.table: Any = (abi.Lora * (num_seats + 1))()
        self.engine = engine
        self._dtype = dtype
        self._pairs = rows is RowType.BF16
        kinds = dense_kind(dtype, pairs=self._pairs), dense_kind(dtype)
        sizes = [packed_bytes(engine, kinds[0], self.max_ranks, num_inputs)]
        sizes += [packed_bytes(engine, kinds[1], num_outputs, max_rank) for num_outputs in outputs]
        self._memory = [memory.take(sum(map(aligned, sizes))) for _ in range(num_seats)]
        self._scales = torch.zeros(num_seats, self.max_ranks)

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory) + self._scales.nbytes

    def put(self, seat: int, parts: Sequence[LoraPart | None]) -> None:
        """As `LoraWeights`; no step is running."""
        found = [part for part in parts if part is not None]
        entry = abi.Lora()
        if found:
            memory, scales_N = WeightMemory(0, self._memory[seat - 1]), self._scales[seat - 1]
            a_NE = torch.cat([part.a_RE for part in found]).to(self._dtype)
            entry.a = pack_dense(self.engine, a_NE, memory, pairs=self._pairs).structure(0)
            entry.scales = scales_N.data_ptr()
            column = 0
            for index, part in enumerate(parts):
                if part is not None:
                    entry.b[index] = pack_dense(self.engine, part.b_OR.to(self._dtype), memory).structure(column)
                    scales_N[column : column + part.rank] = part.scale
                    column += part.rank
        self.table[seat] = entry
