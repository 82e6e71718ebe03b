"""What a kernel's machine code says of it: registers, spills, loops, loads by width, products on tensor cores.

A pure function of a listing, so that reading more out of it costs no compilation. Knows both vendors' instructions and no limits;
those are in `rules`. Called by scripts/aot.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from scripts.gpu.assembly import Instruction, innermost_loops, parse_amd, parse_sass

# Products of matrices: of a warp, of four warps (Hopper), out of tensor memory (Blackwell), of a wave (AMD).
_MATRIX = {
    "tcgen05": re.compile(r"UTC[A-Z]*MMA"),
    "wgmma": re.compile(r"[A-Z]GMMA"),
    "mma": re.compile(r"[A-Z]MMA"),
    "mfma": re.compile(r"v_s?mfma"),
}
_SASS_LOAD = re.compile(r"(?:LDG|LDGSTS|LD)(?:\.|$)")
_SASS_BULK = re.compile(r"UTMALDG|UBLKCP")
_AMD_LOAD = re.compile(r"(?:global|buffer|flat)_load_(?:lds_)?(?P<kind>dword(?:x\d)?|[us]?short|[us]byte)")
_AMD_BITS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "ushort": 16, "sshort": 16, "short": 16}
_AMD_BITS |= {"ubyte": 8, "sbyte": 8}


@dataclass(frozen=True, slots=True)
class Listing:
    """What the compiler gave. assembly: SASS or AMD's. resources: what cuobjdump says; of AMD's, the assembly has it.

    ptx: "" for AMD. tensor_columns: of Blackwell's tensor memory.
    """

    assembly: str
    resources: str
    ptx: str
    shared_bytes: int
    num_warps: int
    tensor_columns: int


@dataclass(frozen=True, slots=True)
class Facts:
    """registers: per lane. spills: registers and bytes that went elsewhere, and NVIDIA's instructions for that, by name.
    instructions: without those that only fill up.

    loop_instructions, loop_loads: of the innermost loops with products of matrices; of a kernel without such, with loads from
    global memory. loads: bits -> instructions (a bulk copy counts as 128). matrix: kind -> instructions. num_fused: multiply-adds
    that round once, None where the text does not tell (AMD's division is made of them). num_flushed: instructions that take
    denormals for zeros (AMD: 1 when all do).
    """

    registers: int
    spills: dict[str, int]
    shared_bytes: int
    num_warps: int
    tensor_columns: int
    instructions: int
    loop_instructions: int
    loads: dict[int, int]
    loop_loads: dict[int, int]
    matrix: dict[str, int]
    num_fused: int | None
    num_flushed: int


def read(listing: Listing) -> Facts:
    is_amd = not listing.ptx
    code = parse_amd(listing.assembly) if is_amd else parse_sass(listing.assembly)
    assert code, "a listing without instructions"
    loops = innermost_loops(code, _is_matrix) or innermost_loops(code, lambda opcode: _load_bits(opcode) is not None)
    in_loop = [code[i] for i in sorted(set().union(*loops))]
    registers, spills = _amd_resources(listing.assembly) if is_amd else _nvidia_resources(listing.resources, code, in_loop)
    return Facts(
        registers=registers,
        spills=spills,
        shared_bytes=listing.shared_bytes,
        num_warps=listing.num_warps,
        tensor_columns=listing.tensor_columns,
        instructions=_count(code),
        loop_instructions=_count(in_loop),
        loads=_loads(code),
        loop_loads=_loads(in_loop),
        matrix=dict(Counter(kind for instruction in code if (kind := _matrix_kind(instruction.opcode)))),
        num_fused=None if is_amd else len(re.findall(r"\b(?:fma|mad)[.\w]*\.f32\b", listing.ptx)),
        num_flushed=int(_number("amdhsa_float_denorm_mode_32", listing.assembly) != 3) if is_amd else listing.ptx.count(".ftz"),
    )


def _count(code: Iterable[Instruction]) -> int:
    return sum(1 for instruction in code if instruction.opcode != "NOP")


@cache
def _matrix_kind(opcode: str) -> str | None:
    return next((kind for kind, pattern in _MATRIX.items() if pattern.match(opcode)), None)


def _is_matrix(opcode: str) -> bool:
    return _matrix_kind(opcode) is not None


def _loads(code: Iterable[Instruction]) -> dict[int, int]:
    counts = Counter(bits for instruction in code if (bits := _load_bits(instruction.opcode)))
    return dict(sorted(counts.items()))


@cache
def _load_bits(opcode: str) -> int | None:
    """Bits that each lane loads from global memory; None for other instructions."""
    if amd := _AMD_LOAD.match(opcode):
        return _AMD_BITS[amd["kind"]]
    if _SASS_BULK.match(opcode):
        return 128
    if not _SASS_LOAD.match(opcode):
        return None
    sizes = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
    return next((sizes[word] for word in opcode.split(".")[1:] if word in sizes), 32)


def _nvidia_resources(text: str, code: Iterable[Instruction], in_loop: Iterable[Instruction]) -> tuple[int, dict[str, int]]:
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found, f"no resources in {text[:200]!r}"
    spills = {
        "stack_bytes": int(found[2]),
        "local_bytes": int(found[3]),
        "local_instructions": _num_local(code),
        "local_instructions_in_loop": _num_local(in_loop),
    }
    return int(found[1]), spills


def _num_local(code: Iterable[Instruction]) -> int:
    return sum(1 for instruction in code if instruction.opcode.split(".")[0] in ("LDL", "STL"))


def _amd_resources(text: str) -> tuple[int, dict[str, int]]:
    spills = {
        "vgpr_spills": _number("vgpr_spill_count", text),
        "sgpr_spills": _number("sgpr_spill_count", text),
        "private_bytes": _number("private_segment_fixed_size", text),
    }
    return _number("vgpr_count", text), spills


def _number(name: str, text: str) -> int:
    found = re.search(rf"\.{name}:?\s+(\d+)", text)
    assert found, f"no .{name} in the assembly"
    return int(found[1])
