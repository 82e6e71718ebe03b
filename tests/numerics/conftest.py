"""Fixtures of the numerics tests: the table of tolerances, and models over a paged cache without the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from halfbyte.kernels.attention import get_backend
from halfbyte.kernels.cpu.library import CpuEngine
from halfbyte.model_runner.cpu_model import CpuModel, PackingLoader, product_type, stores_pairs
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.loader import load_model
from halfbyte.model_runner.source import ModelFiles


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


@pytest.fixture(scope="session", params=["reference", "cpu"])
def load(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """load(files, config, dtype) -> the model, on the torch laws and then on the compiled kernels."""

    def on_torch(files: ModelFiles, config: DecoderConfig, dtype: str) -> Any:
        return load_model(files, config, dtype, "cpu", "auto", get_backend("reference"))

    def on_kernels(files: ModelFiles, config: DecoderConfig, dtype: str) -> Any:
        torch_dtype = getattr(torch, dtype)
        engine = CpuEngine(num_threads=2)
        pairs = stores_pairs(engine, torch_dtype, "auto", is_gguf=files.kind == "gguf")
        packing = PackingLoader(engine, torch_dtype, "auto", pairs=pairs)
        model, report = load_model(files, config, dtype, "cpu", "auto", get_backend("cpu"), packing)
        return CpuModel(model, engine, torch_dtype, product_type(engine, torch_dtype, packing.kinds)), report

    made = on_torch if request.param == "reference" else on_kernels

    def checked(files: ModelFiles, config: DecoderConfig, dtype: str = "float32") -> Any:
        model, report = made(files, config, dtype)
        assert not report.unused
        return model

    return checked


@pytest.fixture(scope="session")
def paged_model() -> Any:
    """The class `PagedModel` of paged_model.py."""
    return _beside("paged_model").PagedModel


@pytest.fixture(scope="session")
def fake_device() -> ModuleType:
    """The module fake_device.py."""
    return _beside("fake_device")
