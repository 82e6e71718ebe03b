"""Each report of operators on the API, and each item of the conformance checklist, has a test that is named after it.

`test_b05_...` is a test of row B05, `test_b19_b20_...` of both, `test_checklist_07_...` of item 7. Knows the ids, which are
literal here, and the names of the functions in `tests/`.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

# The rows that a plain CPU can show, at least in part.
ROWS = {
    "B": "01 02 03 04 05 06 07 09 10 11 12 13 14 16 17 18 19 20 21 22 23 25 26 27 28 29 30 31 32 34 35 36 38 39 40 41 43 44 45 47"
    " 48 50 51 52 53",
    "F": "01 03 04 05 06 07 08 10 11 12 13 15 16 17 18 19",
    "G": "04 06 09",
}
CHECKLIST = "01 02 03 04 05 06 07 08 09 10 11 12 13 14 15"
IDS = {
    **{group: [group + number for number in numbers.split()] for group, numbers in ROWS.items()},
    "checklist": CHECKLIST.split(),
}


def named_after() -> dict[str, list[str]]:
    """Row or item -> the tests that are named after it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for name in ids_in(node.name):
                    found[name].append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def ids_in(name: str) -> list[str]:
    if match := re.match(r"test_checklist_(\d\d)_", name):
        return [match.group(1)]
    match = re.match(r"test_((?:[bfg]\d\d_)+)", name)
    return [] if match is None else match.group(1).upper().split("_")[:-1]


@pytest.mark.parametrize("group", IDS)
def test_every_row_has_a_test(group: str) -> None:
    found = named_after()
    missing = [name for name in IDS[group] if not found[name]]
    count = sum(len(found[name]) for name in IDS[group])
    print(f"{group}: {len(IDS[group]) - len(missing)} of {len(IDS[group])} rows have tests ({count} tests)")
    assert not missing


def test_no_test_is_named_after_a_row_that_does_not_exist() -> None:
    known = {name for names in IDS.values() for name in names}
    assert not {name: tests for name, tests in named_after().items() if name not in known}


def test_names_tell_their_rows() -> None:
    assert ids_in("test_b19_b20_scores") == ["B19", "B20"] and ids_in("test_checklist_07_x") == ["07"]
    assert ids_in("test_batched") == ids_in("test_b1_x") == ids_in("helper_b01_x") == []
