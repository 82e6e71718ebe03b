"""What this machine grants to this process: the device, how many threads, how much memory, which instructions, a cache folder.

Knows Linux's files (/proc, cgroup v1 and v2) and nothing of models. A container's quota counts, not the host's size: a host
with 64 cores that grants 4 answers 4. torch is imported only when a GPU is asked for or its device file is there. Called by
`halfbyte.engine.build` and `halfbyte collect-env`; `platform_named` stands in for machines that are not here, in
`halfbyte support` and `halfbyte kv-plan`.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from platform import machine
from typing import Literal

from halfbyte.errors import UserError

Device = Literal["cpu", "cuda", "rocm"]
DEVICES = ("auto", "cpu", "cuda", "rocm")

# Instruction sets that a kernel may choose by, in the words of /proc/cpuinfo; others are not worth a line.
_ISA_OF_INTEREST = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "svebf16"),
)
_BF16_ISA = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
_MIN_CUDA_BF16 = (8, 0)

# The platforms that can be asked about by name: the CPU, CUDA's compute capabilities, ROCm's architectures.
_CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
_GFX = ("gfx90a", "gfx942", "gfx950")
PLATFORM_NAMES = ("cpu", *(f"sm{major}{minor}" for major, minor in _CAPABILITIES), *_GFX)

_ROOT = Path("/")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Platform:
    """One device and what may be used of it.

    num_threads: cores granted, the smaller of CPU affinity and cgroup quota (rounded down), at least 1.
    memory_limit_bytes: of the memory that holds weights and KV: the host's or the cgroup's limit, or the GPU's own.
    isa: instruction sets of the CPU. capability: CUDA's (major, minor), None elsewhere. gfx: ROCm's architecture, "" elsewhere.
    """

    device: Device
    name: str
    num_threads: int
    memory_limit_bytes: int
    isa: tuple[str, ...] = ()
    native_bf16: bool = False
    capability: tuple[int, int] | None = None
    gfx: str = ""

    @property
    def architecture(self) -> str:
        """What kernels are made for: "sm90", "gfx942", "cpu" (of `PLATFORM_NAMES`, or alike)."""
        return f"sm{self.capability[0]}{self.capability[1]}" if self.capability else self.gfx or self.device

    def __str__(self) -> str:
        kind = self.device if self.architecture == self.device else f"{self.device} {self.architecture}"
        return f"{kind}, {self.name}, {self.num_threads} threads, {self.memory_limit_bytes / 2**30:.1f} GiB"


def detect_platform(device: str = "auto", *, root: Path = _ROOT) -> Platform:
    """The platform that `device` names; "auto" takes a GPU that torch can use, else the CPU.

    root: where /proc, /sys and /dev lie. UserError when `device` is unknown or not usable here.
    """
    if device not in DEVICES:
        raise UserError(f"device must be one of {', '.join(DEVICES)}, got {device!r}", param="device")
    if device == "cpu":
        return _cpu(root)
    device_file = _gpu_device_file(root)
    if device == "auto" and device_file is None:
        return _cpu(root)
    gpu = _gpu(root)
    if device == "auto":
        if gpu is None:
            log.warning("%s is present, but this build of torch cannot use it: running on the CPU", device_file)
        return gpu or _cpu(root)
    if gpu is None or gpu.device != device:
        found = gpu.device if gpu else "none"
        raise UserError(f"device {device} is not usable: torch finds {found}; use --device auto or cpu", param="device")
    return gpu


def platform_named(name: str) -> Platform:
    """A platform of `PLATFORM_NAMES` as described, not as found: one thread, and memory of no known size (0)."""
    if name not in PLATFORM_NAMES:
        raise UserError(f"--platform must be one of {', '.join(PLATFORM_NAMES)}, got {name!r}", param="platform")
    capability = next(((major, minor) for major, minor in _CAPABILITIES if name == f"sm{major}{minor}"), None)
    return Platform(
        device="cpu" if name == "cpu" else "rocm" if capability is None else "cuda",
        name=name,
        num_threads=1,
        memory_limit_bytes=0,
        native_bf16=True,
        capability=capability,
        gfx=name if name in _GFX else "",
    )


def available_memory_bytes(platform: Platform, *, root: Path = _ROOT) -> int:
    """Bytes free now for weights and KV: on a CPU what both the host and each cgroup above us can still give."""
    if platform.device != "cpu":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    free = [_meminfo(root).get("MemAvailable", platform.memory_limit_bytes)]
    free += [limit - in_use for limit, in_use in _memory_cgroups(root)]
    return max(0, min(free))


def cache_folder() -> Path:
    """Where Halfbyte keeps what it can make again: $XDG_CACHE_HOME/halfbyte, or ~/.cache/halfbyte."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "halfbyte"


def granted_threads() -> int:
    """Cores granted to this process, see `Platform.num_threads`."""
    return _num_threads(_ROOT)


def huge_pages(num_bytes: int) -> mmap.mmap:
    """Zeroed memory for which the system is asked for huge pages; where it gives none, it is memory all the same.

    The system zeroes a page when it is first touched: 2 MiB at a time instead of 4 KiB, which makes first use many times cheaper.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def trim_heap() -> None:
    """Give what was freed back to the system, where the C library keeps it (glibc does)."""
    import ctypes

    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _cpu(root: Path) -> Platform:
    name, isa = _cpuinfo(root)
    return Platform(
        device="cpu",
        name=name,
        num_threads=_num_threads(root),
        memory_limit_bytes=_host_memory_limit_bytes(root),
        isa=isa,
        native_bf16=bool(_BF16_ISA & set(isa)),
    )


def _gpu_device_file(root: Path) -> Path | None:
    """The device file of an NVIDIA or AMD GPU, if there is one: cheaper to ask than torch."""
    candidates = [*sorted((root / "dev").glob("nvidia[0-9]*")), root / "dev/nvidiactl", root / "dev/dxg", root / "dev/kfd"]
    return next((path for path in candidates if path.exists()), None)


def _gpu(root: Path) -> Platform | None:
    """The first GPU that torch can use, or None."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    is_rocm = torch.version.hip is not None
    capability = None if is_rocm else (properties.major, properties.minor)
    return Platform(
        device="rocm" if is_rocm else "cuda",
        name=str(properties.name),
        num_threads=_num_threads(root),
        memory_limit_bytes=int(properties.total_memory),
        isa=_cpuinfo(root)[1],
        native_bf16=capability is None or capability >= _MIN_CUDA_BF16,
        capability=capability,
        gfx=getattr(properties, "gcnArchName", "").partition(":")[0] if is_rocm else "",
    )


def _num_threads(root: Path) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = min(_cpu_quotas(root), default=float(cores))
    return max(1, min(cores, int(quota)))


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Cores that each cgroup above this process grants, where it limits them."""
    for folder in _cgroup_folders(root, "cpu"):
        quota, period = _words(folder / "cpu.max"), 100_000
        if not quota:
            quota = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if not quota or quota[0] in ("max", "-1"):
            continue
        period = int(quota[1]) if len(quota) > 1 else period
        yield int(quota[0]) / period


def _memory_cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of each cgroup above this process that has a limit."""
    for folder in _cgroup_folders(root, "memory"):
        limits = _numbers(folder, "memory.max", "memory.high", "memory.limit_in_bytes")
        if not limits:
            continue
        in_use = max(_numbers(folder, "memory.current", "memory.usage_in_bytes"), default=0)
        stat = _table(folder / "memory.stat")
        reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        yield min(limits), max(0, in_use - reclaimable)


def _host_memory_limit_bytes(root: Path) -> int:
    total = _meminfo(root).get("MemTotal")
    if total is None:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(limit for limit, _ in _memory_cgroups(root))])


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders that may limit this process, innermost first: its own cgroup and all above, in v2 and in v1.

    /proc/self/cgroup may name the host's path while only our part of the tree is mounted: folders that are missing are
    skipped, and the mount's top is always looked at.
    """
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if not controllers:
            tops = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            tops = [mount / controller, mount / controllers]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for top in tops:
            for depth in range(len(parts), -1, -1):
                folder = top.joinpath(*parts[:depth])
                if folder.is_dir():
                    yield folder


def _cpuinfo(root: Path) -> tuple[str, tuple[str, ...]]:
    """The CPU's name and the instruction sets of interest. All cores are taken to be alike."""
    name, flags = "", set[str]()
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name" and not name:
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    return name or machine() or "unknown CPU", tuple(isa for isa in _ISA_OF_INTEREST if isa in flags)


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    return {key.rstrip(":"): kib * 1024 for key, kib in _table(root / "proc/meminfo").items()}


def _table(path: Path) -> dict[str, int]:
    """A file of "name number" lines; other lines are skipped."""
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _numbers(folder: Path, *names: str) -> list[int]:
    """The first words of those files that exist and hold a number ("max" does not)."""
    first_words = (words[0] for name in names if (words := _words(folder / name)))
    return [int(word) for word in first_words if word.isdigit()]


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    """A small file's lines; none when it is missing or may not be read: then it limits nothing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
