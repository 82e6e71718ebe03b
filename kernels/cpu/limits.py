"""What this machine can do at most, measured with the threads and the instruction set that the kernels use.

Two numbers bound every kernel: the bytes per second that come from memory, and the float32 multiply-adds per second. Knows no
kernel and no model. Called by `halfbyte bench kernels`, and by `benchmarks/compare.py` before the engines load.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from halfbyte.kernels.cpu.library import CpuEngine

# Far beyond the caches, so that what was read in one round is not in them any more in the next.
READ_BYTES = 512 << 20
ROUNDS = 8


def measure(num_threads: int, isa: str | None = None) -> dict[str, Any]:
    """The limits of `num_threads` threads, and of one (names with `_1`); JSON-able. KernelsMissing without compiled kernels.

    read_bytes_per_s: bytes per second at which the threads together read READ_BYTES of memory that was written before, front to
    back, in 64-bit sums; the memory lies where the calling thread put it, which counts on a machine with several memory nodes.
    flops_per_s: floating-point operations per second of independent float32 fused multiply-adds (two operations each) in
    registers. Both are the best of ROUNDS rounds: a limit is what the machine can do when nothing disturbs it.
    isa: the instruction set that was used, the best one unless it is given. num_threads: as given.
    """
    memory = np.ones(READ_BYTES, np.uint8)
    limits: dict[str, Any] = {}
    for threads, ending in ((num_threads, ""), (1, "_1")):
        engine = CpuEngine(threads, isa)
        try:
            library = engine.library
            limits[f"read_bytes_per_s{ending}"] = library.hb_read_bytes_per_s(
                engine.handle, memory.ctypes.data, memory.nbytes, ROUNDS
            )
            limits[f"flops_per_s{ending}"] = library.hb_flops_per_s(engine.handle, ROUNDS)
        finally:
            engine.close()
    return limits | {"isa": engine.isa, "num_threads": num_threads}
