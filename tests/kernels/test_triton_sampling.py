"""The Triton twins of the laws of sampling, in the interpreter: equal to the bit where no logarithm or exponential is taken.

A row must give the same in any company, however it is cut. Shape letters: R rows, N rows that are asked for, V vocabulary,
K candidates, L tokens of a row.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halfbyte.kernels import sampling as law
from halfbyte.model_runner.device import HOST
from halfbyte.model_runner.request_rows import RequestRows
from halfbyte.model_runner.sampler import Sampler
from halfbyte.model_runner.sampling_kernels import TORCH_SAMPLING
from halfbyte.types import NewRow, SamplingParams
from tests.kernels.logit_rows import rows_of, seeded, ulps
from tests.kernels.triton_interpreter import interpreted, jit, tl

sampling, filters, penalties, noise, nucleus = interpreted(
    *(f"halfbyte.kernels.triton.{name}" for name in ("sampling", "filters", "penalties", "noise", "nucleus"))
)
KERNELS = sampling.TritonSampling()
plain_ordered_top = sampling.TritonSampling.ordered_top
uniform = noise._uniform

# Around the borders of a part, which is 256 tokens in these tests.
WIDTHS = [1, 3, 255, 256, 257, 1000]
PART = 256


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "PART", PART)


AT = torch.tensor([4, 0, 1, 2, 3, 5, 4])
TEMPERATURE = torch.tensor([1.0, 0.7, 3.1, 0.1, 2.0, 1e-5, 97.3])
SEED = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789, 77])
POSITION = torch.tensor([0, 1, 7, 4096, 2**31, 3, 3])


@pytest.mark.parametrize("width", WIDTHS)
def test_the_best_of_a_row_is_the_first_of_the_largest(width: int) -> None:
    logits = rows_of(width)
    token, finite = KERNELS.best(logits)
    assert (token.dtype, finite.dtype) == (torch.int64, torch.bool)
    assert token.tolist() == logits.argmax(1).tolist() and finite.all()


@pytest.mark.parametrize("width", [1, 257, 1000])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_rows_that_are_no_numbers_are_found_wherever_it_stands(width: int, bad: float) -> None:
    for at in {0, width // 2, width - 1}:
        logits = torch.randn(3, width, generator=seeded(1))
        logits[1, at] = bad
        token, finite = KERNELS.best(logits)
        assert finite.tolist() == [True, False, True] and token.tolist() == logits.argmax(1).tolist()
        every = torch.arange(3)
        tokens = [KERNELS.noisy_best(logits, every, torch.ones(3), every, every)]
        tokens.append(KERNELS.ordered_top(logits, every, None, min(width, 9))[1].flatten())
        assert all(((t >= 0) & (t < width)).all() for t in tokens)
    logits = torch.full((2, width), -torch.inf)
    logits[1, -1] = -3.0
    assert KERNELS.best(logits)[1].tolist() == [False, True]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_ordered_top_is_the_law_to_the_bit(width: int) -> None:
    logits = rows_of(width)
    for temperature in (None, TEMPERATURE):
        scaled = logits[AT] if temperature is None else logits[AT] / temperature[:, None]
        for count in sorted({min(n, width) for n in (1, 2, 50, 257, width)}):
            values, ids = KERNELS.ordered_top(logits, AT, temperature, count)
            expected_values, expected_ids = law.ordered_top(scaled, count)
            assert torch.equal(ids, expected_ids), (width, count)
            assert torch.equal(values.view(torch.int32), expected_values.view(torch.int32))


def test_the_top_of_a_strided_view_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "rows_at_a_time", lambda logits: 2)
    view = torch.randn(9, 800, generator=seeded(2))[::2, 100:500]
    at = torch.tensor([4, 1, 0])
    got, expected = KERNELS.ordered_top(view, at, None, 60), law.ordered_top(view[at], 60)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@jit
def draw(seed: tl.tensor, position: tl.tensor, ids: tl.tensor, out: tl.tensor, NUM: tl.constexpr) -> None:
    k = tl.arange(0, NUM)
    tl.store(out + k, uniform(tl.load(seed), tl.load(position), tl.load(ids + k)))


def test_uniform_numbers_are_the_laws_to_the_bit() -> None:
    ids = torch.cat(
        (torch.arange(500), torch.tensor([2**18 - 1, 2**31 - 1]), torch.randint(0, 2**18, (522,), generator=seeded(3)))
    )
    for seed, position in zip(SEED, POSITION, strict=True):
        found = torch.empty(1024)
        draw[(1,)](seed[None], position[None], ids, found, 1024)
        assert torch.equal(found, law.uniform(seed[None], position[None], ids[None])[0])


@pytest.mark.parametrize("bits", [0, 1, 5, 1 << 7, 1 << 16, 1 << 30, (1 << 31) - 1], ids=hex)
def test_noise_is_fine_at_both_ends(bits: int) -> None:
    """Logarithms of another library: of the same uniform number, some units in the last place."""
    u = torch.tensor([(bits + 0.5) * 2.0**-31]).clamp(max=1.0 - 2.0**-24)
    rest = torch.empty(1)
    minus_log[(1,)](u, rest)
    assert ulps(-rest.log(), -(-torch.log1p(-u)).log()) <= 4
    assert (rest.double() + torch.log1p(-u.double())).abs() <= 4 * 2.0**-24 * rest.double()


minus_log_of_rest = noise._minus_log_of_rest


@jit
def minus_log(u: tl.tensor, out: tl.tensor) -> None:
    i = tl.arange(0, 1)
    tl.store(out + i, minus_log_of_rest(tl.load(u + i)))


@pytest.mark.parametrize("count", [1, 50, 257, 300])
def test_gumbel_noise_is_the_laws_but_for_logarithms(count: int) -> None:
    ids = torch.randint(0, 2**18, (len(SEED), count), generator=seeded(4))
    found = KERNELS.gumbel_noise(SEED, POSITION, ids)
    assert found.isfinite().all() and ulps(found, law.gumbel_noise(SEED, POSITION, ids)) <= 4
    one_by_one = [KERNELS.gumbel_noise(SEED[i : i + 1], POSITION[i : i + 1], ids[i : i + 1]) for i in range(len(SEED))]
    assert torch.equal(found, torch.cat(one_by_one))
    assert torch.equal(found, KERNELS.gumbel_noise(SEED, POSITION, ids.flip(1)).flip(1))


@pytest.mark.parametrize("width", WIDTHS)
def test_noisy_best_is_the_best_with_the_noise(width: int) -> None:
    """With the kernel's own noise, so that the choice is compared to the bit; rows of all kinds at all temperatures."""
    logits = rows_of(width, seed=5)
    every = torch.arange(width).expand(len(AT), -1)
    noise_NV = KERNELS.gumbel_noise(SEED, POSITION, every)
    expected = (logits[AT] / TEMPERATURE[:, None] + noise_NV).argmax(1)
    # Seeds and positions are columns of a table.
    table = torch.stack((SEED, POSITION), 1)
    assert torch.equal(KERNELS.noisy_best(logits, AT, TEMPERATURE, table[:, 0], table[:, 1]), expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_normalisers_are_the_laws(width: int) -> None:
    """Sums in float64 of exponentials in float32 that are relative to another part's largest: some units of float32."""
    logits = rows_of(width, seed=6)
    for temperature in (None, TEMPERATURE):
        found = KERNELS.log_normaliser(logits, AT, temperature)
        expected = TORCH_SAMPLING.log_normaliser(logits, AT, temperature)
        assert found.dtype == torch.float64
        assert ulps(found, expected) <= 2


def test_parts_without_tokens_weigh_nothing() -> None:
    wide = torch.tensor([[-torch.inf] * PART + [1.0] * PART + [-torch.inf, torch.nan]])
    found = KERNELS.log_normaliser(wide[:, :-1], torch.tensor([0]), None)
    assert found.tolist() == pytest.approx([1.0 + math.log(PART)], rel=1e-15)
    assert KERNELS.log_normaliser(wide, torch.tensor([0]), None).isnan().all()


def test_a_rank_counts_what_is_strictly_larger() -> None:
    for width in WIDTHS:
        logits = rows_of(width)
        token = torch.randint(0, width, (len(logits),), generator=seeded(7))
        assert torch.equal(KERNELS.rank(logits, token), TORCH_SAMPLING.rank(logits, token))


def results(logits: Tensor, at: Tensor, temperature: Tensor, seed: Tensor) -> list[Tensor]:
    return [
        KERNELS.noisy_best(logits, at, temperature, seed, seed * 3),
        *KERNELS.ordered_top(logits, at, temperature, 99),
        KERNELS.log_normaliser(logits, at, temperature),
        KERNELS.rank(logits[at], seed % logits.shape[1]),
        *KERNELS.best(logits[at]),
    ]


def test_a_row_knows_nothing_of_its_company() -> None:
    logits = torch.randn(5, 1031, generator=seeded(8)) * 3
    temperature, seed = torch.linspace(0.3, 2.0, 5), torch.arange(5) * 11
    whole = results(logits, torch.arange(5), temperature, seed)
    for i in range(5):
        alone = results(logits, torch.tensor([i]), temperature[i : i + 1], seed[i : i + 1])
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(whole, alone, strict=True))


def test_no_rows_are_no_launch() -> None:
    logits, none = rows_of(9), torch.empty(0, dtype=torch.int64)
    assert [len(found) for found in results(logits, none, torch.empty(0), none)] == [0] * 7


def test_choices_cannot_tell_how_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = rows_of(1000)
    few = KERNELS.best(logits)[0], KERNELS.noisy_best(logits, AT, TEMPERATURE, SEED, POSITION)
    monkeypatch.setattr(sampling, "PART", 64)
    assert torch.equal(KERNELS.best(logits)[0], few[0])
    assert torch.equal(KERNELS.noisy_best(logits, AT, TEMPERATURE, SEED, POSITION), few[1])


FILTERS: list[tuple[int, float, float]] = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (40, 1.0, 0.0),
    (5000, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.3, 0.0),
    (0, 0.0, 0.0),
    (0, 0.999, 0.0),
    (20, 0.8, 0.0),
    (0, 1.0, 0.1),
    (0, 1.0, 1.0),
    (0, 0.95, 0.02),
    (30, 0.95, 0.3),
    (700, 0.95, 0.001),
]


@pytest.mark.parametrize("num_candidates", [1, 50, 257, 512, 1000])
def test_filters_keep_what_the_law_keeps(num_candidates: int) -> None:
    """Random logits: no mass lies where the order of a sum could be seen."""
    num = len(FILTERS)
    logits = torch.randn(num, 1000, generator=seeded(9)) * torch.linspace(0.5, 6, num)[:, None]
    values, _ = law.ordered_top(logits, num_candidates)
    normaliser = law.log_normaliser(logits)
    top_k = torch.tensor([k for k, _, _ in FILTERS])
    shares = torch.tensor([[p, m] for _, p, m in FILTERS], dtype=torch.float64)  # as columns of a table
    asked = values, normaliser, top_k, shares[:, 0], shares[:, 1], 1000
    count, settled = filters.count_kept(*asked)
    expected_count, expected_settled = law.count_kept(*asked)
    assert count.tolist() == expected_count.tolist() and settled.tolist() == expected_settled.tolist()
    assert num_candidates == 1 or len(set(count.tolist())) > 1
    for i in range(0, num, 5):
        one = slice(i, i + 1)
        alone = filters.count_kept(values[one], normaliser[one], top_k[one], shares[one, 0], shares[one, 1], 1000)
        assert (alone[0][0], alone[1][0]) == (count[i], settled[i])


def test_filters_of_rows_with_few_tokens_left() -> None:
    values = torch.full((3, 20), -torch.inf)
    values[0, 0], values[1, :3], values[2, :] = 2.0, torch.tensor([1.0, 1.0, 0.0]), 0.0
    normaliser = values.double().logsumexp(1)
    numbers = torch.tensor([0, 2, 0]), torch.tensor([0.9, 0.6, 0.49], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    count, settled = filters.count_kept(values, normaliser, *numbers, 20)
    expected = law.count_kept(values, normaliser, *numbers, 20)
    assert count.tolist() == expected[0].tolist() == [1, 2, 10] and settled.tolist() == expected[1].tolist()


@pytest.mark.parametrize("tokens", [16, 1024])
def test_penalties_are_the_law_to_the_bit(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with no output, with no prompt to speak of, with one token again and again; rows in between ask for nothing."""
    monkeypatch.setattr(penalties, "_TOKENS", tokens)
    width, max_len = 77, 60
    logits = torch.cat((rows_of(width, seed=10), torch.randn(2, width, generator=seeded(11))))
    token_ids = torch.randint(0, width, (9, max_len), generator=seeded(12), dtype=torch.int32)
    token_ids[3, 10:50] = 5
    at, row = torch.tensor([6, 0, 4, 1, 2]), torch.tensor([3, 8, 0, 5, 1])
    num_prompt, num_tokens = torch.tensor([10, 60, 1, 1, 33]), torch.tensor([60, 60, 1, 2, 40])
    table = torch.tensor([[1.3, 0.5, 0.2], [0.7, 0.0, 0.0], [1.0, 2.0, -1.0], [2.0, -0.3, 0.0], [1.1, 0.1, 1.5]])
    repetition, frequency, presence = table.unbind(1)
    found, want = logits.clone(), logits.clone()
    penalties.penalise_(found, at, token_ids, row, num_prompt, num_tokens, repetition, frequency, presence, 60)

    position = torch.arange(max_len)
    is_token = position < num_tokens[:, None]
    is_output = is_token & (position >= num_prompt[:, None])
    seen, count = (torch.zeros(5, width).scatter_add(1, token_ids[row].long(), which.float()) for which in (is_token, is_output))
    edited = logits[at]
    law.penalise_(edited, seen > 0, count, repetition, frequency, presence)
    want[at] = edited
    assert torch.equal(found, want) and torch.equal(found[[3, 5, 7]], logits[[3, 5, 7]])
    assert not torch.equal(found[at], logits[at])


@pytest.fixture
def small_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of these tests take several."""
    monkeypatch.setattr(nucleus, "_TOKENS_AT_A_TIME", 256)


@pytest.fixture
def laws_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law with the kernel's noise, so that choices are compared to the bit."""
    monkeypatch.setattr(
        law, "gumbel_noise", lambda seed, position, ids: KERNELS.gumbel_noise(seed, position, ids.expand(len(seed), -1))
    )


@pytest.mark.parametrize("width", [1, 5, 256, 700])
def test_unsettled_rows_choose_without_a_sort(width: int, small_loads: None, laws_noise: None) -> None:
    """Every filter on flat rows, on steep ones, on rows of few tokens, and on rows full of ties, which the id alone cuts."""
    num = len(FILTERS)
    logits = torch.randn(5, width, generator=seeded(13)) * torch.tensor([[0.1], [1.0], [5.0], [3.0], [0.0]])
    logits[2, torch.rand(width, generator=seeded(14)) < 0.9] = -torch.inf
    logits[2, 0], logits[3] = 1.0, logits[3].round()
    top_k = torch.tensor([k for k, _, _ in FILTERS])
    top_p, min_p = torch.tensor([[p, m] for _, p, m in FILTERS], dtype=torch.float64).unbind(1)
    # Shares that no sum of equal masses reaches exactly, where rounding would decide.
    shares = [top_k, torch.where(top_p < 1, top_p + 1e-4, top_p), min_p]
    seed, position, temperature = torch.arange(num) * 7 - 3, torch.arange(num), torch.linspace(0.5, 2, num)
    settled = torch.arange(num) % 5 == 4
    for row in range(5):
        at = torch.full((num,), row)
        found, want = torch.full((2, num), -1)
        for choose_, token in ((nucleus.choose_unsettled_, found), (law.choose_unsettled_, want)):
            choose_(token, settled, logits, at, temperature, *shares, seed, position)
        assert found.tolist() == want.tolist() and (found < 0).tolist() == settled.tolist()


@pytest.mark.parametrize("most", [2.5, 0.0, -1.5])
def test_min_p_cuts_between_neighbours(most: float, small_loads: None, laws_noise: None) -> None:
    """A min-p of 1 keeps what equals the greatest, down to the last id, and not what is a unit in the last place below: not even
    the first id, whose key is next to that of the last one that is kept where ids take all of their bits (a width of 256)."""
    num, width = 64, 256
    greatest = torch.tensor(most)
    logits = torch.full((1, width), -40.0)
    logits[0, [7, width - 1]] = greatest
    logits[0, [0, 9]] = torch.nextafter(greatest, torch.tensor(-torch.inf))
    seed = torch.arange(num)
    top_k, at, top_p = torch.zeros_like(seed), torch.zeros_like(seed), torch.ones(num, dtype=torch.float64)
    found, want = torch.full((2, num), -1)
    for choose_, token in ((nucleus.choose_unsettled_, found), (law.choose_unsettled_, want)):
        choose_(token, seed < 0, logits, at, torch.ones(num), top_k, top_p, top_p, seed, seed)
    assert found.tolist() == want.tolist() and set(found.tolist()) == {7, width - 1}


def test_min_p_cuts_where_the_share_is(small_loads: None, laws_noise: None) -> None:
    """Tokens on both sides of each share of the greatest, as near as logarithms of two libraries may differ (4 units in the last
    place of the logit); as likely as each other, so that both would be chosen if both were kept."""
    num, width = 64, 300
    seed = torch.arange(num)
    top_k, at, top_p = torch.zeros_like(seed), torch.zeros_like(seed), torch.ones(num, dtype=torch.float64)
    for share in (0.9, 0.5, 0.1, 0.01):
        logits = torch.full((1, width), -40.0)
        least = math.log(share) + 1.0
        near = 4 * 2.0**-23 * max(abs(math.log(share)), abs(least), 1.0)
        logits[0, 5] = 1.0
        logits[0, 100:200], logits[0, 200:] = least + near, least - near
        found, want = torch.full((2, num), -1)
        for choose_, token in ((nucleus.choose_unsettled_, found), (law.choose_unsettled_, want)):
            choose_(token, seed < 0, logits, at, torch.ones(num), top_k, top_p, torch.full_like(top_p, share), seed, seed)
        assert found.tolist() == want.tolist() and set(found.tolist()) <= {5, *range(100, 200)} and len(set(found.tolist())) > 20


FILTERED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 50},
    {"top_p": 0.9},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    {"min_p": 0.05},
    {"temperature": 2.0, "top_p": 0.99},
    {"top_k": 400, "temperature": 1.8},
    {"min_p": 0.001, "temperature": 2.0, "top_p": 0.9},
    {"top_p": 0.5, "repetition_penalty": 1.2, "frequency_penalty": 0.7, "logit_bias": {3: 5.0}},
    {"presence_penalty": 0.5, "temperature": 0.0, "min_tokens": 3},
]


@pytest.mark.parametrize("keep", [False, True], ids=["tokens", "processed"])
def test_the_sampler_chooses_what_the_laws_choose(
    keep: bool, small_loads: None, laws_noise: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among no more candidates than the first slice has, but where what is kept is wanted."""
    width, num = 1000, 4 * len(FILTERED)
    widths = []
    monkeypatch.setattr(
        sampling.TritonSampling, "ordered_top", lambda *given: widths.append(given[-1]) or plain_ordered_top(KERNELS, *given[1:])
    )
    logits = torch.randn(num, width, generator=seeded(15)) * 2
    rows = RequestRows(num, 8, width, HOST)
    asked = [SamplingParams(**{"seed": i, **FILTERED[i % len(FILTERED)]}) for i in range(num)]
    row_R = np.array([rows.add(NewRow(str(i), [i, 2, 2], 1, 0, [[]], p, frozenset({2}))) for i, p in enumerate(asked)])
    rows.apply()
    ours, laws = (
        Sampler(rows, keep_processed=keep, kernels=kernels).sample(logits.clone(), row_R) for kernels in (KERNELS, TORCH_SAMPLING)
    )
    assert ours.token_R.tolist() == laws.token_R.tolist() and ours.finite_R.all()
    assert set(widths) == ({law.SLICE + 1, width} if keep else {law.SLICE + 1})
    if keep:
        assert ours.processed_RV is not None and laws.processed_RV is not None
        assert torch.equal(ours.processed_RV, laws.processed_RV)
