"""Compiling the C++ kernels into one shared object: which files, which flags, and where the result may lie.

Standard library only, and it imports nothing of this project: the package build (setup.py) loads it by path. One file is
compiled once per instruction set of the architecture; the library then picks at run time what the machine has.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
LIBRARY_NAME = "libhalfbyte_cpu.so"

# -ffast-math would flush denormals and reorder sums; contraction would fuse multiplications and additions as it likes.
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off", "-pthread", "-Wno-psabi")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *_AVX2)
# The best first. Every name is one in `find` of csrc/api.cpp.
ISA_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx512_bf16": ("-mavx512bf16", "-mavx512vnni", *_AVX512),
        "avx512": _AVX512,
        "avx2": _AVX2,
        "portable": (),
    },
    "aarch64": {"neon_bf16": ("-march=armv8.2-a+fp16+dotprod+bf16+i8mm",), "neon": (), "portable": ("-DHB_PORTABLE",)},
}
COMPILERS = ("g++", "c++")


class BuildError(Exception):
    """The compiler does not get through; one line."""


def find_compiler() -> str | None:
    """The first C++ compiler that is on PATH."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def isa_flags(machine: str) -> dict[str, tuple[str, ...]]:
    """Flags of each instruction set that is built for `machine`, as `platform.machine()` names it; the best set first."""
    return ISA_FLAGS.get({"arm64": "aarch64", "amd64": "x86_64"}.get(machine.lower(), machine), {"portable": ()})


def fingerprint(compiler: str) -> str:
    """Changes with the sources, the flags and the compiler's version: the name of a cached build."""
    digest = hashlib.sha256(repr((FLAGS, isa_flags(platform.machine()), platform.machine())).encode())
    digest.update(_run([compiler, "--version"]).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_library(target: Path, *, compiler: str) -> None:
    """Makes the shared object `target` for this machine. BuildError with the compiler's first complaint."""
    link(target, compiler=compiler, machine=platform.machine(), link_flags=("-shared",))


def link(
    target: Path,
    *,
    compiler: str,
    machine: str,
    flags: tuple[str, ...] = (),
    link_flags: tuple[str, ...] = (),
    program: Path | None = None,
) -> None:
    """Compiles the kernels for `machine` and links `target`, which appears whole or not at all.

    program: a C++ file with a `main` around them. flags: for compiling and linking. Flags of an instruction set win over them.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        jobs = [(SOURCES / "isa.cpp", isa, (*isa_own, f"-DHB_ISA={isa}")) for isa, isa_own in isa_flags(machine).items()]
        jobs += [(SOURCES / f"{name}.cpp", name, ()) for name in ("api", "team")]
        if program is not None:
            jobs.append((program, program.stem, (f"-I{SOURCES}",)))
        objects = [Path(folder, f"{name}.o") for _, name, _ in jobs]
        commands = [
            [compiler, *FLAGS, *flags, *own, "-c", str(source), "-o", str(made)]
            for (source, _, own), made in zip(jobs, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = Path(folder, target.name)
        _run([compiler, "-pthread", *flags, *link_flags, *map(str, objects), "-o", str(linked)])
        linked.replace(target)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise BuildError(f"{command[0]} fails: {next((line for line in lines if 'error' in line), lines[0])[:300]}")
    return done.stdout
