"""What the documents say is so: names in ARCHITECTURE.md exist, README's support table is the generated one."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = "halfbyte|engine|kernels|kvcache|model_runner|entrypoints"
QUOTED = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", (ROOT / "ARCHITECTURE.md").read_text(), flags=re.S))
SYMBOLS = sorted({name for name in QUOTED if re.fullmatch(rf"(?:{FLOORS})(?:\.\w+)+", name)})
PATHS = sorted({name for name in QUOTED if "/" in name and re.fullmatch(r"[\w./]+", name)})


def resolve(name: str) -> object:
    """The object behind a dotted name: the longest importable module, then attributes."""
    parts = (name if name.startswith("halfbyte.") else f"halfbyte.{name}").split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


def test_there_is_something_to_check() -> None:
    assert len(SYMBOLS) > 20 and len(PATHS) > 5


@pytest.mark.parametrize("name", SYMBOLS)
def test_symbol_exists(name: str) -> None:
    resolve(name)


@pytest.mark.parametrize("path", PATHS)
def test_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_readme_holds_the_generated_support_table() -> None:
    command = [sys.executable, "-m", "halfbyte", "support", "--markdown"]
    table = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    readme = (ROOT / "README.md").read_text()
    start, end = readme.index("<!-- support:"), readme.index("<!-- /support -->")
    assert readme[start:end].split("-->", 1)[1].strip() == table
