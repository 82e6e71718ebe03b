"""`halfbyte bench kernels`: each compiled CPU kernel by itself, beside the most that this machine can do.

A program of one operation, over and over, each time on another copy of its weights or its cache: together the copies are far
larger than the caches, as a model's are. An operation cannot be faster than its bytes over the memory's speed, nor than its
arithmetic over the peak of the fused multiply-adds: the larger of both is its limit. Knows kernels; knows no model and no
request. Called by `halfbyte bench`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from halfbyte.entrypoints.bench.results import Spread, environment, save
from halfbyte.entrypoints.bench.shared_flags import OUTPUT_JSON, count_flag, range_check
from halfbyte.entrypoints.flag_table import LOG_LEVEL
from halfbyte.entrypoints.flags import Flag, UsageError, parse
from halfbyte.errors import HalfbyteError
from halfbyte.kernels.cpu.abi import CACHE_FORMATS, MAX_HEAD_DIM, MAX_HEADS_PER_KV_HEAD, RowType, WeightKind
from halfbyte.kvcache.formats import FORMATS
from halfbyte.platform import detect_platform

if TYPE_CHECKING:
    from halfbyte.kernels.attention.base import AttentionMetadata
    from halfbyte.kernels.cpu.library import CpuEngine
    from halfbyte.kernels.cpu.program import Program
    from halfbyte.kernels.cpu.weights import PackedMatrix
    from halfbyte.kvcache.tensors import LayerCache

Clock = Callable[[], float]
# (first, num_ops) -> a function that runs the operation once on each of the copies first .. first + num_ops - 1
MakeRun = Callable[[int, int], Callable[[], object]]

# A run is so many operations that it takes RUN_S at the limit's speed, and at most MAX_OPS: the call itself costs microseconds.
RUN_S = 0.02
MAX_OPS = 4000
BLOCK_SIZE = 16
KERNEL_NAMES = ("linear", "embedding", "norm", "decode", "prefill")
# bfloat16 weights against bfloat16 activations, on machines that multiply pairs of them
PAIRS = WeightKind.BF16_PAIRS.name.lower()
WEIGHTS = tuple(kind.name.lower() for kind in WeightKind)
ACTIVATIONS = {"float32": RowType.FLOATS, "int8": RowType.INT8, "int16": RowType.INT16}
KV_FORMATS = tuple(name for name in CACHE_FORMATS if name in FORMATS)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. shapes: outputs, inputs. heads: query heads, kv heads, head dim. decode, prefill: batch, context."""

    kernels: tuple[str, ...] = ("linear", "norm", "decode", "prefill")
    weights: tuple[str, ...] = ("bf16", PAIRS, "f32", "q8_0", "q4_1")
    rows: tuple[int, ...] = (1, 4, 8, 32, 256)
    shapes: tuple[tuple[int, int], ...] = ((3072, 576), (576, 1536), (4096, 4096))
    heads: tuple[int, int, int] = (9, 3, 64)
    activations: str = "float32"
    kv_cache_dtype: str = "bfloat16"
    decode: tuple[tuple[int, int], ...] = ((1, 128), (8, 128), (32, 128), (1, 4096), (8, 1024))
    prefill: tuple[tuple[int, int], ...] = ((1, 1024), (8, 128))
    num_iters: int = 20


_DEFAULT = Plan()


def _spelled(sizes: Sequence[Sequence[int]]) -> str:
    return " ".join("x".join(map(str, size)) for size in sizes)


FLAGS = (
    Flag(name="kernels", help=f"of {', '.join(KERNEL_NAMES)} (default: {' '.join(_DEFAULT.kernels)})", kind="texts"),
    Flag(name="weights", help=f"of {', '.join(WEIGHTS)} (default: {' '.join(_DEFAULT.weights)})", kind="texts"),
    Flag(
        name="activations",
        help=f"what whole-numbered weights are multiplied with (default: {_DEFAULT.activations})",
        choices=lambda: tuple(ACTIVATIONS),
    ),
    Flag(name="rows", help=f"tokens of a step (default: {' '.join(map(str, _DEFAULT.rows))})", kind="texts"),
    Flag(name="shape", help=f"matrices, OUTPUTSxINPUTS (default: {_spelled(_DEFAULT.shapes)})", kind="texts", field="shapes"),
    Flag(name="heads", help=f"QUERY_HEADSxKV_HEADSxHEAD_DIM of attention (default: {_spelled([_DEFAULT.heads])})"),
    Flag(name="kv-cache-dtype", help=f"of attention (default: {_DEFAULT.kv_cache_dtype})", choices=lambda: KV_FORMATS),
    Flag(name="decode", help=f"attention, BATCHxCONTEXT (default: {_spelled(_DEFAULT.decode)})", kind="texts"),
    Flag(name="prefill", help=f"attention, BATCHxPROMPT (default: {_spelled(_DEFAULT.prefill)})", kind="texts"),
    count_flag("num-iters", "measured runs of each kernel", _DEFAULT.num_iters),
    Flag(
        name="num-threads",
        help="threads (default: what affinity and cgroup quota grant)",
        kind="integer",
        check=range_check("num-threads", 1, 1024),
    ),
    Flag(name="isa", help="instruction set (default: the best one that runs here)"),
    OUTPUT_JSON,
    LOG_LEVEL,
)


@dataclass(frozen=True, slots=True)
class Work:
    """One operation, and what it has to do at least.

    num_bytes: what comes from memory, weights or cached K and V; activations stay in the caches.
    num_flops: a multiply-add counts as two.
    """

    kernel: str
    shape: str
    storage: str
    num_rows: int
    num_bytes: int
    num_flops: int


@dataclass(frozen=True, slots=True)
class Case:
    """An operation and the copies of what it reads."""

    work: Work
    num_copies: int
    make: MakeRun


def run(argv: Sequence[str]) -> int:
    parsed = parse("bench kernels", "Measure each CPU kernel beside the limits of this machine.", FLAGS, argv)
    plan = make_plan(parsed.command)
    num_threads = parsed.command.get("num_threads") or detect_platform("cpu").num_threads
    isa = _instruction_set(parsed.command.get("isa"))

    from halfbyte.kernels.cpu.library import CpuEngine
    from halfbyte.kernels.cpu.limits import measure as measure_limits

    limits = measure_limits(num_threads, isa)
    print("\n".join(limit_lines(limits)), flush=True)
    print("\n" + HEADING, flush=True)
    rows = []
    engine = CpuEngine(num_threads, isa)
    try:
        for kernel in plan.kernels:
            for case in cases(kernel, engine, plan):
                rows.append(describe(case.work, limits, measure(case, limits, plan.num_iters)))
                print(table_line(rows[-1]), flush=True)
    finally:
        engine.close()
    if "output_json" in parsed.command:
        save(parsed.command["output_json"], {"environment": environment(), "plan": asdict(plan), "limits": limits, "rows": rows})
    return 0


def make_plan(command: Mapping[str, Any]) -> Plan:
    """The flags as a plan. UsageError says which value cannot be."""
    given: dict[str, Any] = {field.name: command[field.name] for field in fields(Plan) if field.name in command}
    for name, known in (("kernels", KERNEL_NAMES), ("weights", WEIGHTS)):
        for word in given.get(name, ()):
            if word not in known:
                raise UsageError(f"--{name}: {word!r} is not one of {', '.join(known)}")
    for name, flag, example in (
        ("shapes", "shape", "3072x576"),
        ("decode", "decode", "8x128"),
        ("prefill", "prefill", "1x1024"),
    ):
        if name in given:
            given[name] = [_sizes(flag, word, example) for word in given[name]]
    if "rows" in given:
        given["rows"] = [_sizes("rows", word, "8")[0] for word in given["rows"]]
    if "heads" in given:
        given["heads"] = _sizes("heads", given["heads"], "9x3x64")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    plan = Plan(**given)
    _check_heads(*plan.heads)
    for weights in plan.weights if {"linear", "embedding"} & set(plan.kernels) else ():
        for shape in plan.shapes:
            group = _storage(weights)[0]
            if shape[1] % group:
                raise UsageError(
                    f"--shape {_spelled([shape])}: {weights} weights come in groups of {group} inputs, got {shape[1]}"
                )
    return plan


def _sizes(flag: str, word: str, example: str) -> tuple[int, ...]:
    """`3072x576` as numbers, as many as the example has."""
    if not re.fullmatch("x".join(["[1-9][0-9]*"] * len(example.split("x"))), word):
        raise UsageError(f"--{flag}: {word!r} is not like {example}")
    return tuple(map(int, word.split("x")))


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    possible = (
        f"QUERY_HEADSxKV_HEADSxHEAD_DIM, up to {MAX_HEADS_PER_KV_HEAD} query heads for each kv head, "
        f"an even head dim up to {MAX_HEAD_DIM}"
    )
    if num_heads % num_kv_heads or num_heads > MAX_HEADS_PER_KV_HEAD * num_kv_heads or head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise UsageError(f"--heads must be {possible}, got {num_heads}x{num_kv_heads}x{head_dim}")


def _storage(weights: str) -> tuple[int, int]:
    """Inputs of a group, and the bytes of a group in a file."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if weights == PAIRS:
        return 2, 4
    group, group_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[weights.upper()]]
    return group, group_bytes


def _instruction_set(asked: str | None) -> str:
    """The one to use: the best unless another is asked for. HalfbyteError when there are no compiled kernels."""
    from halfbyte.kernels.cpu.library import KernelsMissing, instruction_sets

    try:
        found = instruction_sets()
    except KernelsMissing as reason:
        raise HalfbyteError(f"there are no compiled kernels to measure: {reason}") from None
    if asked is not None and asked not in found:
        raise UsageError(f"--isa: {asked!r} does not run here, {', '.join(found)} do")
    return asked or found[0]


def cases(kernel: str, engine: CpuEngine, plan: Plan) -> Iterator[Case]:
    """Everything to be measured of a kernel, one at a time: each holds much memory."""
    by_name = {"linear": linear, "embedding": embedding, "norm": norm, "decode": decode, "prefill": prefill}
    return by_name[kernel](engine, plan)


def linear(engine: CpuEngine, plan: Plan) -> Iterator[Case]:
    """y = x W^T."""
    for matrices, weights, num_rows in _matrix_cases(engine, plan):
        num_outputs, num_inputs = matrices[0].num_outputs, matrices[0].num_inputs
        work = Work(
            kernel="linear",
            shape=f"{num_outputs}x{num_inputs}",
            storage=weights,
            num_rows=num_rows,
            num_bytes=matrices[0].nbytes,
            num_flops=2 * num_rows * num_outputs * num_inputs,
        )
        yield Case(work, len(matrices), _linear_runs(engine, matrices, num_rows, plan.activations))


def _linear_runs(engine: CpuEngine, matrices: Sequence[PackedMatrix], num_rows: int, activations: str) -> MakeRun:
    import torch

    from halfbyte.kernels.cpu.program import INPUT

    rows = ACTIVATIONS[activations] if matrices[0].kind.is_whole else RowType.FLOATS

    x_TE = torch.randn(num_rows, matrices[0].num_inputs)
    if matrices[0].kind is WeightKind.BF16_PAIRS:
        x_TE = x_TE.bfloat16()

    def make(first: int, num_ops: int) -> Callable[[], object]:
        program, out = _program(engine, matrices[0].num_outputs, rows)
        rounded = program.rounded(INPUT, matrices[0].num_inputs)
        for matrix in matrices[first : first + num_ops]:
            program.linear(rounded, out, [matrix])
        return lambda: program.run(num_rows, input_TE=x_TE)

    return make


def embedding(engine: CpuEngine, plan: Plan) -> Iterator[Case]:
    """Rows of a table; each has its weights side by side with those of its panel, so that more lines are touched than counted."""
    for matrices, weights, num_rows in _matrix_cases(engine, plan):
        num_outputs, num_inputs = matrices[0].num_outputs, matrices[0].num_inputs
        work = Work(
            kernel="embedding",
            shape=f"{num_outputs}x{num_inputs}",
            storage=weights,
            num_rows=num_rows,
            num_bytes=num_rows * matrices[0].nbytes // num_outputs,
            num_flops=num_rows * num_inputs,
        )
        yield Case(work, len(matrices), _embedding_runs(engine, matrices, num_rows))


def _embedding_runs(engine: CpuEngine, matrices: Sequence[PackedMatrix], num_rows: int) -> MakeRun:
    import torch

    token_ids_T = torch.randint(matrices[0].num_outputs, (num_rows,))

    def make(first: int, num_ops: int) -> Callable[[], object]:
        program, out = _program(engine, matrices[0].num_inputs)
        for matrix in matrices[first : first + num_ops]:
            program.embed(matrix, out, 1.0)
        return lambda: program.run(num_rows, token_ids_T=token_ids_T)

    return make


def _matrix_cases(engine: CpuEngine, plan: Plan) -> Iterator[tuple[list[PackedMatrix], str, int]]:
    """Copies of a matrix, the kind of its weights, and the number of rows that meet it."""
    for num_outputs, num_inputs in plan.shapes:
        for weights in plan.weights:
            matrices = _matrices(engine, weights, num_outputs, num_inputs)
            for num_rows in plan.rows:
                yield matrices, weights, num_rows


def _matrices(engine: CpuEngine, weights: str, num_outputs: int, num_inputs: int) -> list[PackedMatrix]:
    """Random weights, in copies that no cache holds together."""
    import torch

    from halfbyte.kernels.cpu.weights import pack_rows

    group, group_bytes = _storage(weights)
    # Bytes of this range make positive normal numbers of moderate size, weights as well as scales, in every format.
    rows_OL = torch.randint(0x20, 0x40, (num_outputs, num_inputs // group * group_bytes), dtype=torch.uint8)
    matrix = pack_rows(engine, WeightKind[weights.upper()], rows_OL, num_inputs)
    return [matrix, *(replace(matrix, data=matrix.data.clone()) for _ in range(1, _num_copies(matrix.nbytes)))]


def norm(engine: CpuEngine, plan: Plan) -> Iterator[Case]:
    """RMS norm of rows that are in the caches: what is left is arithmetic, and handing the work to the threads."""
    for width in dict.fromkeys(num_inputs for _, num_inputs in plan.shapes):
        for num_rows in plan.rows:
            work = Work("norm", str(width), "f32", num_rows, num_bytes=0, num_flops=4 * num_rows * width)
            yield Case(work, MAX_OPS, _norm_runs(engine, num_rows, width))


def _norm_runs(engine: CpuEngine, num_rows: int, width: int) -> MakeRun:
    import torch

    from halfbyte.kernels.cpu.program import INPUT

    x_TE, weight_E = torch.randn(num_rows, width), torch.ones(width)

    def make(first: int, num_ops: int) -> Callable[[], object]:
        program, out = _program(engine, width)
        for _ in range(num_ops):
            program.norm(INPUT, out, weight_E, 1e-5)
        return lambda: program.run(num_rows, input_TE=x_TE)

    return make


def decode(engine: CpuEngine, plan: Plan) -> Iterator[Case]:
    """One token of each request against its context."""
    for batch_size, context in plan.decode:
        yield _attention(engine, plan, "decode", batch_size, context, num_queries=1)


def prefill(engine: CpuEngine, plan: Plan) -> Iterator[Case]:
    """All tokens of each prompt against those before them."""
    for batch_size, context in plan.prefill:
        yield _attention(engine, plan, "prefill", batch_size, context, num_queries=context)


def _attention(engine: CpuEngine, plan: Plan, kernel: str, batch_size: int, context: int, num_queries: int) -> Case:
    """The last `num_queries` tokens of each context. K and V are written, then read: once, whatever the number of queries."""
    import torch

    from halfbyte.kernels.attention.base import AttentionSpec
    from halfbyte.kernels.cpu.program import INPUT, NO_ROTATION

    num_heads, num_kv_heads, head_dim = plan.heads
    spec = AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim, head_dim**-0.5)
    caches, token_bytes = _caches(plan, batch_size, context)
    metadata = _metadata(batch_size, context, num_queries)
    num_tokens = batch_size * num_queries
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)

    def make(first: int, num_ops: int) -> Callable[[], object]:
        program, out = _program(engine, num_heads * head_dim)
        for cache in caches[first : first + num_ops]:
            program.attention(INPUT, out, NO_ROTATION, spec, cache, 0)
        return lambda: program.run(num_tokens, input_TE=qkv, metadata=[metadata])

    num_keys = sum(range(context - num_queries + 1, context + 1))  # a query sees itself and what is before it
    work = Work(
        kernel=kernel,
        shape=f"{batch_size}x{context}",
        storage=plan.kv_cache_dtype,
        num_rows=num_tokens,
        num_bytes=batch_size * context * token_bytes,
        num_flops=4 * batch_size * num_keys * num_heads * head_dim,
    )
    return Case(work, len(caches), make)


def _caches(plan: Plan, batch_size: int, context: int) -> tuple[list[LayerCache], int]:
    """Copies of a layer's cache that is full of random K and V, and the bytes of a token in it."""
    import torch

    from halfbyte.kernels.attention.cpu import CpuBackend
    from halfbyte.kvcache.formats import page_bytes
    from halfbyte.kvcache.spec import KVCacheSpec
    from halfbyte.kvcache.tensors import view_layer

    _, num_kv_heads, head_dim = plan.heads
    spec = KVCacheSpec(num_kv_heads, head_dim, head_dim, BLOCK_SIZE, None, plan.kv_cache_dtype)
    spec = replace(spec, format=CpuBackend().arrange(spec))
    block_bytes = page_bytes(spec)
    num_blocks = 1 + batch_size * -(-context // BLOCK_SIZE)
    pages = torch.empty(_num_copies(num_blocks * block_bytes), num_blocks, block_bytes, dtype=torch.uint8)
    for plane in view_layer(pages[0], spec).planes.values():
        plane.normal_()
    pages[1:] = pages[0]
    return [view_layer(copy, spec) for copy in pages], block_bytes // BLOCK_SIZE


def _metadata(batch_size: int, context: int, num_queries: int) -> AttentionMetadata:
    """Requests of equal lengths, each in blocks of its own; block 0 is nobody's."""
    import torch

    from halfbyte.kernels.attention.base import AttentionMetadata

    blocks_each = -(-context // BLOCK_SIZE)
    block_table = (1 + torch.arange(batch_size * blocks_each, dtype=torch.int32)).view(batch_size, blocks_each)
    positions = torch.arange(context - num_queries, context)
    slots = block_table[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionMetadata(
        query_start_loc=torch.arange(batch_size + 1, dtype=torch.int32) * num_queries,
        seq_lens=torch.full((batch_size,), context, dtype=torch.int32),
        block_table=block_table,
        slot_mapping=slots.flatten(),
        block_size=BLOCK_SIZE,
        query_lens_host=[num_queries] * batch_size,
        seq_lens_host=[context] * batch_size,
        max_query_len=num_queries,
        max_seq_len=context,
        num_decodes=batch_size if num_queries == 1 else 0,
    )


def _num_copies(num_bytes: int) -> int:
    """So many that they fill as much memory as the measurement of the memory's speed reads."""
    from halfbyte.kernels.cpu import limits

    return -(-limits.READ_BYTES // num_bytes)


def _program(engine: CpuEngine, width: int, product_type: RowType = RowType.FLOATS) -> tuple[Program, int]:
    """An empty program, and the buffer into which its operations write."""
    from halfbyte.kernels.cpu.program import Program

    program = Program(engine, product_type)
    return program, program.buffer("out", width)


def limit_s(work: Work, limits: Mapping[str, Any]) -> tuple[float, str]:
    """The least time that the operation can take here, and what bounds it."""
    memory_s = work.num_bytes / limits["read_bytes_per_s"]
    arithmetic_s = work.num_flops / limits["flops_per_s"]
    return max((memory_s, "memory"), (arithmetic_s, "arithmetic"), key=lambda bound: bound[0])


def measure(case: Case, limits: Mapping[str, Any], num_iters: int, clock: Clock = time.perf_counter) -> list[float]:
    """Seconds per operation of each run. Runs go through all copies in turn; each was run once before any of them counts."""
    num_ops = max(1, min(case.num_copies, MAX_OPS, int(RUN_S / limit_s(case.work, limits)[0])))
    firsts = range(0, case.num_copies - num_ops + 1, num_ops)[:num_iters]
    runs = [case.make(first, num_ops) for first in firsts]
    for one_run in runs:
        one_run()
    times_s = []
    for index in range(num_iters):
        started_s = clock()
        runs[index % len(runs)]()
        times_s.append((clock() - started_s) / num_ops)
    return times_s


def describe(work: Work, limits: Mapping[str, Any], times_s: Sequence[float]) -> dict[str, Any]:
    """A row of the result. The speeds and the share of the limit are those of the median time."""
    spread = Spread.of(times_s)
    least_s, bound = limit_s(work, limits)
    return {
        **asdict(work),
        "time_s": asdict(spread),
        "bytes_per_s": work.num_bytes / spread.median,
        "flops_per_s": work.num_flops / spread.median,
        "limit_s": least_s,
        "bound": bound,
        "share_of_limit": least_s / spread.median,
    }


def limit_lines(limits: Mapping[str, Any]) -> Iterator[str]:
    threads = f"{limits['num_threads']} threads ({limits['isa']})"
    yield f"Limits of {threads}, and of one:"
    for name, unit in (("read_bytes_per_s", "GB/s from memory"), ("flops_per_s", "GFLOP/s of float32 multiply-adds")):
        yield f"  {limits[name] / 1e9:8.1f} {limits[name + '_1'] / 1e9:8.1f}  {unit}"


HEADING = (
    f"{'kernel':<10}{'shape':<11}{'storage':<10}{'rows':>5}{'median µs':>11}{'min':>10}{'max':>10}"
    f"{'GB/s':>8}{'GFLOP/s':>9}{'limit':>7}  bound by"
)


def table_line(row: Mapping[str, Any]) -> str:
    time_us = {name: 1e6 * seconds for name, seconds in row["time_s"].items()}
    return (
        f"{row['kernel']:<10}{row['shape']:<11}{row['storage']:<10}{row['num_rows']:>5}"
        f"{time_us['median']:>11.1f}{time_us['min']:>10.1f}{time_us['max']:>10.1f}"
        f"{row['bytes_per_s'] / 1e9:>8.1f}{row['flops_per_s'] / 1e9:>9.1f}{row['share_of_limit']:>7.0%}  {row['bound']}"
    )
