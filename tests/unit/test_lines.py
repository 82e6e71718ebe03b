"""Small files and small functions, and a count that anybody can ask for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("halfbyte", "kvcache", "kernels", "model_runner", "engine", "entrypoints")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_KERNEL_FUNCTION_LINES = 120

PRODUCT = sorted(path.relative_to(ROOT) for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
ALL = PRODUCT + sorted(
    path.relative_to(ROOT) for folder in ("tests", "benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("path", ALL, ids=str)
def test_files_are_short(path: Path) -> None:
    lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{path} has {lines} lines: split it by subject"


@pytest.mark.parametrize("path", PRODUCT, ids=str)
def test_functions_are_short(path: Path) -> None:
    limit = MAX_KERNEL_FUNCTION_LINES if path.parts[0] == "kernels" else MAX_FUNCTION_LINES
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= limit, f"{path}:{node.lineno} {node.name} has {lines} lines"


def test_lines_script_counts_each_floor() -> None:
    command = [sys.executable, str(ROOT / "scripts/lines")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print(output)
    rows = {row[0]: [int(number) for number in row[1:]] for row in map(str.split, output.splitlines()[1:])}
    assert set(FLOORS) <= set(rows)
    for floor in FLOORS:
        files = [path for path in PRODUCT if path.parts[0] == floor]
        assert rows[floor][:2] == [len(files), sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in files)]
        assert 0 < rows[floor][2] <= rows[floor][1]
    assert rows["product"] == [sum(rows[floor][column] for floor in FLOORS) for column in range(3)]
