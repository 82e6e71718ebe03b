"""Where the compiled kernels come from: the package, the cache folder, the compiler, or nowhere, with a reason."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte.kernels.cpu import build, library
from halfbyte.kernels.cpu.abi import declare
from halfbyte.kernels.cpu.build import LIBRARY_NAME, BuildError, find_compiler, fingerprint, isa_flags, link
from halfbyte.kernels.cpu.library import KernelsMissing


class Compiler:
    """Stands in for `compile_library`: copies a library that was compiled once. calls: the targets asked for."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.calls: list[Path] = []

    def __call__(self, target: Path, *, compiler: str) -> None:
        self.calls.append(target)
        target.write_bytes(self.content)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The shared object of these sources, without optimisation: seconds less, and nothing is computed with it."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    target = tmp_path_factory.mktemp("compiled") / LIBRARY_NAME
    link(target, compiler=compiler, machine=os.uname().machine, flags=("-O0",), link_flags=("-shared",))
    return target.read_bytes()


@pytest.fixture
def compiler(compiled: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    """An empty cache folder, no library in the package, and a compiler that takes no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "_PACKAGED", tmp_path / "package" / LIBRARY_NAME)
    fake = Compiler(compiled)
    monkeypatch.setattr(library, "compile_library", fake)
    return fake


def load() -> ctypes.CDLL:
    return library.load.__wrapped__()


def cached() -> Path:
    compiler = find_compiler()
    assert compiler is not None
    return library.cache_folder() / "kernels" / fingerprint(compiler) / LIBRARY_NAME


def missing() -> str:
    with pytest.raises(KernelsMissing) as caught:
        load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_second_start_compiles_nothing(compiler: Compiler) -> None:
    assert load().hb_slice_rows() > 0
    assert [path.name for path in cached().parent.iterdir()] == [LIBRARY_NAME]
    assert load().hb_slice_rows() > 0
    assert len(compiler.calls) == 1 and not compiler.calls[0].exists()


@pytest.mark.parametrize(
    "spoil",
    [lambda content: content[: len(content) // 2], lambda content: b"", lambda content: content[:-40] + b"x" + content[-39:]],
)
def test_a_spoilt_library_is_compiled_again(compiler: Compiler, spoil: Callable[[bytes], bytes]) -> None:
    load()
    spoilt = spoil(cached().read_bytes())
    cached().unlink()  # the file that this process has mapped is left alone
    cached().write_bytes(spoilt)
    assert load().hb_slice_rows() > 0
    load()
    assert len(compiler.calls) == 2


def test_processes_that_compile_at_once_do_not_meet(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find nothing, both compile; each loads a whole library, and one is left in the cache."""
    both = threading.Barrier(2, timeout=60)

    def compile_together(target: Path, *, compiler: str) -> None:
        fake(target, compiler=compiler)
        both.wait()

    fake = compiler
    monkeypatch.setattr(library, "compile_library", compile_together)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(load().hb_slice_rows())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and len(fake.calls) == 2
    assert [path.name for path in cached().parent.iterdir()] == [LIBRARY_NAME]


def test_a_cache_that_cannot_be_written_costs_a_warning(
    compiler: Compiler, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert load().hb_slice_rows() > 0
    [record] = caplog.records
    assert "cannot be written" in record.getMessage() and "\n" not in record.getMessage()


def test_builds_that_were_not_used_for_long_are_removed(compiler: Compiler) -> None:
    builds = cached().parents[1]
    for age in range(6):
        (builds / f"old{age}").mkdir(parents=True)
        os.utime(builds / f"old{age}", (1000 - age, 1000 - age))
    load()
    assert {path.name for path in builds.iterdir()} == {cached().parent.name, "old0", "old1", "old2"}


def test_without_a_compiler_the_reason_is_one_line(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_compiler", lambda: None)
    assert "no C++ compiler" in missing()


def test_a_compiler_that_fails_is_quoted(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(target: Path, *, compiler: str) -> None:
        raise BuildError("g++ fails: isa.cpp:1: error: no such header")

    monkeypatch.setattr(library, "compile_library", fail)
    assert missing() == "the CPU kernels do not compile: g++ fails: isa.cpp:1: error: no such header"


def test_the_library_of_the_package_comes_first(compiler: Compiler) -> None:
    library._PACKAGED.parent.mkdir()
    library._PACKAGED.write_bytes(compiler.content)
    assert load().hb_slice_rows() > 0
    assert not compiler.calls


def test_a_spoilt_library_of_the_package_is_named(compiler: Compiler) -> None:
    library._PACKAGED.parent.mkdir()
    library._PACKAGED.write_bytes(b"no library")
    assert str(library._PACKAGED) in missing()


def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    """Something that has none of the functions."""
    done = subprocess.run(
        [sys.executable, "-c", "import _ctypes; print(_ctypes.__file__)"], capture_output=True, text=True, check=True
    )
    with pytest.raises(OSError, match="has no hb_"):
        declare(ctypes.CDLL(done.stdout.strip()))


def test_a_real_compiler_that_fails_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho 'x.cpp:1: note: see' >&2\necho 'x.cpp:2: error: bad' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(BuildError, match=r"^\S+/c\+\+ fails: x\.cpp:2: error: bad$"):
        build.compile_library(tmp_path / "made" / LIBRARY_NAME, compiler=str(script))
    assert not list((tmp_path / "made").iterdir())


def test_the_fingerprint_changes_with_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    (tmp_path / "a.h").write_text("1")
    one = fingerprint(sys.executable)
    (tmp_path / "a.h").write_text("2")
    assert fingerprint(sys.executable) != one
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert len({one, fingerprint(sys.executable)}) == 2


def test_instruction_sets_of_each_architecture() -> None:
    assert list(isa_flags("x86_64")) == ["avx512_bf16", "avx512", "avx2", "portable"]
    assert list(isa_flags("aarch64")) == list(isa_flags("arm64")) == ["neon_bf16", "neon", "portable"]
    assert list(isa_flags("riscv64")) == ["portable"]
    flags = {flag for machine in build.ISA_FLAGS.values() for own in machine.values() for flag in own} | set(build.FLAGS)
    assert not flags & {"-ffast-math", "-Ofast", "-march=native"}
