"""The compiled kernels: found beside this file (a wheel), else in the cache folder, else compiled into it if there is a compiler.

Knows files and compilers, nothing of models. `load` is called once per process; why there are no kernels is a sentence that the
user gets to see. `CpuEngine` is one team of threads on one instruction set.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path

from halfbyte.kernels.cpu.abi import declare
from halfbyte.kernels.cpu.build import LIBRARY_NAME, BuildError, compile_library, find_compiler, fingerprint, isa_flags
from halfbyte.platform import cache_folder

log = logging.getLogger(__name__)

# Builds of other sources or compilers that stay in the cache: those of two checkouts in turn need not be made again and again.
_NUM_KEPT_BUILDS = 4
_PACKAGED = Path(__file__).resolve().parent / LIBRARY_NAME


class KernelsMissing(Exception):
    """There are no compiled kernels here; the message says why."""


@cache
def load() -> ctypes.CDLL:
    """The library, with typed functions. KernelsMissing when it can be neither found nor compiled."""
    try:
        return _open(_PACKAGED) if _PACKAGED.exists() else _compiled()
    except BuildError as error:
        raise KernelsMissing(f"the CPU kernels do not compile: {error}") from None
    except OSError as error:
        raise KernelsMissing(f"the compiled CPU kernels cannot be used: {error}") from None


def _open(path: Path) -> ctypes.CDLL:
    return declare(ctypes.CDLL(str(path)))


def _compiled() -> ctypes.CDLL:
    """The library of the cache folder, compiled now if it is not there whole. Processes that do so at once do not meet."""
    compiler = find_compiler()
    if compiler is None:
        raise KernelsMissing("no C++ compiler is installed (g++ 12 or newer), and the package was built without one")
    builds = cache_folder() / "kernels"
    target = builds / fingerprint(compiler) / LIBRARY_NAME
    if _is_whole(target):
        return _open(target)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="halfbyte-kernels-") as scratch:
        made = Path(scratch, LIBRARY_NAME)
        compile_library(made, compiler=compiler)
        _seal(made)
        try:
            _store(made, target)
            _remove_old(builds)
        except OSError as error:
            log.warning(
                "the CPU kernels were compiled for this start only, %s cannot be written: %s", builds, error.strerror or error
            )
            target = made
        log.info("compiled the CPU kernels into %s in %.1f s", target, time.monotonic() - started_s)
        return _open(target)  # what is loaded stays, even when its file goes


def _store(made: Path, target: Path) -> None:
    """A copy of `made` appears at `target`, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as copy:
        copy.write(made.read_bytes())
    os.replace(copy.name, target)


def _seal(path: Path) -> None:
    """Appends the file's own digest, which loaders ignore: a file that was cut or changed later must not be mapped as code."""
    with path.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
        os.utime(path.parent)  # used now, see `_remove_old`
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return len(content) > size and hashlib.sha256(content[:-size]).digest() == content[-size:]


def _remove_old(builds: Path) -> None:
    """All builds but those that were used last."""
    folders = sorted((path for path in builds.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in folders[_NUM_KEPT_BUILDS:]:
        shutil.rmtree(folder, ignore_errors=True)


def instruction_sets() -> list[str]:
    """Those that the library has and this machine runs, the best first."""
    library = load()
    return [name for name in isa_flags(platform.machine()) if library.hb_runs_here(name.encode())]


class CpuEngine:
    """`num_threads` threads (the caller is one of them) with one instruction set. Not to be used by two callers at a time.

    panel: outputs per panel of a packed weight. slice_rows: tokens that go through a program at a time.
    """

    def __init__(self, num_threads: int, isa: str | None = None) -> None:
        self.library = load()
        self.isa = isa or instruction_sets()[0]
        assert self.isa in instruction_sets(), f"{self.isa} is not one that runs here"
        self.num_threads = num_threads
        self.panel: int = self.library.hb_panel(self.isa.encode())
        self.slice_rows: int = self.library.hb_slice_rows()
        self.handle: int | None = self.library.hb_engine_new(self.isa.encode(), num_threads)

    def close(self) -> None:
        """End the threads."""
        if self.handle is not None:
            self.library.hb_engine_free(self.handle)
            self.handle = None

    def __del__(self) -> None:
        self.close()
