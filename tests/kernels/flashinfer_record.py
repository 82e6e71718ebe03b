"""The signatures of what we call of FlashInfer, read from its source without importing it, and kept in a file beside this one.

`python -m tests.kernels.flashinfer_record FOLDER` records a new version; FOLDER is the package's, unpacked or installed.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from functools import cache
from pathlib import Path

RECORD = Path(__file__).with_name("flashinfer_signatures.json")
# module -> what of it is called
CALLED = {
    "decode": (
        "BatchDecodeWithPagedKVCacheWrapper.__init__",
        "BatchDecodeWithPagedKVCacheWrapper._plan_impl",  # `plan` passes its keywords on to it
        "BatchDecodeWithPagedKVCacheWrapper.run",
        "trtllm_batch_decode_with_kv_cache",
        "xqa_batch_decode_with_kv_cache",
    ),
    "prefill": (
        "BatchPrefillWithPagedKVCacheWrapper.__init__",
        "BatchPrefillWithPagedKVCacheWrapper.plan",
        "BatchPrefillWithPagedKVCacheWrapper.run",
        "trtllm_batch_context_with_kv_cache",
    ),
}

# name, kind (of `inspect`), default as it is written
Parameters = list[tuple[str, str, str | None]]


def record(folder: Path) -> dict[str, Parameters]:
    """The parameters of each function in `CALLED`, as the package in `folder` has them."""
    found = {}
    for module, names in CALLED.items():
        tree = ast.parse((folder / f"{module}.py").read_text(encoding="utf-8"))
        for name in names:
            found[f"{module}.{name}"] = _parameters(_find(tree, name.split(".")))
    return found


@cache
def signature(name: str) -> inspect.Signature:
    """A recorded one; `name` is a key of the record. Every default is the text that stands for it."""
    recorded: Parameters = json.loads(RECORD.read_text(encoding="utf-8"))["signatures"][name]
    return inspect.Signature(
        [
            inspect.Parameter(name, inspect._ParameterKind[kind], default=inspect.Parameter.empty if default is None else default)
            for name, kind, default in recorded
        ]
    )


def _find(tree: ast.AST, path: list[str]) -> ast.FunctionDef:
    """The last definition counts: those before it are overloads."""
    for name in path:
        body = getattr(tree, "body", [])
        tree = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name][-1]
    assert isinstance(tree, ast.FunctionDef)
    return tree


def _parameters(function: ast.FunctionDef) -> Parameters:
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + [ast.unparse(value) for value in given.defaults]
    found: Parameters = [(arg.arg, "POSITIONAL_OR_KEYWORD", value) for arg, value in zip(plain, defaults, strict=True)]
    if given.vararg is not None:
        found.append((given.vararg.arg, "VAR_POSITIONAL", None))
    for arg, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append((arg.arg, "KEYWORD_ONLY", None if value is None else ast.unparse(value)))
    if given.kwarg is not None:
        found.append((given.kwarg.arg, "VAR_KEYWORD", None))
    return found


def version_of(folder: Path) -> str:
    found = re.search(r'__version__ = "(.+)"', (folder / "_build_meta.py").read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


if __name__ == "__main__":
    package = Path(sys.argv[1])
    lines = [f"    {json.dumps(name)}: {json.dumps(parameters)}" for name, parameters in record(package).items()]
    RECORD.write_text(
        f'{{\n  "version": {json.dumps(version_of(package))},\n  "signatures": {{\n' + ",\n".join(lines) + "\n  }\n}\n",
        encoding="utf-8",
    )
