"""The device functions of `kernels/triton/numbers.py` against the law's: every code, and every place where roundings meet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halfbyte.kvcache.formats import numbers as law
from tests.kernels.triton_interpreter import interpreted, jit, tl

(numbers,) = interpreted("halfbyte.kernels.triton.numbers")
fold_sum, merge_pairs, to_bytes, from_bytes = numbers.fold_sum, numbers.merge_pairs, numbers.to_bytes, numbers.from_bytes


@jit
def apply(x: tl.tensor, out: tl.tensor, FUNCTION: tl.constexpr, NUM: tl.constexpr) -> None:
    i = tl.arange(0, NUM)
    tl.store(out + i, FUNCTION(tl.load(x + i)))


def run(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The device function `name` of each number."""
    size = 1 << (len(x) - 1).bit_length()
    out = torch.empty(size, dtype=dtype)
    apply[(1,)](torch.cat((x, x.new_zeros(size - len(x)))), out, getattr(numbers, name), size)
    return out[: len(x)]


def borders(decode: Callable[[Tensor], Tensor], num_codes: int) -> Tensor:
    """All numbers of a small type, their middles, both with their neighbours in float32, and what lies beyond or between."""
    every = decode(torch.arange(num_codes, dtype=torch.uint8))
    every = every[every.isfinite()].unique()
    exact = torch.cat((every, (every[1:] + every[:-1]) / 2, torch.tensor([-0.0, 1e-40, -1e-30, 3e38, torch.inf, -torch.inf])))
    near = [torch.nextafter(exact, torch.tensor(toward)) for toward in (torch.inf, -torch.inf)]
    return torch.cat((exact, *near, torch.randn(512, generator=torch.Generator().manual_seed(0)) * every.max() / 2))


@pytest.mark.parametrize(("name", "num_codes"), [("e4m3", 256), ("e5m2", 256), ("e2m1", 16)])
def test_small_floats(name: str, num_codes: int) -> None:
    encode, decode = getattr(law, f"to_{name}"), getattr(law, f"from_{name}")
    x = borders(decode, num_codes)
    assert torch.equal(run(f"to_{name}", x, torch.int32), encode(x).int())
    codes = torch.arange(num_codes, dtype=torch.uint8)
    want = decode(codes)
    found = run(f"from_{name}", codes.int(), torch.float32)
    is_number = want.isfinite()  # others are never stored
    assert torch.equal(found.view(torch.int32)[is_number], want.view(torch.int32)[is_number])


def test_whole_numbers() -> None:
    x = torch.cat((torch.arange(-130, 130) / 2, torch.randn(500, generator=torch.Generator().manual_seed(0)) * 40))
    assert torch.equal(run("round_even", x, torch.float32), torch.round(x))


def test_finite() -> None:
    x = torch.tensor([0.0, -1e-45, 1.5, 2.0**126, 3e38, -3e38, torch.inf, -torch.inf, torch.nan])
    assert torch.equal(run("finite", x, torch.float32), law.finite(x))


def test_halves() -> None:
    x = borders(lambda codes: (codes.short() * 121).view(torch.float16).float(), 256)
    x = x.clamp(-65504, 65504)
    bits = run("half_bits", x, torch.int32)
    assert torch.equal(bits, x.half().view(torch.int16).int() & 0xFFFF)
    assert torch.equal(run("from_half_bits", bits | (7 << 16), torch.float32), x.half().float())


@jit
def sum_rows(x: tl.tensor, out: tl.tensor, ROWS: tl.constexpr, NUM: tl.constexpr) -> None:
    row = tl.arange(0, ROWS)[:, None]
    tl.store(out + row, fold_sum(tl.load(x + row * NUM + tl.arange(0, NUM)[None, :])))


@pytest.mark.parametrize("size", [2, 16, 128])
def test_sums_in_the_laws_order(size: int) -> None:
    x = torch.randn(64, size, generator=torch.Generator().manual_seed(0)) * 1e3
    out = torch.empty(64, 1)
    sum_rows[(1,)](x, out, 64, size)
    assert torch.equal(out, law.fold_sum(x))
    other_order = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    assert torch.equal(out, law.fold_sum(other_order)) == (size == 2)


@jit
def pack_rows(codes: tl.tensor, pairs: tl.tensor, words: tl.tensor, NUM: tl.constexpr) -> None:
    """Nibbles into bytes; four bytes into a word and back into bytes."""
    i = tl.arange(0, NUM)
    merged = merge_pairs(tl.load(codes + i)[None, :], 4)
    tl.store(pairs + tl.arange(0, NUM // 2)[None, :], merged)
    word = from_bytes(tl.reshape(merged, [NUM // 8, 4]))
    tl.store(words + tl.arange(0, NUM // 2)[None, :], tl.reshape(to_bytes(word, 4), [1, NUM // 2]))


def test_packing() -> None:
    codes = torch.randint(0, 16, (256,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    pairs, words = torch.empty(128, dtype=torch.int32), torch.empty(128, dtype=torch.int32)
    pack_rows[(1,)](codes, pairs, words, 256)
    want = law.pack(codes.to(torch.uint8), 4).int()
    assert torch.equal(pairs, want) and torch.equal(words, want)
