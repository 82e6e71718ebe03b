"""What a kernel's machine code must be like on a target, whatever its baseline is.

Knows facts and targets; which kernel has to meet what, `cases` says. Called by scripts/aot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scripts.gpu.facts import Facts
from scripts.gpu.targets import Target

_WIDE_PRODUCT_ROWS = 64  # from here on Hopper and Blackwell have tensor cores that take their operands out of memory
_WIDE_PRODUCTS = {"sm90": "wgmma", "sm100": "tcgen05", "sm103": "tcgen05"}


@dataclass(frozen=True, slots=True)
class Expect:
    """What is asked of a kernel beside what is asked of each.

    is_exact: every product and sum is rounded, as the law rounds it, and denormals are kept. product_rows: rows of the products
    of matrices in it, 0 without such. has_wide_loads: its loop loads 128 bits at a time, and nothing byte by byte.
    """

    is_exact: bool = False
    product_rows: int = 0
    has_wide_loads: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """kernel: the line of the baseline, "case / kernel"."""

    kernel: str
    target: str
    figure: str
    value: str
    limit: str


def check(kernel: str, target: Target, facts: Facts, expect: Expect) -> Iterator[Failure]:
    def fails(figure: str, value: object, limit: object) -> Failure:
        return Failure(kernel, target.name, figure, str(value), str(limit))

    for name, number in facts.spills.items():
        if number and not _is_harmless(name):
            yield fails(name, number, 0)
    if facts.shared_bytes > target.shared_bytes:
        yield fails("shared bytes", facts.shared_bytes, target.shared_bytes)
    if expect.is_exact and facts.num_fused:
        yield fails("fused multiply-adds", facts.num_fused, 0)
    if expect.is_exact and facts.num_flushed:
        yield fails("instructions that flush denormals", facts.num_flushed, 0)
    if expect.product_rows and (wanted := _wanted_product(target, expect.product_rows)) not in facts.matrix:
        yield fails("products of matrices", ", ".join(facts.matrix) or "none", wanted)
    if expect.has_wide_loads:
        if narrow := facts.loop_loads.get(8):
            yield fails("8-bit loads in the loop", narrow, 0)
        if not facts.loop_loads.get(128):
            found = ", ".join(f"{number} of {bits}" for bits, number in facts.loop_loads.items())
            yield fails("128-bit loads in the loop", found or "none", "some")


def _is_harmless(spill: str) -> bool:
    """A stack, which only instructions make a spill; AMD's scalars: they go to lanes of vector registers, not to memory."""
    return spill in ("stack_bytes", "sgpr_spills")


def _wanted_product(target: Target, rows: int) -> str:
    if target.is_amd:
        return "mfma"
    return _WIDE_PRODUCTS.get(target.name, "mma") if rows >= _WIDE_PRODUCT_ROWS else "mma"
