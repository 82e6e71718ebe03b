"""`halfbyte download-kernels`: FlashInfer's finished kernels into this installation: a start then compiles and downloads nothing.

FlashInfer's own command does it: two wheels of the installed version, one with NVIDIA's kernels, one with compiled ones for this
CUDA; where there is none of the second kind, the first alone. Needed once, on machines without nvcc or without a network at
start. Downloads no model weights.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from halfbyte.entrypoints.flag_table import LOG_LEVEL
from halfbyte.entrypoints.flags import Flag, parse

FLAGS = (Flag(name="dry-run", help="print what would be installed, and install nothing", kind="switch"), LOG_LEVEL)

# The oldest CUDA of each line that compiled kernels are published for; they run on the later ones of the line.
_CUDA_OF_WHEELS = ((12, 9), (13, 0))


def run(argv: Sequence[str]) -> int:
    given = parse("download-kernels", "Install FlashInfer's finished kernels.", FLAGS, argv).command
    if find_spec("flashinfer") is None:
        print("flashinfer is not installed: there is nothing to download; pip install 'halfbyte[gpu]' installs it")
        return 0
    command = [sys.executable, "-m", "flashinfer", command_for(_cuda_version()), *(["--dry-run"] if given.get("dry_run") else [])]
    # Kernels of another version, which this is to replace, must not keep FlashInfer from starting.
    return subprocess.run(command, env={**os.environ, "FLASHINFER_DISABLE_VERSION_CHECK": "1"}).returncode


def command_for(cuda: str | None) -> str:
    """FlashInfer's command on a machine with this CUDA ("13.0"; None where torch has none: FlashInfer then asks nvcc)."""
    if cuda is None:
        return "download-kernels"
    major, minor = map(int, cuda.split(".")[:2])
    has_wheel = any(major == line and minor >= oldest for line, oldest in _CUDA_OF_WHEELS)
    return "download-kernels" if has_wheel else "install-cubin-wheel"


def _cuda_version() -> str | None:
    import torch

    return torch.version.cuda
