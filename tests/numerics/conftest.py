"""Fixtures of the numerics tests: the table of tolerances, and models over a paged cache without the engine."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _beside(name: str) -> ModuleType:
    """The module `name` of this folder, which is not a package."""
    qualified = f"halfbyte_numerics_{name}"
    if qualified not in sys.modules:
        spec = spec_from_file_location(qualified, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        module = sys.modules[qualified] = module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[qualified]


@pytest.fixture(scope="session")
def tolerances() -> dict[str, float]:
    table: dict[str, float] = _beside("tolerances").TOLERANCES
    return table


@pytest.fixture(scope="session")
def paged_model() -> Any:
    """The class `PagedModel` of paged_model.py."""
    return _beside("paged_model").PagedModel
