"""The committed figures of each kernel, and what is compared with them.

A line per kernel of a case: the digest of what was compiled, and for each target registers, instructions, and instructions of the
loop. A kernel whose digest differs is stale: somebody changed it and did not run `scripts/aot --update`. Called by scripts/aot.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts.gpu.facts import Facts
from scripts.gpu.rules import Failure

PATH = Path(__file__).with_name("baseline.json")
MAX_GROWTH = 0.1
FIGURES = ("registers", "instructions", "instructions of the loop")
_DIGEST_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Line:
    """Of one kernel. figures: target -> as `FIGURES` has them."""

    digest: str
    figures: dict[str, list[int]]


@dataclass(slots=True)
class Baseline:
    """triton: the version that compiled it."""

    triton: str
    lines: dict[str, Line] = field(default_factory=dict)

    @classmethod
    def read(cls) -> Baseline | None:
        """The one in the tree, if there is one."""
        return cls.parse(PATH.read_text(encoding="utf-8")) if PATH.exists() else None

    @classmethod
    def parse(cls, text: str) -> Baseline:
        found = json.loads(text)
        lines = {name: Line(line.pop("digest"), line) for name, line in found["kernels"].items()}
        return cls(found["triton"], lines)

    def text(self) -> str:
        """JSON with a line per kernel, sorted, so that a diff names what changed."""
        rows = (
            f"{json.dumps(name)}: {json.dumps({'digest': line.digest, **line.figures})}"
            for name, line in sorted(self.lines.items())
        )
        return f'{{"triton": {json.dumps(self.triton)}, "kernels": {{\n' + ",\n".join(rows) + "\n}}\n"

    def fits(self, version: str) -> bool:
        """Whether figures of this version of triton can be compared: patch releases compile alike."""
        return self.triton.split(".")[:2] == version.split(".")[:2]

    def digest(self, kernel: str) -> str:
        """Empty for a kernel that is not in it."""
        return self.lines[kernel].digest if kernel in self.lines else ""

    def check(self, kernel: str, target: str, facts: Facts) -> Iterator[Failure]:
        """What has grown by more than `MAX_GROWTH`. Of a kernel without a line there is nothing to say: it is stale."""
        if kernel not in self.lines:
            return
        if (known := self.lines[kernel].figures.get(target)) is None:
            yield Failure(kernel, target, "baseline", "missing", "run scripts/aot --update")
            return
        for name, value, before in zip(FIGURES, figures(facts), known, strict=True):
            if value > before * (1 + MAX_GROWTH):
                yield Failure(kernel, target, name, str(value), f"{before} + {MAX_GROWTH:.0%}")


def figures(facts: Facts) -> list[int]:
    return [facts.registers, facts.instructions, facts.loop_instructions]


def line_digest(program_digests: Iterable[str]) -> str:
    """Of a kernel's programs for all targets, in the order of targets."""
    return hashlib.sha256(" ".join(program_digests).encode()).hexdigest()[:_DIGEST_DIGITS]
