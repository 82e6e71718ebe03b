"""All kernels of all cases on all targets: which there are, and getting those compiled of which no listing is kept.

Knows cases and the compiler, no rules. Called by scripts/aot, whose workers run `_work`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context

import torch
from tqdm import tqdm

from halfbyte.platform import platform_named
from scripts.gpu import compiler
from scripts.gpu.baseline import line_digest
from scripts.gpu.cases import Case, all_cases
from scripts.gpu.compiler import Program
from scripts.gpu.rules import Expect
from scripts.gpu.targets import TARGETS


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a case: a line of the baseline. programs: target -> what is compiled for it."""

    case: Case
    name: str
    programs: dict[str, Program] = field(default_factory=dict)

    @property
    def line(self) -> str:
        return f"{self.case.name} / {self.name}"

    @property
    def digest(self) -> str:
        return line_digest(program.digest for program in self.programs.values())

    @property
    def expect(self) -> Expect:
        return self.case.expects.get(self.name.partition("#")[0], Expect())


def plan(cases: Iterable[Case]) -> list[Kernel]:
    """Their kernels, for all targets; nothing is compiled."""
    kernels: dict[str, Kernel] = {}
    for case in cases:
        for target in TARGETS:
            for program in _programs(case, target):
                kernel = Kernel(case, program.name)
                kernels.setdefault(kernel.line, kernel).programs[target] = program
    return list(kernels.values())


def _programs(case: Case, target: str) -> list[Program]:
    platform = platform_named(target)
    try:
        return compiler.programs(lambda: case.launch(platform), target)
    except Exception as error:
        error.add_note(f"in the case {case.name!r} on {target}")
        raise


def compile_missing(
    kernels: Iterable[Kernel], targets: Collection[str], num_workers: int
) -> tuple[int, dict[tuple[str, str], str]]:
    """How many programs were compiled, and what went wrong: (line, target) -> message."""
    missing = [
        (kernel, target)
        for kernel in kernels
        for target, program in kernel.programs.items()
        if target in targets and not program.path.exists()
    ]
    jobs = sorted({(kernel.case.name, target) for kernel, target in missing})
    wanted = {(kernel.line, target) for kernel, target in missing}
    failed: dict[tuple[str, str], str] = {}
    for errors in _run(jobs, min(num_workers, len(jobs))):
        failed |= {key: message for key, message in errors.items() if key in wanted}
    return len(wanted) - len(failed), failed


def _run(jobs: list[tuple[str, str]], num_workers: int) -> Iterator[dict[tuple[str, str], str]]:
    with tqdm(total=len(jobs), desc="compiling", unit="case", disable=None) as bar:
        if num_workers <= 1:
            for job in jobs:
                yield _work(job)
                bar.update()
            return
        with ProcessPoolExecutor(num_workers, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for errors in pool.map(_work, jobs):
                yield errors
                bar.update()


@cache
def _cases() -> dict[str, Case]:
    return all_cases()


def _work(job: tuple[str, str]) -> dict[tuple[str, str], str]:
    """Compiles what a case launches on a target; returns what cannot be compiled."""
    name, target = job
    errors: dict[tuple[str, str], str] = {}
    for program in _programs(_cases()[name], target):
        try:
            compiler.ensure_listing(program)
        except Exception as error:  # of many kinds: Triton's front end, its passes, the assemblers
            errors[f"{name} / {program.name}", target] = _reason(error)
    return errors


def _reason(error: BaseException) -> str:
    """The last line of what it began with: Triton tells the whole way of calls down to it."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[-1]}"[:200]
