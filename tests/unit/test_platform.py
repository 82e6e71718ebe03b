"""Platform detection against made-up /proc and cgroup trees: a container's grant counts, not the host's size."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.errors import UserError
from halfbyte.platform import Platform, available_memory_bytes, detect_platform

GIB = 2**30
X86 = "processor\t: 0\nmodel name\t: Made-up CPU 9000\nflags\t\t: fpu sse4_2 avx2 fma avx512f {}\n\nprocessor\t: 1\n"
V2 = "sys/fs/cgroup"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


class Machine:
    """A folder that looks like a machine's root. 16 GiB, 10 GiB of it available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "proc/meminfo", f"MemTotal: {16 * 2**20} kB\nMemFree: 1 kB\nMemAvailable:   {10 * 2**20} kB\nHugePages_Total: 0\n"
        )
        self.write("proc/cpuinfo", X86.format(""))
        self.write("proc/self/cgroup", "0::/\n")

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def v1(self, path: str = "/docker/abc") -> None:
        self.write("proc/self/cgroup", f"12:memory:{path}\n4:cpu,cpuacct:{path}\n1:name=systemd:{path}\n0::/\n")

    def cpu(self) -> Platform:
        return detect_platform("cpu", root=self.root)

    def available(self) -> int:
        return available_memory_bytes(self.cpu(), root=self.root)


@pytest.fixture
def host(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_limits_the_host_counts(host: Machine) -> None:
    cpu = host.cpu()
    assert (cpu.device, cpu.name, cpu.num_threads, cpu.capability) == ("cpu", "Made-up CPU 9000", 8, None)
    assert cpu.memory_limit_bytes == 16 * GIB
    assert host.available() == 10 * GIB


@pytest.mark.parametrize(
    ("cpu_max", "threads"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("1600000 100000", 8),
        ("40000 10000", 4),
        ("300000", 3),
    ],
)
def test_threads_from_a_v2_quota(host: Machine, cpu_max: str, threads: int) -> None:
    host.write(f"{V2}/cpu.max", cpu_max + "\n")
    assert host.cpu().num_threads == threads


@pytest.mark.parametrize(("quota", "period", "threads"), [("-1", "100000", 8), ("200000", "100000", 2), ("150000", "50000", 3)])
def test_threads_from_a_v1_quota(host: Machine, quota: str, period: str, threads: int) -> None:
    host.v1()
    for folder in ("cpu", "cpu,cpuacct"):
        host.write(f"{V2}/{folder}/docker/abc/cpu.cfs_quota_us", quota)
        host.write(f"{V2}/{folder}/docker/abc/cpu.cfs_period_us", period)
    assert host.cpu().num_threads == threads


def test_affinity_below_the_quota_counts(host: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    host.write(f"{V2}/cpu.max", "400000 100000")
    assert host.cpu().num_threads == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity on this system")
def test_real_affinity_is_read() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from halfbyte.platform import detect_platform; print(detect_platform('cpu').num_threads)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


@pytest.mark.parametrize("outer_is_tighter", [True, False])
def test_the_tightest_cgroup_above_us_counts(host: Machine, outer_is_tighter: bool) -> None:
    host.write("proc/self/cgroup", "0::/pod/container\n")
    outer, inner = ("2", "4") if outer_is_tighter else ("4", "2")
    host.write(f"{V2}/pod/cpu.max", f"{outer}00000 100000")
    host.write(f"{V2}/pod/container/cpu.max", f"{inner}00000 100000")
    host.write(f"{V2}/pod/memory.max", str(int(outer) * GIB))
    host.write(f"{V2}/pod/container/memory.max", str(int(inner) * GIB))
    assert host.cpu().num_threads == 2
    assert host.cpu().memory_limit_bytes == 2 * GIB


def test_host_path_that_is_not_mounted_falls_back_to_the_mount(host: Machine) -> None:
    host.v1("/kubepods/burstable/pod1")
    host.write(f"{V2}/memory/memory.limit_in_bytes", str(2 * GIB))
    host.write(f"{V2}/memory/memory.usage_in_bytes", str(GIB))
    assert host.cpu().memory_limit_bytes == 2 * GIB
    assert host.available() == GIB


def test_hybrid_hierarchy(host: Machine) -> None:
    host.write("proc/self/cgroup", "0::/../box\n")
    host.write(f"{V2}/unified/box/cpu.max", "300000 100000")
    assert host.cpu().num_threads == 3


def test_v2_memory_counts_what_cannot_be_reclaimed(host: Machine) -> None:
    host.write(f"{V2}/memory.max", str(2 * GIB))
    host.write(f"{V2}/memory.current", str(3 * GIB // 2))
    host.write(f"{V2}/memory.stat", f"anon {GIB}\ninactive_file {GIB // 4}\nactive_file 17\n")
    assert host.cpu().memory_limit_bytes == 2 * GIB
    assert host.available() == 2 * GIB - (3 * GIB // 2 - GIB // 4)


def test_v1_memory(host: Machine) -> None:
    host.v1()
    folder = f"{V2}/memory/docker/abc"
    host.write(f"{folder}/memory.limit_in_bytes", str(4 * GIB))
    host.write(f"{folder}/memory.usage_in_bytes", str(2 * GIB))
    host.write(f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB}\n")
    host.write(f"{V2}/memory/memory.limit_in_bytes", "9223372036854771712")
    assert host.cpu().memory_limit_bytes == 4 * GIB
    assert host.available() == 3 * GIB


def test_soft_limit_counts_too(host: Machine) -> None:
    host.write(f"{V2}/memory.max", "max")
    host.write(f"{V2}/memory.high", str(GIB))
    host.write(f"{V2}/memory.current", "0")
    assert host.cpu().memory_limit_bytes == GIB
    assert host.available() == GIB


def test_available_is_never_negative_nor_above_the_host(host: Machine) -> None:
    host.write(f"{V2}/memory.max", str(GIB))
    host.write(f"{V2}/memory.current", str(2 * GIB))
    assert host.available() == 0
    host.write(f"{V2}/memory.max", str(100 * GIB))
    assert host.available() == 10 * GIB


@pytest.mark.parametrize(("flag", "native"), [("", False), ("avx512_bf16", True), ("amx_bf16", True)])
def test_bf16_on_x86(host: Machine, flag: str, native: bool) -> None:
    host.write("proc/cpuinfo", X86.format(flag))
    cpu = host.cpu()
    assert cpu.native_bf16 is native
    assert set(cpu.isa) == {"sse4_2", "avx2", "fma", "avx512f"} | ({flag} if flag else set())


def test_bf16_on_arm(host: Machine) -> None:
    host.write("proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm bf16\nCPU implementer\t: 0x41\n")
    assert host.cpu().native_bf16
    assert host.cpu().isa == ("asimd", "asimddp", "i8mm", "bf16")


def test_empty_root_still_answers(tmp_path: Path) -> None:
    cpu = detect_platform("auto", root=tmp_path)
    assert cpu.device == "cpu" and cpu.num_threads == 8 and cpu.memory_limit_bytes > 0 and cpu.name
    assert 0 <= available_memory_bytes(cpu, root=tmp_path) <= cpu.memory_limit_bytes


def test_unknown_device_names_what_is_possible() -> None:
    with pytest.raises(UserError, match="device must be one of auto, cpu, cuda, rocm, got 'tpu'") as caught:
        detect_platform("tpu")
    assert caught.value.param == "device"


def test_no_torch_without_a_gpu_file(host: Machine) -> None:
    code = (
        "import sys; from pathlib import Path; from halfbyte.platform import detect_platform;"
        f"print(detect_platform('auto', root=Path({str(host.root)!r})).device, 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "cpu False\n"


class _Cuda:
    """Stands in for torch where a GPU would be needed."""

    class version:
        hip: str | None = None

    class cuda:
        available = True

        class Properties:
            name, major, minor, total_memory = "Made-up GPU", 9, 0, 80 * GIB

        @classmethod
        def is_available(cls) -> bool:
            return cls.available

        @classmethod
        def get_device_properties(cls, index: int) -> type[Properties]:
            return cls.Properties

        @staticmethod
        def mem_get_info() -> tuple[int, int]:
            return 70 * GIB, 80 * GIB


@pytest.fixture
def gpu(host: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    host.write("dev/nvidia0", "")
    monkeypatch.setitem(sys.modules, "torch", _Cuda)
    monkeypatch.setattr(_Cuda.cuda, "available", True)
    monkeypatch.setattr(_Cuda.version, "hip", None)
    return host


def test_cuda(gpu: Machine) -> None:
    found = detect_platform("auto", root=gpu.root)
    assert (found.device, found.name, found.capability, found.native_bf16) == ("cuda", "Made-up GPU", (9, 0), True)
    assert found.memory_limit_bytes == 80 * GIB
    assert available_memory_bytes(found, root=gpu.root) == 70 * GIB
    assert detect_platform("cuda", root=gpu.root) == found
    assert detect_platform("cpu", root=gpu.root).device == "cpu"
    assert str(found) == "cuda sm90, Made-up GPU, 8 threads, 80.0 GiB"


def test_rocm(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Cuda.version, "hip", "7.0")
    found = detect_platform("auto", root=gpu.root)
    assert (found.device, found.capability, found.native_bf16) == ("rocm", None, True)
    with pytest.raises(UserError, match="device cuda is not usable: torch finds rocm"):
        detect_platform("cuda", root=gpu.root)


def test_gpu_that_torch_cannot_use_is_said(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_Cuda.cuda, "available", False)
    monkeypatch.setattr(logging.getLogger("halfbyte"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        assert detect_platform("auto", root=gpu.root).device == "cpu"
    assert "dev/nvidia0 is present" in caplog.text
    with pytest.raises(UserError, match="torch finds none; use --device auto or cpu"):
        detect_platform("cuda", root=gpu.root)
