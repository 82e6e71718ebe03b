"""How the facts of many kernels are told: failures for a terminal, and the whole matrix as Markdown.

Knows facts and targets; called by scripts/aot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date

from scripts.gpu.exceptions import EXCUSES
from scripts.gpu.facts import Facts
from scripts.gpu.rules import Failure
from scripts.gpu.targets import TARGETS, occupancy

Results = Mapping[str, Mapping[str, Facts]]  # kernel ("case / kernel") -> target -> facts

_HEAD = """\
# Kernels on eleven GPUs, without a GPU

<!-- Written by `scripts/aot --table`. -->

Every Triton kernel, compiled by Triton {version} on {day} for each target; its machine code was read, and nothing ran. A cell is
registers per lane · shared KiB · instructions · instructions of the loop · occupancy. The loop is the innermost one with products
of matrices, else with loads ("-" without such). Occupancy is the share of a multiprocessor's warps (AMD: a compute unit's waves)
that registers, shared memory and the number of warps allow. Kernels of one name with different arguments are numbered.
"""


def failures_text(failures: Sequence[Failure]) -> str:
    """A table, column by column as wide as it must be."""
    rows = [("kernel", "target", "figure", "value", "limit")]
    rows += [(one.kernel, one.target, one.figure, one.value, one.limit) for one in failures]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows)


def table(results: Results, version: str) -> str:
    families: dict[str, list[str]] = {}
    for kernel in results:
        families.setdefault(kernel.split()[0], []).append(kernel)
    parts = [_HEAD.format(version=version, day=date.today().isoformat())]
    for family, kernels in families.items():
        parts.append(f"## {family}\n")
        parts.append(f"| kernel | {' | '.join(TARGETS)} |\n|---|{'---|' * len(TARGETS)}")
        parts += [_row(kernel, results[kernel]) for kernel in kernels]
        parts.append("")
    parts.append("## Let pass\n\nWhat breaks a rule of `scripts/gpu/rules.py`, up to what was measured.\n")
    parts.append("| kernels | targets | what | up to | because |\n|---|---|---|---:|---|")
    parts += [f"| `{one.kernels}` | {', '.join(one.targets)} | `{one.figure}` | {one.most} | {one.because} |" for one in EXCUSES]
    return "\n".join(parts) + "\n"


def _row(kernel: str, by_target: Mapping[str, Facts]) -> str:
    cells = [_cell(name, by_target[name]) if name in by_target else "" for name in TARGETS]
    return f"| {kernel.partition(' ')[2]} | {' | '.join(cells)} |"


def _cell(name: str, facts: Facts) -> str:
    share = occupancy(TARGETS[name], facts.registers, facts.shared_bytes, facts.num_warps, facts.tensor_columns)
    loop = facts.loop_instructions or "-"
    return f"{facts.registers} · {facts.shared_bytes / 1024:.3g} · {facts.instructions} · {loop} · {share:.0%}"
