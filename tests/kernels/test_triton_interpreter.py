"""Triton's interpreter, as `triton_interpreter.py` makes it, against torch: what tests of kernels on a CPU are worth."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_interpreter import ON_GPU, interpreted, jit, tl

if ON_GPU:
    pytest.skip("kernels are compiled for the GPU here; TRITON_INTERPRET=1 interprets them", allow_module_level=True)
interpreted()

FLOATS = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32}
FP8 = {"float8_e4m3fn": tl.float8e4nv, "float8_e5m2": tl.float8e5}
OPERATIONS = {
    "add": torch.add,
    "subtract": torch.subtract,
    "multiply": torch.multiply,
    "negative": lambda x, y: -x,
    "twice": lambda x, y: x * 2.5,
    "greatest": torch.maximum,
    "magnitude": lambda x, y: x.abs(),
    "less": lambda x, y: (x < y).to(x.dtype),
    "where": lambda x, y: torch.where(x > y, x, y * 0.5),
}


def numbers(dtype: torch.dtype, count: int = 512) -> Tensor:
    """Of all sizes, with zeros, and some whose roundings are ties."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, generator=generator) * torch.exp2(torch.randint(-8, 8, (count,), generator=generator).float())
    x[:4] = torch.tensor([0.0, -0.0, 1.0, -1.0])
    x[4:8] = torch.tensor([1.00390625, 1.01171875, -1.00390625, 257.0])
    return x.to(dtype)


@jit
def compute(x: Any, y: Any, out: Any, NAME: tl.constexpr, NUM: tl.constexpr) -> None:
    i = tl.arange(0, NUM)
    a, b = tl.load(x + i), tl.load(y + i)
    if NAME == "add":
        found = a + b
    elif NAME == "subtract":
        found = a - b
    elif NAME == "multiply":
        found = a * b
    elif NAME == "negative":
        found = -a
    elif NAME == "twice":
        found = a * 2.5
    elif NAME == "greatest":
        found = tl.maximum(a, b)
    elif NAME == "magnitude":
        found = tl.abs(a)
    elif NAME == "less":
        found = (a < b).to(a.dtype)
    else:
        found = tl.where(a > b, a, b * 0.5)
    tl.store(out + i, found)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_arithmetic(dtype: str, name: str) -> None:
    x = numbers(getattr(torch, dtype))
    y, out = x.flip(0), torch.empty_like(x)
    compute[(1,)](x, y, out, name, len(x))
    assert torch.equal(out, OPERATIONS[name](x, y))


@jit
def reduce(x: Any, sums: Any, most: Any, NUM: tl.constexpr) -> None:
    i = tl.arange(0, NUM)
    a = tl.load(x + i)
    tl.store(sums, tl.sum(a, 0))
    tl.store(most, tl.max(a, 0))


@pytest.mark.parametrize("dtype", FLOATS)
def test_reductions(dtype: str) -> None:
    x = torch.arange(-20, 44).to(getattr(torch, dtype))
    sums, most = x.new_empty(1), x.new_empty(1)
    reduce[(1,)](x, sums, most, len(x))
    assert (sums.item(), most.item()) == (x.float().sum(), 43)


@jit
def cast(x: Any, out: Any, NUM: tl.constexpr) -> None:
    i = tl.arange(0, NUM)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_casts_round_to_nearest_even(source: str, target: str) -> None:
    x = numbers(getattr(torch, source), 4096)
    out = torch.empty(len(x), dtype=getattr(torch, target))
    cast[(1,)](x, out, len(x))
    assert torch.equal(out, x.to(out.dtype))


@jit
def cast_fp8(x: Any, codes: Any, back: Any, KIND: tl.constexpr, NUM: tl.constexpr) -> None:
    i = tl.arange(0, NUM)
    small = tl.load(x + i).to(KIND)
    tl.store(codes + i, small.to(tl.uint8, bitcast=True))
    tl.store(back + i, small.to(back.dtype.element_ty))


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("kind", FP8)
def test_fp8_casts_round_and_saturate(kind: str, source: str) -> None:
    dtype = getattr(torch, kind)
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()].sort().values
    ties = (every[1:] + every[:-1]) / 2
    beyond = torch.tensor([1e5, -1e5, torch.inf, -torch.inf])
    x = torch.cat((every, ties, beyond, numbers(torch.float32))).to(getattr(torch, source))
    x = torch.cat((x, x.new_zeros(2048 - len(x))))
    codes, back = torch.empty(len(x), dtype=torch.uint8), torch.empty(len(x), dtype=torch.bfloat16)
    cast_fp8[(1,)](x, codes, back, FP8[kind], len(x))
    most = torch.finfo(dtype).max
    want = x.float().clamp(-most, most).to(dtype)
    assert torch.equal(codes, want.view(torch.uint8))
    assert torch.equal(back, want.to(torch.bfloat16))


@jit
def multiply(a: Any, b: Any, out: Any, KIND: tl.constexpr, NUM: tl.constexpr) -> None:
    i = tl.arange(0, NUM)
    at = i[:, None] * NUM + i[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    if KIND is not None:
        x, y = x.to(KIND, bitcast=True), y.to(KIND, bitcast=True)
    tl.store(out + at, tl.dot(x, y))


@pytest.mark.parametrize("kind", [*FLOATS, *FP8])
def test_products_add_up_in_float32(kind: str) -> None:
    """Whole numbers, so that any order of the sums gives the same bits; sums beyond what bfloat16 holds."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-7, 8, (32, 32), generator=generator).to(getattr(torch, kind)) for _ in range(2))
    out = torch.empty(32, 32)
    want = a.float() @ b.float()
    assert not torch.equal(want, want.to(torch.bfloat16).float())
    if kind in FP8:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    multiply[(1,)](a, b, out, FP8.get(kind), 32)
    assert torch.equal(out, want)


def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "0"):
        if value is None:
            monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        else:
            monkeypatch.setenv("TRITON_INTERPRET", value)
        interpreted()
        assert os.environ.get("TRITON_INTERPRET") == value
