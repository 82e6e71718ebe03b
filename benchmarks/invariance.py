"""What batch invariance costs: our matrix products, in one fixed order of arithmetic, against oneDNN's, which is free to choose.

    python benchmarks/invariance.py [--num-threads 2] [--reps 15] [--out result.json]

oneDNN (through torch, weights packed in its own layout) picks a kernel, blocking and order of sums for each shape; ours keeps one
chain of multiply-adds per output, whatever the number of rows. Both take turns on the same weights and rows, in float32 and,
where the machine multiplies pairs of it, in bfloat16. A ratio above 1 says that invariance cost nothing there. That the bits are
equal is shown by `tests/numerics/test_batch_invariance.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from halfbyte.entrypoints.bench.results import Spread, environment, save  # noqa: E402
from halfbyte.kernels.cpu.abi import RowType  # noqa: E402
from halfbyte.kernels.cpu.library import CpuEngine  # noqa: E402
from halfbyte.kernels.cpu.program import INPUT, Program  # noqa: E402
from halfbyte.kernels.cpu.weights import WeightMemory, pack_dense  # noqa: E402
from halfbyte.model_runner.cpu_model import NARROW_ISAS  # noqa: E402

SHAPES = ((3072, 576), (576, 1536), (4096, 4096))
ROWS = (1, 8, 32, 256)
# All copies together are more than the caches hold.
TOTAL_BYTES = 256 << 20


def ours(engine: CpuEngine, weights: list[Tensor], x: Tensor) -> Callable[[], object]:
    pairs = x.dtype is torch.bfloat16
    program = Program(engine, RowType.BF16 if pairs else RowType.FLOATS)
    out, memory = program.buffer("out", weights[0].shape[0]), WeightMemory()
    for weight in weights:
        program.linear(INPUT, out, [pack_dense(engine, weight, memory, pairs=pairs)])
    return lambda: program.run(x.shape[0], input_TE=x)


def onednn(weights: list[Tensor], x: Tensor) -> Callable[[], object]:
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0]) for weight in weights]
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda: [multiply(x, weight, None, "none", [], "") for weight in packed]


def seconds(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--reps", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    engine = CpuEngine(arguments.num_threads)
    results = []
    for dtype in (torch.float32, torch.bfloat16) if engine.isa in NARROW_ISAS else (torch.float32,):
        for num_outputs, num_inputs in SHAPES:
            weight = torch.randn(num_outputs, num_inputs).to(dtype)
            weights = [weight.clone() for _ in range(max(2, TOTAL_BYTES // weight.nbytes))]
            for num_rows in ROWS:
                x = torch.randn(num_rows, num_inputs).to(dtype)
                sides = ours(engine, weights, x), onednn(weights, x)
                times = [[seconds(side) for side in sides] for _ in range(arguments.reps + 1)][1:]
                ratio = Spread.of([theirs / mine for mine, theirs in times])
                name = f"{str(dtype).removeprefix('torch.')} {num_outputs}x{num_inputs} rows {num_rows}"
                results.append({"case": name, "times_as_fast": [ratio.median, ratio.min, ratio.max]})
                print(f"{name:34s} ours over oneDNN: {ratio} times as fast", flush=True)
    if arguments.out:
        save(arguments.out, {"benchmark": "invariance", "results": results, "environment": environment()})


if __name__ == "__main__":
    main()
