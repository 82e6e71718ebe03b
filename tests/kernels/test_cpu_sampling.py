"""The C++ twins of the laws of sampling: equal to the bit where no logarithm is taken, and the same for a row in any company.

Every instruction set that this machine runs. Shape letters: R rows, V vocabulary, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halfbyte.kernels.cpu.library import CpuEngine, KernelsMissing, instruction_sets
from halfbyte.kernels.cpu.sampling import CpuSampling
from halfbyte.kernels.sampling import gumbel_noise, log_normaliser, ordered_top, uniform
from halfbyte.model_runner.device import HOST
from halfbyte.model_runner.logprobs import Listed, token_logprobs
from halfbyte.model_runner.request_rows import RequestRows
from halfbyte.model_runner.sampler import Sampled, Sampler
from halfbyte.model_runner.sampling_kernels import TORCH_SAMPLING, SamplingKernels
from halfbyte.types import NewRow, SamplingParams
from tests.kernels.logit_rows import rows_of, seeded, ulps

try:
    ISAS = instruction_sets()
except KernelsMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

# Widths around those at which the kernels cut: lanes, blocks, a part, and several parts.
WIDTHS = [1, 3, 16, 17, 255, 257, 1000, 16384, 16385, 40_001]


@pytest.fixture(scope="module", params=ISAS)
def kernels(request: pytest.FixtureRequest) -> Iterator[CpuSampling]:
    engine = CpuEngine(2, request.param)
    yield CpuSampling(engine)
    engine.close()


def every(logits_RV: Tensor) -> Tensor:
    return torch.arange(len(logits_RV))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_best_of_a_row_is_the_first_of_the_largest(kernels: CpuSampling, width: int) -> None:
    logits = rows_of(width)
    token, finite = kernels.best(logits)
    assert token.tolist() == logits.argmax(1).tolist() and finite.all()


@pytest.mark.parametrize("width", [1, 17, 1000, 16384, 40_001])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_rows_that_are_no_numbers_are_found_wherever_it_stands(kernels: CpuSampling, width: int, bad: float) -> None:
    for at in {0, width // 2, width - 1}:
        logits = torch.randn(3, width, generator=seeded(1))
        logits[1, at] = bad
        assert kernels.best(logits)[1].tolist() == [True, False, True]
        numbers = torch.ones(3), torch.arange(3), torch.arange(3)
        tokens = [kernels.best(logits)[0], kernels.noisy_best(logits, every(logits), *numbers)]
        tokens.append(kernels.ordered_top(logits, every(logits), None, min(width, 9))[1].flatten())
        assert all(((t >= 0) & (t < width)).all() for t in tokens)
    logits = torch.full((2, width), -torch.inf)
    logits[1, -1] = -3.0
    assert kernels.best(logits)[1].tolist() == [False, True]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_ordered_top_is_the_law_to_the_bit(kernels: CpuSampling, width: int) -> None:
    logits = rows_of(width)
    at = torch.tensor([4, 0, 1, 2, 3, 5, 4])
    divisors = [None, torch.tensor([1.0, 0.7, 3.1, 0.1, 2.0, 1e-5, 97.3])]
    for temperature in divisors:
        scaled = logits[at] if temperature is None else logits[at] / temperature[:, None]
        for count in sorted({min(n, width) for n in (1, 2, 50, 257, 4112, width)}):
            values, ids = kernels.ordered_top(logits, at, temperature, count)
            expected_values, expected_ids = ordered_top(scaled, count)
            assert torch.equal(ids, expected_ids), (width, count)
            assert torch.equal(values.view(torch.int32), expected_values.view(torch.int32))


def test_the_top_of_a_strided_view(kernels: CpuSampling) -> None:
    whole = torch.randn(9, 3000, generator=seeded(2))
    view = whole[::2, 100:2100]
    got, expected = kernels.ordered_top(view, torch.tensor([4, 1]), None, 60), ordered_top(view[[4, 1]], 60)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("width", WIDTHS)
def test_the_normaliser_is_logsumexp(kernels: CpuSampling, width: int) -> None:
    logits = rows_of(width)[[0, 1, 2, 3, 5]]
    temperature = torch.tensor([1.0, 0.3, 1.0, 2.0, 50.0])
    scaled = logits / temperature[:, None]
    got = kernels.log_normaliser(logits, every(logits), temperature)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, log_normaliser(scaled), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got, torch.logsumexp(scaled.double(), 1), rtol=1e-7, atol=4e-7)


def test_the_noise_is_the_laws(kernels: CpuSampling) -> None:
    seed, position = torch.tensor([0, -1, 2**63 - 1, -(2**63), 7]), torch.tensor([0, 1, 2**31, 5, 5])
    ids = torch.arange(100_003).expand(5, -1)
    got = kernels.gumbel_noise(seed, position, ids)
    exact = -torch.log(-torch.log1p(-uniform(seed, position, ids).double()))
    assert ulps(got, exact) <= 2.0
    assert ulps(got, gumbel_noise(seed, position, ids)) <= 3.0
    few = torch.randint(0, 100_003, (5, 19), generator=seeded(3))
    assert torch.equal(kernels.gumbel_noise(seed, position, few), got.gather(1, few))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_the_noisy_best_is_the_argmax_of_the_sums(kernels: CpuSampling, width: int, scale: float) -> None:
    """Against the same noise, written out: what is skipped could not have won."""
    num = 12
    logits = torch.randn(4, width, generator=seeded(4)) * scale
    logits[1, : width // 2] = -torch.inf
    at = torch.randint(0, 4, (num,), generator=seeded(5))
    temperature = torch.tensor([1.0, 0.37, 1.9]).repeat(num // 3)
    seed, position = torch.arange(num) % 5, torch.arange(num) * 3
    noise = kernels.gumbel_noise(seed, position, torch.arange(width).expand(num, -1))
    expected = (logits[at] / temperature[:, None] + noise).argmax(1)
    assert torch.equal(kernels.noisy_best(logits, at, temperature, seed, position), expected)


def test_a_rank_counts_what_is_strictly_larger(kernels: CpuSampling) -> None:
    for width in WIDTHS:
        logits = rows_of(width)
        token = torch.randint(0, width, (len(logits),), generator=seeded(6))
        assert torch.equal(kernels.rank(logits, token), TORCH_SAMPLING.rank(logits, token))


def results(kernels: CpuSampling, logits: Tensor, at: Tensor, temperature: Tensor, seed: Tensor, width: int) -> list[Tensor]:
    return [
        kernels.noisy_best(logits, at, temperature, seed, seed * 3),
        *kernels.ordered_top(logits, at, temperature, width),
        kernels.log_normaliser(logits, at, temperature),
        kernels.rank(logits[at], seed % logits.shape[1]),
        *kernels.best(logits[at]),
    ]


def test_a_row_knows_neither_its_company_nor_the_threads() -> None:
    logits = torch.randn(9, 20_011, generator=seeded(7)) * 3
    temperature, seed = torch.linspace(0.3, 2.0, 9), torch.arange(9) * 11
    for isa in ISAS:
        engines = [CpuEngine(num, isa) for num in (1, 4)]
        whole, other = (results(CpuSampling(engine), logits, every(logits), temperature, seed, 99) for engine in engines)
        assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))
        for i in range(9):
            alone = results(CpuSampling(engines[0]), logits, torch.tensor([i]), temperature[i : i + 1], seed[i : i + 1], 99)
            assert all(torch.equal(a[i : i + 1], b) for a, b in zip(whole, alone, strict=True))
        for engine in engines:
            engine.close()


def sample(
    kernels: SamplingKernels, logits: Tensor, asked: list[SamplingParams], *, keep: bool = False, first: int = 0
) -> Sampled:
    """Rows of 1 to 5 tokens, as many as their number, counted from `first`, says."""
    rows = RequestRows(len(asked), 8, logits.shape[1], HOST)
    row_R = [rows.add(NewRow(str(i), [0] * (1 + i % 5), 1, 0, [[]], p, frozenset())) for i, p in enumerate(asked, first)]
    rows.apply()
    return Sampler(rows, keep_processed=keep, kernels=kernels).sample(logits.clone(), np.array(row_R))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 50},
    {"top_p": 0.9},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    {"min_p": 0.05},
    {"temperature": 1.7},
    {"top_p": 0.5, "repetition_penalty": 1.2},
    {"temperature": 2.0, "top_p": 0.99},
    {"top_k": 700, "temperature": 0.8},
]


@pytest.mark.parametrize("width", [300, 9000])
def test_the_sampler_chooses_what_the_laws_choose(kernels: CpuSampling, width: int) -> None:
    num = 1000
    logits = torch.randn(num, width, generator=seeded(8)) * 3
    asked = [SamplingParams(**{"seed": i, **OPTIONS[i % len(OPTIONS)]}) for i in range(num)]
    by_law, ours = sample(TORCH_SAMPLING, logits, asked), sample(kernels, logits, asked)
    assert (by_law.token_R == ours.token_R).float().mean() >= 0.999
    assert ours.finite_R.all()
    for i in range(0, num, 37):
        position = slice(i, i + 1)
        alone = sample(kernels, logits[position], asked[position], first=i)
        assert alone.token_R[0] == ours.token_R[i]


def test_processed_logits_are_the_laws(kernels: CpuSampling) -> None:
    logits = torch.randn(20, 3000, generator=seeded(9)) * 3
    asked = [SamplingParams(**{"seed": i, **OPTIONS[i % len(OPTIONS)]}) for i in range(20)]
    by_law, ours = (sample(k, logits, asked, keep=True).processed_RV for k in (TORCH_SAMPLING, kernels))
    assert by_law is not None and ours is not None and torch.equal(by_law, ours)


def test_log_probabilities_are_the_laws(kernels: CpuSampling) -> None:
    logits = torch.randn(7, 5000, generator=seeded(10)) * 4
    logits[3, 1000:] = -torch.inf
    listed: list[Listed] = [0, 1, 20, 257, -1, [5, -1, 4999], 5]
    token = torch.tensor([3, 999, 12, 77, 4999, 0, 1])
    for normalise in (True, False):
        by_law, ours = (token_logprobs(logits, token, listed, normalise=normalise, kernels=k) for k in (TORCH_SAMPLING, kernels))
        for a, b in zip(by_law, ours, strict=True):
            assert (a.token_id, a.rank, a.top_token_ids) == (b.token_id, b.rank, b.top_token_ids)
            assert [b.logprob, *b.top_logprobs] == pytest.approx([a.logprob, *a.top_logprobs], abs=2e-6)
        alone = [
            token_logprobs(logits[i : i + 1], token[i : i + 1], listed[i : i + 1], normalise=normalise, kernels=kernels)
            for i in range(7)
        ]
        assert [one for [one] in alone] == ours
    assert math.fsum(
        math.exp(x) for x in token_logprobs(logits, token, listed, kernels=kernels)[4].top_logprobs
    ) == pytest.approx(1.0)
