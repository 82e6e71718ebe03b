"""Gives the tests of KV formats `format_reference`, the numpy twin of the formats: test folders are no packages."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def format_reference() -> ModuleType:
    name = "halfbyte_format_reference"
    spec = spec_from_file_location(name, Path(__file__).with_name("format_reference.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
