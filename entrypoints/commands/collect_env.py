"""`halfbyte collect-env`: versions, platform, threads and memory, for a bug report. Prints nothing secret.

Versions come from package metadata, so that a broken package cannot stop the report; torch is imported last.
"""

from __future__ import annotations

import os
import platform as python_platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from halfbyte import __version__
from halfbyte.entrypoints.flag_table import LOG_LEVEL
from halfbyte.entrypoints.flags import parse
from halfbyte.platform import available_memory_bytes, detect_platform

PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub", "numpy"),
    *("fastapi", "starlette", "uvicorn", "pydantic", "httptools", "uvloop", "msgspec", "pyzmq", "llguidance"),
    *("triton", "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache", "flash-attn", "llmcompressor"),
)


def run(argv: Sequence[str]) -> int:
    parse("collect-env", "Print what this machine has, for a bug report.", (LOG_LEVEL,), argv)
    for name, value in report():
        print(f"{name:<20} {value}", flush=True)
    return 0


def report() -> Iterator[tuple[str, str]]:
    """(name, value) of each fact, the cheap ones first."""
    yield "halfbyte", __version__
    yield "python", f"{python_platform.python_version()} ({sys.executable})"
    yield "system", python_platform.platform()
    cpu = detect_platform("cpu")
    yield "cpu", cpu.name
    yield "instruction sets", " ".join(cpu.isa) or "none of interest"
    yield "native bf16", "yes" if cpu.native_bf16 else "no"
    yield "cores of the host", str(os.cpu_count())
    yield "threads granted", str(cpu.num_threads)
    yield "memory limit", f"{cpu.memory_limit_bytes / 2**30:.2f} GiB"
    yield "memory available", f"{available_memory_bytes(cpu) / 2**30:.2f} GiB"
    for package in PACKAGES:
        yield package, _version(package)
    yield from _devices()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> Iterator[tuple[str, str]]:
    """What torch says of itself and of GPUs. A torch that cannot be imported is a finding, not a crash."""
    try:
        import torch
    except Exception as error:
        yield "torch import", f"fails: {type(error).__name__}: {error}"
        return
    yield "torch cuda / hip", f"{torch.version.cuda or 'none'} / {torch.version.hip or 'none'}"
    yield "torch threads", str(torch.get_num_threads())
    if not torch.cuda.is_available():
        yield "gpus", "none that torch can use"
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.1f} GiB"
        yield f"gpu {index}", f"{properties.name}, {memory}, sm{properties.major}{properties.minor}"
