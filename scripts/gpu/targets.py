"""The GPUs that kernels are compiled for, and what one of their multiprocessors (AMD: compute units) can hold.

Figures are those of the CUDA programming guide's table of compute capabilities and of AMD's CDNA guides. What a program may have
of shared memory, the kernels' own table says. Knows no kernels; names are those of `halfbyte.platform`.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.triton.targets import SHARED_BYTES
from halfbyte.platform import PLATFORM_NAMES


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU. Sizes in bytes; `registers` of 32 bits.

    shared_bytes: that a block of threads may ask for. unit_shared_bytes: of a multiprocessor, of which each block costs
    reserved_bytes more than it asks for. registers: of one scheduler's share per lane (AMD), or of the multiprocessor (NVIDIA).
    """

    name: str
    shared_bytes: int
    unit_shared_bytes: int
    reserved_bytes: int
    registers: int
    max_warps: int
    max_blocks: int

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("gfx")


def _nvidia(name: str, max_warps: int, max_blocks: int) -> Target:
    shared_bytes = SHARED_BYTES[name]
    return Target(name, shared_bytes, shared_bytes + 1024, 1024, 64 << 10, max_warps, max_blocks)


def _amd(name: str) -> Target:
    return Target(name, SHARED_BYTES[name], SHARED_BYTES[name], 0, 512, max_warps=32, max_blocks=32)


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _nvidia("sm80", max_warps=64, max_blocks=32),
        _nvidia("sm86", max_warps=48, max_blocks=16),
        _nvidia("sm89", max_warps=48, max_blocks=24),
        _nvidia("sm90", max_warps=64, max_blocks=32),
        _nvidia("sm100", max_warps=64, max_blocks=32),
        _nvidia("sm103", max_warps=64, max_blocks=32),
        _nvidia("sm120", max_warps=48, max_blocks=24),
        _nvidia("sm121", max_warps=48, max_blocks=24),
        _amd("gfx90a"),
        _amd("gfx942"),
        _amd("gfx950"),
    )
}
assert set(TARGETS) == set(PLATFORM_NAMES) - {"cpu"}

_TENSOR_COLUMNS = 512  # of a Blackwell multiprocessor's memory for tensor cores


def occupancy(target: Target, registers: int, shared_bytes: int, num_warps: int, tensor_columns: int = 0) -> float:
    """The share of the warps that fit which a kernel's blocks can have at once; 0 when not one block fits."""
    if target.is_amd:
        waves = min(8, target.registers // _ceil(max(registers, 1), 8))  # of each of 4 schedulers
        blocks = 4 * waves // num_warps
    else:
        blocks = target.registers // (_ceil(max(registers, 1) * 32, 256) * num_warps)
    blocks = min(blocks, target.max_warps // num_warps, target.max_blocks)
    if shared_bytes + target.reserved_bytes:
        blocks = min(blocks, target.unit_shared_bytes // (shared_bytes + target.reserved_bytes))
    if tensor_columns:
        blocks = min(blocks, _TENSOR_COLUMNS // tensor_columns)
    return blocks * num_warps / target.max_warps


def _ceil(number: int, unit: int) -> int:
    return -(-number // unit) * unit
