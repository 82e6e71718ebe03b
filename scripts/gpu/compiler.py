"""Launches of Triton kernels, recorded instead of run, compiled for a target, and kept.

`recorded` hands what production code launches to whoever asks; what a launch compiles to depends on its `digest` alone: the
source of the kernel and of all that it calls, without comments, and its arguments as Triton specialises them. Listings lie in
Halfbyte's cache folder under that, so that an unchanged kernel is not compiled again. No driver and no GPU is needed.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import inspect
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITCallable, JITFunction, create_function_from_signature

from halfbyte.platform import cache_folder
from scripts.gpu.facts import Listing

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_KEPT_DAYS = 30


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its arguments; options: keywords of the launch (num_warps, ..., and constants that were given by name)."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """What the body launches, in order; nothing runs. Arguments may be tensors on "meta"."""
    launches: list[Launch] = []

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(Launch(kernel, arguments, options))

    run = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


@dataclass(frozen=True, slots=True)
class Program:
    """One kernel as a launch compiles it for a target. digest: of all that its machine code depends on, but the compiler."""

    name: str
    target: str
    digest: str
    source: ASTSource
    options: dict[str, Any]

    @property
    def path(self) -> Path:
        """Where its listing is kept."""
        key = hashlib.sha256(f"{self.digest} {triton.__version__}".encode()).hexdigest()
        return cache_folder() / "aot" / f"{key[:32]}.json.gz"


def programs(launch: Callable[[], None], target: str) -> list[Program]:
    """What `launch` launches, without repetitions, in order. Kernels of one name and different arguments are numbered."""
    with recorded() as launches:
        launch()
    found: dict[str, Program] = {}
    for program in (_specialised(one, target) for one in launches):
        found.setdefault(program.digest, program)
    names: dict[str, int] = {}
    numbered = []
    for program in found.values():
        names[program.name] = names.get(program.name, 0) + 1
        name = program.name if names[program.name] == 1 else f"{program.name}#{names[program.name]}"
        numbered.append(replace(program, name=name))
    return numbered


def _specialised(launch: Launch, target: str) -> Program:
    """As the first launch with these arguments would compile it."""
    kernel = launch.kernel
    backend = make_backend(_gpu(target))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*launch.arguments, **launch.options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, launch.options, bound, specialization, options)
    source = ASTSource(kernel, signature, constants, attributes)
    parts = [
        target,
        kernel_digest(kernel),
        signature,
        {key: _text(value) for key, value in constants.items()},
        attributes,
        options,
    ]
    return Program(kernel.__name__, target, _hash(str(parts)), source, parsed.__dict__)


def _gpu(target: str) -> GPUTarget:
    return GPUTarget("cuda", int(target.removeprefix("sm")), 32) if target.startswith("sm") else GPUTarget("hip", target, 64)


def _text(value: Any) -> str:
    if isinstance(value, JITCallable):
        return kernel_digest(value)
    return _text(value.value) if isinstance(value, tl.constexpr) else str(value)


@cache
def kernel_digest(kernel: JITCallable) -> str:
    """Of a kernel's source, of what it calls and of the constants that both read; comments and docstrings do not matter."""
    found: dict[str, str] = {}
    _gather(kernel, found)
    return _hash(str(sorted(found.items())))


def _gather(function: JITCallable, found: dict[str, str]) -> None:
    name = f"{function.fn.__module__}.{function.fn.__qualname__}"
    if name in found:
        return
    tree = ast.parse(function.src)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    found[name] = ast.unparse(tree)
    scope = {**function.fn.__globals__, **inspect.getclosurevars(function.fn).nonlocals}
    for node in ast.walk(tree):
        value = _resolved(node, scope)
        if isinstance(value, JITCallable) and not value.fn.__module__.startswith("triton."):
            _gather(value, found)
        elif isinstance(value, tl.constexpr):
            found[f"{name}: {ast.unparse(node)}"] = _text(value)


def _resolved(node: ast.AST, scope: dict[str, Any]) -> Any:
    """What a name, or an attribute of a module, stands for; None for all else."""
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(owner := _resolved(node.value, scope), ModuleType):
        return getattr(owner, node.attr, None)
    return None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def ensure_listing(program: Program) -> None:
    """Compiles it and keeps the listing, unless one is kept already. Raises what the compiler raises."""
    if not program.path.exists():
        _keep(program.path, _compile(program))


def load(program: Program) -> Listing:
    """The listing that is kept."""
    path = program.path
    path.touch()  # `drop_old` goes by the last use
    return Listing(**json.loads(gzip.decompress(path.read_bytes())))


def drop_old() -> None:
    """Removes listings that nobody asked for in a month."""
    for path in (cache_folder() / "aot").glob("*.json.gz"):
        if path.stat().st_mtime < time.time() - _KEPT_DAYS * 86400:
            path.unlink(missing_ok=True)


def _keep(path: Path, listing: Listing) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(gzip.compress(json.dumps(asdict(listing)).encode(), 6))
    Path(file.name).replace(path)


def _compile(program: Program) -> Listing:
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        made = triton.compile(program.source, target=_gpu(program.target), options=program.options)
        metadata = made.metadata
        assembly, resources = made.asm.get("amdgcn", ""), ""
        if cubin := made.asm.get("cubin"):
            file = Path(folder) / "kernel.cubin"
            file.write_bytes(cubin)
            assembly, resources = _tool("nvdisasm", "-c", str(file)), _tool("cuobjdump", "-res-usage", str(file))
        return Listing(
            assembly=assembly,
            resources=resources,
            ptx=made.asm.get("ptx", ""),
            shared_bytes=metadata.shared,
            num_warps=metadata.num_warps,
            tensor_columns=getattr(metadata, "tmem_size", None) or 0,
        )


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([str(_TOOLS / name), *arguments], capture_output=True, text=True, check=True).stdout
