"""The laws of choosing a token: noise, the order of candidates and the filters, against obvious twins and known numbers.

Shape letters: R rows, V vocabulary, K candidates.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfbyte.kernels.sampling import (
    SLICE,
    count_kept,
    gumbel_noise,
    log_normaliser,
    mix_32,
    mix_64,
    ordered_top,
    penalise_,
    uniform,
)

# Chi-square with 63 degrees of freedom exceeds this once in a million.
CHI_SQUARE_63 = 127.0
LOW_64 = 2**64 - 1


def signed(x: int, bits: int) -> int:
    x %= 2**bits
    return x - 2**bits if x >> (bits - 1) else x


def chi_square(counts_V: Tensor, expected_V: Tensor) -> float:
    kept = expected_V > 0
    assert counts_V[~kept].sum() == 0
    return float(((counts_V[kept] - expected_V[kept]) ** 2 / expected_V[kept]).sum())


def bucket_counts(numbers: Tensor) -> Tensor:
    return (numbers.double() * 64).long().flatten().bincount(minlength=64)


def test_mix_64_is_splitmix64() -> None:
    """The first outputs for the state 0 advanced by the golden gamma, as published with the algorithm."""
    golden = 0x9E3779B97F4A7C15
    states = torch.tensor([signed(golden * i, 64) for i in (1, 2, 3)])
    assert [x & LOW_64 for x in mix_64(states).tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(st.integers(0, 2**32 - 1))
def test_mix_32_equals_its_twin_in_plain_integers(x: int) -> None:
    got = int(mix_32(torch.tensor([signed(x, 32)], dtype=torch.int32)).item())
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    assert got % 2**32 == x ^ (x >> 16)


@settings(deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(0, 2**18))
def test_uniform_equals_its_twin_in_plain_integers(seed: int, position: int, token: int) -> None:
    def whole(x: int) -> int:
        return int(mix_64(torch.tensor([signed(x, 64)])).item()) & LOW_64

    def half(x: int) -> int:
        return int(mix_32(torch.tensor([signed(x, 32)], dtype=torch.int32)).item()) % 2**32

    golden = 0x9E3779B97F4A7C15
    key = whole(whole(seed + golden) + position * golden)
    bits = half(half(token ^ (key % 2**32)) ^ (key >> 32)) % 2**31
    got = float(uniform(torch.tensor([seed]), torch.tensor([position]), torch.tensor([[token]])).item())
    assert got == pytest.approx((bits + 0.5) / 2**31, rel=1e-6) and 0.0 < got < 1.0


def test_noise_depends_on_seed_position_and_token_only() -> None:
    seed_R, position_R = torch.tensor([5, 5, 6, -7]), torch.tensor([1, 2, 1, 1])
    noise_RV = gumbel_noise(seed_R, position_R, torch.arange(50)[None])
    assert len({tuple(row) for row in noise_RV.tolist()}) == 4
    shuffled = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    alone = gumbel_noise(seed_R[2:3], position_R[2:3], shuffled[None])
    assert torch.equal(alone[0], noise_RV[2, shuffled])
    for row in range(4):  # one candidate at a time, as no vector instruction computes it
        one = [gumbel_noise(seed_R[row : row + 1], position_R[row : row + 1], torch.tensor([[t]])).item() for t in range(50)]
        assert one == noise_RV[row].tolist()


def test_noise_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([0, 2**31 - 1, -(2**31), -1], dtype=torch.int32)
    monkeypatch.setattr("halfbyte.kernels.sampling.mix_32", lambda x: ends[None])
    noise = gumbel_noise(torch.tensor([0]), torch.tensor([0]), torch.zeros(1, 4, dtype=torch.int64))
    assert noise.isfinite().all()
    assert noise.max() == pytest.approx(32 * math.log(2), rel=1e-5)


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_numbers_are_uniform_and_neighbours_unrelated(axis: str) -> None:
    """Along each argument: buckets and pairs of neighbours are even (chi-square), and nothing correlates."""
    num = 1 << 17
    line, zero = torch.arange(num), torch.zeros(1, dtype=torch.int64)
    numbers = {
        "token": lambda: uniform(zero + 9, zero + 4, line[None])[0],
        "position": lambda: uniform((zero + 9).expand(num), line, zero[None])[:, 0],
        "seed": lambda: uniform(line, zero.expand(num), zero[None])[:, 0],
    }[axis]()
    even = torch.full((64,), num / 64)
    assert chi_square(bucket_counts(numbers), even) < CHI_SQUARE_63
    pairs = (numbers[:-1] * 8).long() * 8 + (numbers[1:] * 8).long()
    assert chi_square(pairs.bincount(minlength=64), torch.full((64,), (num - 1) / 64)) < CHI_SQUARE_63
    for lag in (1, 2, 64, 1024):
        assert abs(float(torch.corrcoef(torch.stack([numbers[:-lag], numbers[lag:]]))[0, 1])) < 6 / num**0.5


def test_positions_and_seeds_give_unrelated_rows() -> None:
    """No two of 64 rows correlate over 4,096 tokens, nor is one a permutation of another."""
    seed_R = torch.arange(64) % 8
    noise_RV = uniform(seed_R, torch.arange(64) // 8, torch.arange(4096)[None])
    off = torch.corrcoef(noise_RV.double()) - torch.eye(64)
    assert off.abs().max() < 6 / 4096**0.5
    assert len(set(noise_RV.sum(1).tolist())) == 64


def test_fine_end_of_the_noise_follows_its_law() -> None:
    """Of 4 million numbers, those below 2^-10, 2^-16 and 2^-20 are as many as chance makes them (6 sigma)."""
    numbers = uniform(torch.arange(64), torch.zeros(64, dtype=torch.int64), torch.arange(1 << 16)[None])
    for bits in (1, 10, 16, 20):
        expected = numbers.numel() / 2**bits
        assert abs(int((numbers < 2.0**-bits).sum()) - expected) < 6 * expected**0.5


def test_argmax_of_noise_samples_the_softmax() -> None:
    """20,000 positions of one seed."""
    num = 20_000
    logits_V = torch.randn(64, generator=torch.Generator().manual_seed(3))
    noise = gumbel_noise(torch.full((num,), 11), torch.arange(num), torch.arange(64)[None])
    counts = (logits_V + noise).argmax(1).bincount(minlength=64)
    assert chi_square(counts, logits_V.double().softmax(0) * num) < CHI_SQUARE_63


floats = st.sampled_from([-math.inf, -3.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, 2.0000002, 1e30])


@settings(max_examples=200, deadline=None)
@given(st.lists(floats, min_size=1, max_size=12), st.integers(1, 12))
def test_order_is_by_value_then_by_id(values: list[float], count: int) -> None:
    count = min(count, len(values))
    row = torch.tensor(values, dtype=torch.float32).tolist()
    ids = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    got_values, got_ids = ordered_top(torch.tensor([values]), count)
    assert got_ids.tolist() == [ids] and got_values.tolist() == [[row[i] for i in ids]]


def test_top_of_a_wide_row_with_ties_is_the_stable_sort() -> None:
    values = torch.randint(0, 40, (5, 3000), generator=torch.Generator().manual_seed(1)).float() - 20
    expected = values.sort(dim=1, descending=True, stable=True)
    for count in (1, 257, 3000):
        got = ordered_top(values, count)
        assert torch.equal(got[0], expected.values[:, :count]) and torch.equal(got[1], expected.indices[:, :count])


def kept_twin(logits: list[float], top_k: int, top_p: float, min_p: float) -> int:
    """How many of the tokens, best first, remain: one filter after the other, in plain Python."""
    ordered = sorted(logits, reverse=True)
    kept = [x for x in ordered if math.exp(x - ordered[0]) >= min_p]
    if top_k:
        kept = kept[:top_k]
    mass = math.fsum(math.exp(x - ordered[0]) for x in kept)
    before, count = 0.0, 0
    while count < len(kept) and (top_p == 1.0 or before < top_p * mass):
        before += math.exp(kept[count] - ordered[0])
        count += 1
    return max(count, 1)


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.integers(-12, 12).map(lambda i: i / 4), min_size=2, max_size=40),
    top_k=st.sampled_from([0, 1, 2, 3, 7, 40]),
    top_p=st.sampled_from([1e-9, 0.013, 0.31, 0.77, 0.9971, 1.0]),
    min_p=st.sampled_from([0.0, 0.0123, 0.345, 1.0]),
    width=st.integers(1, 40),
)
def test_filters_equal_the_twin_or_ask_for_more(logits: list[float], top_k: int, top_p: float, min_p: float, width: int) -> None:
    row = torch.tensor([logits])
    numbers = (
        torch.tensor([top_k]),
        torch.tensor([top_p], dtype=torch.float64),
        torch.tensor([min_p], dtype=torch.float64),
    )
    expected = kept_twin(logits, top_k, top_p, min_p)
    values, _ = ordered_top(row, min(width, len(logits)))
    count, settled = count_kept(values, log_normaliser(row), *numbers, len(logits))
    if settled:
        assert int(count) == expected
    else:
        assert width < len(logits) and (expected >= width or min_p > 0 or top_k > width)
    whole, _ = ordered_top(row, len(logits))
    count, settled = count_kept(whole, log_normaliser(row), *numbers, len(logits))
    assert bool(settled) and int(count) == expected


def test_a_top_k_of_the_slice_never_needs_more() -> None:
    row = torch.zeros(1, 1000)  # all equal: the worst case for a threshold
    values, ids = ordered_top(row, SLICE + 1)
    numbers = torch.tensor([SLICE]), torch.tensor([0.5], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64)
    count, settled = count_kept(values, log_normaliser(row), *numbers, 1000)
    assert settled.all() and count.tolist() == [SLICE // 2] and ids[0, :3].tolist() == [0, 1, 2]


def test_log_normaliser_is_logsumexp_and_knows_no_batch() -> None:
    rows = torch.randn(7, 5000, generator=torch.Generator().manual_seed(2)) * 10
    rows[3, 100:] = -torch.inf
    whole = log_normaliser(rows)
    torch.testing.assert_close(whole, torch.logsumexp(rows.double(), 1), rtol=1e-6, atol=1e-6)
    assert all(float(log_normaliser(rows[i : i + 1])) == float(whole[i]) for i in range(7))


@pytest.mark.parametrize("numbers", [(1.0, 0.0, 0.0), (1.7, 0.0, 0.0), (0.5, 0.3, 0.0), (1.0, -0.4, 1.5), (2.0, 1.0, -1.0)])
def test_penalties_equal_the_twin(numbers: tuple[float, float, float]) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(1, 30, generator=generator)
    prompt = torch.randint(0, 30, (9,), generator=generator).tolist()
    output = torch.randint(0, 12, (20,), generator=generator).tolist()
    repetition, frequency, presence = numbers
    expected: list[Any] = logits[0].tolist()
    for token in set(prompt + output):
        expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
    for token in set(output):
        expected[token] -= frequency * output.count(token) + presence
    count = torch.tensor(output).bincount(minlength=30)[None].float()
    seen = torch.tensor(prompt + output).bincount(minlength=30)[None] > 0
    penalise_(logits, seen, count, *(torch.tensor([n]) for n in numbers))
    assert logits[0].tolist() == pytest.approx(expected, abs=1e-6)
