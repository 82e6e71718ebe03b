"""The machine's limits, and `halfbyte bench kernels` on real kernels of a few numbers: that it runs, never how fast."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.entrypoints.bench import kernels
from halfbyte.entrypoints.bench.kernels import KERNEL_NAMES, KV_FORMATS, WEIGHTS, Plan, describe, measure
from halfbyte.kernels.cpu import limits
from halfbyte.kernels.cpu.library import CpuEngine, KernelsMissing, instruction_sets

try:
    ISAS = instruction_sets()
except KernelsMissing as reason:
    pytest.skip(str(reason), allow_module_level=True)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "READ_BYTES", 64 << 20)
        return limits.measure(2)


def test_limits_are_plain_positive_numbers(measured: dict[str, Any]) -> None:
    speeds = {name: measured[f"{name}{ending}"] for name in ("read_bytes_per_s", "flops_per_s") for ending in ("", "_1")}
    assert all(type(speed) is float and speed > 0 for speed in speeds.values())
    assert (measured["isa"], measured["num_threads"]) == (ISAS[0], 2)


def test_more_threads_are_not_far_slower(measured: dict[str, Any]) -> None:
    """Half of one thread's speed would mean that the threads stand in each other's way; a busy machine alone does not do that."""
    for name in ("read_bytes_per_s", "flops_per_s"):
        assert measured[name] >= 0.5 * measured[f"{name}_1"]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_every_kernel_runs(kernel: str, isa: str, measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "MAX_OPS", 8)
    plan = Plan(weights=WEIGHTS, rows=(1, 5), shapes=((40, 256),), decode=((2, 19),), prefill=((2, 19),))
    engine = CpuEngine(2, isa)
    try:
        rows = [describe(case.work, measured, measure(case, measured, 2)) for case in kernels.cases(kernel, engine, plan)]
    finally:
        engine.close()
    assert len(rows) == {"linear": 24, "embedding": 24, "norm": 2, "decode": 1, "prefill": 1}[kernel]
    assert all(0 < row["time_s"]["min"] <= row["time_s"]["median"] <= row["time_s"]["max"] for row in rows)
    assert all(row["num_flops"] > 0 and row["share_of_limit"] > 0 for row in rows)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_what_attention_has_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 16)
    plan = Plan(kv_cache_dtype=name, heads=(4, 2, 8), decode=((3, 20),), prefill=((3, 4),))
    engine = CpuEngine(1)
    try:
        [decode] = kernels.cases("decode", engine, plan)
        [prefill] = kernels.cases("prefill", engine, plan)
    finally:
        engine.close()
    item_bytes = 4 if name == "float32" else 2
    assert (decode.work.num_rows, decode.work.num_bytes) == (3, 3 * 20 * 2 * 2 * 8 * item_bytes)
    assert decode.work.num_flops == 3 * 20 * 4 * 4 * 8
    assert (prefill.work.num_rows, prefill.work.num_flops) == (12, 3 * (1 + 2 + 3 + 4) * 4 * 4 * 8)


def test_copies_fill_the_memory_that_the_limit_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 10 * 32 * 16 * 4)
    engine = CpuEngine(1, "portable")
    try:
        [case] = kernels.cases("linear", engine, Plan(weights=("f32",), rows=(3,), shapes=((32, 16),)))
    finally:
        engine.close()
    assert case.num_copies == 10
    assert (case.work.num_bytes, case.work.num_flops) == (32 * 16 * 4, 2 * 3 * 32 * 16)
