"""The C++ self test of the CPU kernels: on this machine's instruction sets, under sanitizers, and on an emulated aarch64.

`emulated/selftest.cpp` compares programs with loops in double precision, without Python: the same file runs wherever its binary
does. What a tool is missing for is skipped by name; an instruction set that this machine lacks is compiled, and not run.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from halfbyte.kernels.cpu.build import find_compiler, isa_flags, link

PROGRAM = Path(__file__).resolve().parent / "emulated" / "selftest.cpp"
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def compiler() -> str:
    found = find_compiler()
    if found is None:
        pytest.skip("no C++ compiler is installed")
    return found


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("native") / "selftest"
    link(target, compiler=compiler(), machine=platform.machine(), program=PROGRAM)
    return target


@pytest.mark.parametrize("isa", isa_flags(platform.machine()))
def test_kernels_agree_with_plain_loops(isa: str, native: Path) -> None:
    if f"{isa}: does not run here" in subprocess.run([native, isa], capture_output=True, text=True, check=False).stdout:
        pytest.skip(f"this machine has no {isa}: compiled, not run")
    assert run([str(native), isa]) == f"{isa}: tested\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_are_clean_under_sanitizers(tmp_path: Path) -> None:
    """Accesses beyond an allocation, undefined arithmetic. The arrays of the self test are as long as what they hold."""
    target = tmp_path / "selftest"
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1", "-O1")
    link(target, compiler=compiler(), machine=platform.machine(), program=PROGRAM, flags=flags)
    assert ": tested\n" in run([str(target)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_of_aarch64_in_an_emulator(tmp_path: Path) -> None:
    missing = [name for name in (CROSS_COMPILER, EMULATOR) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: NEON is compiled and run nowhere here")
    target = tmp_path / "selftest"
    link(target, compiler=CROSS_COMPILER, machine="aarch64", program=PROGRAM, link_flags=("-static",))
    names = list(isa_flags("aarch64"))
    assert run([EMULATOR, "-cpu", "max", str(target), *names]) == "".join(f"{name}: tested\n" for name in names)
