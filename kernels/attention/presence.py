"""Which back ends of this build a machine cannot run: packages, their versions, and the kernels and tools that they need.

Asked once per start, before weights are read. Nothing is imported and nothing is downloaded: packages are looked up by name.
Knows names of packages and FlashInfer's folders; no formats and no layers, which are `selection`'s matter. Called by
`engine.build`; `halfbyte support` and `halfbyte kv-plan` speak of the build alone and do not ask.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from halfbyte.errors import Refusal
from halfbyte.kernels.attention.vendors import SM10X, SM90
from halfbyte.platform import Platform

INSTALL = "pip install 'halfbyte[gpu]'"
DOWNLOAD = "run `halfbyte download-kernels`"

# module -> the distribution that holds it
_DISTRIBUTIONS = {
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "flashinfer_jit_cache": "flashinfer-jit-cache",
    "flashinfer_cubin": "flashinfer-cubin",
    "flash_attn": "flash-attn",
    "flash_attn_interface": "flash-attn-3",
}
# The versions of FlashInfer whose calls are known; its keywords change from one line to the next.
_FLASHINFER_LINE, _FLASHINFER_FIRST = (0, 7), (0, 7, 2)
_FLASH_ATTN_FIRST = (2, 6)  # caps scores


@dataclass(frozen=True, slots=True)
class Machine:
    """versions: of the modules that can be imported ("" where that is not known). compiles: whether there are nvcc and ninja, and
    FlashInfer may use them. has_cubins: whether NVIDIA's finished kernels lie where FlashInfer looks for them."""

    versions: Mapping[str, str]
    compiles: bool = False
    has_cubins: bool = False


def look() -> Machine:
    """This machine."""
    versions = {name: _version(package) for name, package in _DISTRIBUTIONS.items() if find_spec(name) is not None}
    has_tools = _has_nvcc() and (shutil.which("ninja") is not None or find_spec("ninja") is not None)
    return Machine(versions, has_tools and not os.environ.get("FLASHINFER_DISABLE_JIT"), _has_cubin_files())


def absent(platform: Platform, machine: Machine) -> dict[str, Refusal]:
    """What keeps this machine from running a back end of the build, by the back end's name; with what helps."""
    found: dict[str, Refusal | None] = {
        "triton": None if "triton" in machine.versions else Refusal("triton: not installed", INSTALL),
        "flashinfer": _flashinfer(platform.architecture, machine),
        "flash_attn": _flash_attn(platform.architecture, machine),
    }
    return {name: refusal for name, refusal in found.items() if refusal is not None}


def _flashinfer(architecture: str, machine: Machine) -> Refusal | None:
    installed = machine.versions.get("flashinfer")
    if installed is None:
        return Refusal("flashinfer: not installed", INSTALL)
    numbers = _numbers(installed)
    if numbers[:2] != _FLASHINFER_LINE or numbers < _FLASHINFER_FIRST:
        return Refusal(
            f"flashinfer: version {installed or 'unknown'} is installed, its calls are known for 0.7 from 0.7.2 on", INSTALL
        )
    if not machine.compiles and not _belongs(machine.versions.get("flashinfer_jit_cache"), installed):
        return Refusal("flashinfer: finds neither its finished kernels nor nvcc and ninja to compile them", DOWNLOAD)
    if architecture in SM10X and not machine.has_cubins and not _belongs(machine.versions.get("flashinfer_cubin"), installed):
        return Refusal(f"flashinfer: NVIDIA's kernels for {architecture} (cubins) are not on this machine", DOWNLOAD)
    return None


def _flash_attn(architecture: str, machine: Machine) -> Refusal | None:
    module, fix = "flash_attn", "pip install flash-attn, or use --attention-backend auto"
    if architecture in SM90:
        module, fix = "flash_attn_interface", "build FlashAttention 3 from its folder `hopper`, or use --attention-backend auto"
    installed = machine.versions.get(module)
    if installed is None:
        other = machine.versions.get("flash_attn")
        beside = "" if other is None else f"; flash_attn {other} is"
        return Refusal(f"flash_attn: {architecture} needs the package {module}, which is not installed{beside}", fix)
    if module == "flash_attn" and _numbers(installed) < _FLASH_ATTN_FIRST:
        return Refusal(f"flash_attn: version {installed or 'unknown'} is installed, needed is 2.6 or later", fix)
    return None


def _belongs(kernels: str | None, installed: str) -> bool:
    """Whether finished kernels are of the package's own version, which FlashInfer insists on: 0.7.2 or 0.7.2+cu130."""
    return kernels is not None and kernels.partition("+")[0] == installed.partition("+")[0]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _numbers(text: str) -> tuple[int, ...]:
    """(0, 7, 2) of 0.7.2.post1."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def _has_nvcc() -> bool:
    """Where FlashInfer looks for it."""
    if named := os.environ.get("FLASHINFER_NVCC"):
        return shutil.which(named) is not None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = Path(home) / "bin/nvcc" if home else Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    return found.is_file()


def _has_cubin_files() -> bool:
    named = os.environ.get("FLASHINFER_CUBIN_DIR")
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    folder = Path(named) if named else base / ".cache/flashinfer/cubins"
    return next(folder.rglob("*.cubin"), None) is not None if folder.is_dir() else False
