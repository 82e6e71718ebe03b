"""Compiles the Triton kernels for GPUs that are not here, as a launch would, and prints what the assemblers say of them.

    python triton_targets.py TARGET FORMAT ...

prints a line of JSON per format, side and kernel. A process of its own: the tests beside it interpret the same kernels in theirs.
The compilers and assemblers are triton's own; no driver is needed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from halfbyte.kernels.triton.kv_read import read_halves, read_tile
from halfbyte.kernels.triton.kv_write import launch_of
from halfbyte.kernels.triton.numbers import FUSION_OFF
from halfbyte.kernels.triton.sides import KVSide, view_sides
from halfbyte.kvcache.formats import get_format
from halfbyte.kvcache.spec import KVCacheSpec
from halfbyte.kvcache.tensors import view_layer

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
HEADS, BLOCK_SIZE, DIM = 8, 16, 128


@triton.jit
def score(
    q: tl.tensor,
    side: KVSide,
    table: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Products of 16 queries with the tokens of a tile, by both ways to read it. Grid: kv heads."""
    head = tl.program_id(0)
    token = tl.arange(0, TOKENS)
    is_read = token < num_tokens
    block = tl.load(table + token // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)
    row = (tl.arange(0, 16) * side.dim)[:, None]
    if side.bits < 8:
        n = 2 * tl.arange(0, side.width // 2)[None, :]
        even, odd = read_halves(side, block, token % BLOCK_SIZE, head, is_read)
        found = tl.dot(tl.load(q + row + n), tl.trans(even.to(tl.bfloat16)))
        found = tl.dot(tl.load(q + row + n + 1), tl.trans(odd.to(tl.bfloat16)), found)
    else:
        tile = read_tile(side, block, token % BLOCK_SIZE, head, is_read)
        found = tl.dot(tl.load(q + row + tl.arange(0, side.width)[None, :]), tl.trans(tile.to(tl.bfloat16)))
    tl.store(out + tl.arange(0, 16)[:, None] * TOKENS + token[None, :], found)


def launches(name: str) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Kernels and arguments for a format: of the writer, and of `score` over each side."""
    spec = KVCacheSpec(HEADS, DIM, DIM, BLOCK_SIZE, None, name)
    page_bytes = sum(plane.bytes for plane in get_format(name).planes(spec))
    cache = view_layer(torch.zeros(2, page_bytes, dtype=torch.uint8), spec)
    x_TGD, slots_T = torch.zeros(16, HEADS, DIM, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int64)
    yield "write", *launch_of(x_TGD, x_TGD, cache, slots_T)[1:]
    table, out = torch.zeros(16, dtype=torch.int32), torch.zeros(16, 64)
    for prefix, side in zip("kv", view_sides(cache), strict=True):
        yield f"read {prefix}", score, (x_TGD, side, table, out, 60, BLOCK_SIZE, 64)


def compile_for(target: GPUTarget, kernel: Any, arguments: tuple[Any, ...]) -> Any:
    """What the first launch with these arguments would compile."""
    backend = make_backend(target)
    options = {"num_warps": 4, **FUSION_OFF}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*arguments, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=parsed.__dict__)


def facts(compiled: Any) -> dict[str, int]:
    """What assemblers say. num_spills: instructions (NVIDIA), or registers and bytes (AMD), in memory for want of registers.

    num_fused, num_flushed: multiply-adds that round once, and instructions that take denormals for zeros; of NVIDIA's only, as
    AMD's division is made of fused instructions.
    """
    found = {"shared_bytes": compiled.metadata.shared}
    if "cubin" not in compiled.asm:
        assembly = compiled.asm["amdgcn"]
        names = ("vgpr_spill_count", "private_segment_fixed_size")  # scalars go to lanes of vector registers, not to memory
        counts = [int(count) for name in names for count in re.findall(rf"\.{name}:\s+(\d+)", assembly)]
        assert len(counts) == len(names)
        return {**found, "num_spills": sum(counts)}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        assembly = subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout
    assert "EXIT" in assembly
    ptx = compiled.asm["ptx"]
    num_fused = len(re.findall(r"\b(?:fma|mad)[.\w]*\.f32\b", ptx))
    num_spills = len(re.findall(r"\b(?:LDL|STL)\b", assembly))
    return {**found, "num_spills": num_spills, "num_fused": num_fused, "num_flushed": ptx.count(".ftz")}


def main(name: str, *formats: str) -> None:
    target = GPUTarget("cuda", int(name.removeprefix("sm")), 32) if name.startswith("sm") else GPUTarget("hip", name, 64)
    for kv_format in formats:
        for kind, kernel, arguments in launches(kv_format):
            print(json.dumps({"format": kv_format, "kernel": kind, **facts(compile_for(target, kernel, arguments))}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
