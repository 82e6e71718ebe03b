"""The house laws, read off the source: floors import downward, torch stays out of the API process, nothing unsafe is called.

Every file of the tree is looked at, so that a new one is covered from its first line.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("halfbyte", "kvcache", "kernels", "model_runner", "engine", "entrypoints")  # lowest first
PRODUCT = sorted(path.relative_to(ROOT) for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
OTHERS = sorted(path.relative_to(ROOT) for folder in ("tests", "benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py"))
SCRIPTS = [
    path.relative_to(ROOT)
    for path in (ROOT / "scripts").iterdir()
    if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env python3")
]

# The package's door: it names what users import, which lies on the highest floor.
DOORS = {Path("halfbyte/__init__.py"), Path("halfbyte/__main__.py")}
LAZY_NAMES = {"LLM", "RequestOutput", "CompletionOutput"}

TORCH_FREE = (
    *("halfbyte/*.py", "engine/**/*.py", "entrypoints/**/*.py"),
    *(f"kvcache/{name}.py" for name in ("spec", "sizing", "block_pool", "prefix_hash", "manager")),
    *(f"model_runner/{name}.py" for name in ("gguf", "source", "catalogue", "decoder_config", "kv_scheme", "safetensors_files")),
    "model_runner/texts/__init__.py",
    *("kvcache/formats/__init__.py", "kernels/attention/__init__.py", "model_runner/models/__init__.py"),
)
VAGUE_NAMES = {"utils", "util", "common", "misc", "helpers", "helper"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=str)


def floor_of(name: str) -> int | None:
    """The floor of a dotted name below `halfbyte`, None for other packages."""
    parts = name.split(".")
    if parts[0] != "halfbyte":
        return None
    return FLOORS.index(parts[1]) if len(parts) > 1 and parts[1] in FLOORS else 0


def imported(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import anywhere in a file; `from a import b` counts as a.b."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}") for alias in node.names)


def module_level_imports(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Imports that run when the module is imported: not those in functions, nor under TYPE_CHECKING."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from module_level_imports(node.orelse)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(ast.Module([node], []))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in ("body", "orelse", "finalbody", "handlers"):
                yield from module_level_imports(getattr(node, name, []))


def names(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted text) of every name and attribute that is read."""
    for node in ast.walk(module):
        if isinstance(node, ast.Name | ast.Attribute):
            yield node.lineno, ast.unparse(node)


def test_the_tree_is_found() -> None:
    assert {path.parts[0] for path in PRODUCT} == set(FLOORS)


@each(PRODUCT)
def test_floors_import_only_downward(path: Path) -> None:
    own = FLOORS.index(path.parts[0])
    if path in DOORS:
        return
    for line, name in imported(tree(path)):
        target = floor_of(name)
        if name.removeprefix("halfbyte.") in LAZY_NAMES:
            target = FLOORS.index("entrypoints")
        assert target is None or target <= own, f"{path}:{line} imports {name}, a higher floor"


@each(PRODUCT)
def test_registries_point_only_downward(path: Path) -> None:
    """Names in strings too: "halfbyte.engine.x:Y" is an import that happens later."""
    own = FLOORS.index(path.parts[0])
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and path not in DOORS:
            match = re.fullmatch(r"halfbyte(\.\w+)+(:\w+)?", node.value)
            target = floor_of(node.value.partition(":")[0]) if match else None
            assert target is None or target <= own, f"{path}:{node.lineno} names {node.value}, a higher floor"


@each(PRODUCT + OTHERS + SCRIPTS)
def test_floors_are_imported_through_the_package(path: Path) -> None:
    for line, name in imported(tree(path)):
        assert not name.startswith("."), f"{path}:{line}: write out halfbyte.<floor>"
        root = name.split(".")[0]
        assert root == "halfbyte" or root not in FLOORS, f"{path}:{line} imports {name}: a second copy of halfbyte.{root}"


@each(PRODUCT)
def test_product_imports_no_tests_or_benchmarks(path: Path) -> None:
    for line, name in imported(tree(path)):
        assert name.split(".")[0] not in ("tests", "benchmarks", "pytest", "hypothesis"), f"{path}:{line} imports {name}"


@pytest.mark.parametrize("floor", FLOORS[1:])
def test_root_folders_are_namespaces(floor: str) -> None:
    assert not (ROOT / floor / "__init__.py").exists(), "a root __init__.py would shadow other packages of that name"


@each([path for path in PRODUCT if any(path.match(pattern.replace("/**", "")) or path.match(pattern) for pattern in TORCH_FREE)])
def test_no_torch_at_module_level(path: Path) -> None:
    for line, name in module_level_imports(tree(path).body):
        assert name.split(".")[0] not in ("torch", "triton", "flashinfer"), f"{path}:{line} imports {name} at module level"


def test_torch_is_not_imported_transitively() -> None:
    paths = sorted({path.relative_to(ROOT) for pattern in TORCH_FREE for path in ROOT.glob(pattern)})
    modules = [path.with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__") for path in paths]
    modules = [module if module.split(".")[0] == "halfbyte" else f"halfbyte.{module}" for module in modules]
    assert "halfbyte.entrypoints.cli" in modules and "halfbyte.engine.async_engine" in modules
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name + ' imports torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@each(PRODUCT)
def test_nothing_unsafe_is_called(path: Path) -> None:
    for line, name in imported(tree(path)):
        assert name.split(".")[0] not in ("pickle", "cloudpickle", "dill", "marshal", "shelve"), f"{path}:{line} imports {name}"
        assert name != "jinja2.Environment", f"{path}:{line}: templates come from strangers; use jinja2.sandbox"
    for line, name in names(tree(path)):
        assert name not in ("torch.load", "jinja2.Environment", "os.system"), f"{path}:{line} uses {name}"
        assert not name.startswith("pickle."), f"{path}:{line} uses {name}"
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call):
            continue
        assert not (isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec")), f"{path}:{node.lineno} runs text"
        for keyword in node.keywords:
            truthy = not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
            assert not (keyword.arg in ("trust_remote_code", "shell") and truthy), f"{path}:{node.lineno}: {keyword.arg}"


@each([path for path in PRODUCT if path.parts[0] == "entrypoints"])
def test_entrypoints_do_not_assert(path: Path) -> None:
    """What a client sends is checked with an error that it can read; an assertion is a 500 and vanishes under -O.

    `assert x is not None` is left: it tells the type checker what the line above made sure of.
    """
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Assert):
            assert re.fullmatch(r"[\w.]+ is not None", ast.unparse(node.test)), f"{path}:{node.lineno}: raise UserError"


@each(PRODUCT + OTHERS)
def test_names_say_what_a_thing_is(path: Path) -> None:
    assert not VAGUE_NAMES & {part.removesuffix(".py") for part in path.parts}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef):
            assert not re.match(r"Base[A-Z]|.*Mixin$", node.name), f"{path}:{node.lineno}: {node.name}"


@each(PRODUCT)
def test_modules_say_what_they_are(path: Path) -> None:
    empty = path.name == "__init__.py" and not tree(path).body
    assert empty or ast.get_docstring(tree(path)), f"{path} has no docstring: what it knows, what it must not know, who calls it"


@each(PRODUCT)
def test_environment_variables_change_no_results(path: Path) -> None:
    """Only these are read: secrets, where files and modules lie, and whether FlashInfer will find or compile its kernels."""
    allowed = {
        "HALFBYTE_API_KEY",
        "HALFBYTE_ADMIN_API_KEY",
        "VLLM_API_KEY",
        "XDG_CACHE_HOME",
        "PYTHONPATH",
        "CUDA_HOME",
        "CUDA_PATH",
    }
    allowed |= {f"FLASHINFER_{name}" for name in ("NVCC", "CUBIN_DIR", "WORKSPACE_BASE", "DISABLE_JIT")}
    for node in ast.walk(tree(path)):
        key: ast.expr | None = None
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv", "environ.get") and node.args:
            key = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("os.environ", "environ"):
            key = node.slice
        if isinstance(key, ast.Constant):
            assert key.value in allowed, f"{path}:{key.lineno} reads {key.value}"
