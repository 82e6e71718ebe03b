"""Noise, filters and the sampler's pipeline against obvious twins; choices that depend on nothing but their own row.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfbyte.kernels.sampling import SLICE, gumbel_noise, mix
from halfbyte.model_runner.request_rows import RequestRows
from halfbyte.model_runner.sampler import Sampler, unpack_bits
from halfbyte.types import NewRow, SamplingParams

# Chi-square with 63 degrees of freedom exceeds this once in a million.
CHI_SQUARE_63 = 127.0


def sampler_for(
    params: list[SamplingParams],
    *,
    tokens: list[list[int]] | None = None,
    num_prompt: int = 1,
    stop: frozenset[int] = frozenset(),
    bad_words: list[list[int]] | None = None,
    keep_processed: bool = False,
) -> tuple[Sampler, np.ndarray]:
    """A sampler over rows that hold `tokens` (of which `num_prompt` are the prompt) and ask for `params`."""
    rows = RequestRows(len(params), 64)
    index = []
    for i, p in enumerate(params):
        ids = tokens[i] if tokens else [0]
        index.append(rows.add(NewRow(str(i), ids, num_prompt, 0, [[]], p, stop, bad_words or [])))
    return Sampler(rows, keep_processed=keep_processed), np.array(index)


def choose(logits_RV: Tensor, params: list[SamplingParams], **options: Any) -> list[int]:
    sampler, row_R = sampler_for(params, **options)
    chosen: list[int] = sampler.sample(logits_RV.clone(), row_R).token_R.tolist()
    return chosen


def twin_filter(logits_V: Tensor, p: SamplingParams) -> Tensor:
    """The obvious way: sort everything. Returns logits after temperature, dropped ones -inf."""
    scaled_V = logits_V / p.temperature
    prob_V = scaled_V.softmax(0)
    keep_V = prob_V >= prob_V.max() * p.min_p if p.min_p else torch.ones_like(prob_V, dtype=torch.bool)
    if p.top_k:
        keep_V &= scaled_V >= scaled_V.sort(descending=True).values[min(p.top_k, len(scaled_V)) - 1]
    if p.top_p < 1.0:
        kept_V = torch.where(keep_V, prob_V, 0.0).double()
        order = kept_V.sort(descending=True)
        before = order.values.cumsum(0) - order.values
        least = order.values[before < p.top_p * kept_V.sum()].min()
        keep_V &= kept_V >= least
    return scaled_V.masked_fill(~keep_V, -torch.inf)


def twin_token(logits_V: Tensor, p: SamplingParams, position: int) -> int:
    if p.greedy:
        return int(logits_V.argmax())
    noise = gumbel_noise(torch.tensor([p.seed or 0]), torch.tensor([position]), torch.arange(len(logits_V))[None])[0]
    return int((twin_filter(logits_V, p) + noise).argmax())


def test_mix_is_splitmix64() -> None:
    """The finaliser's first outputs for the state 0 advanced by the golden gamma, as published with the algorithm."""
    golden = 0x9E3779B97F4A7C15
    states = [(golden * i) % 2**64 for i in (1, 2, 3)]
    signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in states])
    assert [x % 2**64 for x in mix(signed).tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_noise_depends_on_seed_position_and_token_only() -> None:
    seed_R, position_R = torch.tensor([5, 5, 6, -7]), torch.tensor([1, 2, 1, 1])
    ids_1V = torch.arange(50)[None]
    noise_RV = gumbel_noise(seed_R, position_R, ids_1V)
    assert noise_RV.isfinite().all()
    assert len({tuple(row) for row in noise_RV.tolist()}) == 4
    shuffled = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    alone = gumbel_noise(seed_R[2:3], position_R[2:3], shuffled[None])
    assert torch.equal(alone[0], noise_RV[2, shuffled])


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.05}, {"temperature": 0.5}])
def test_choices_follow_the_distribution(params: dict[str, Any]) -> None:
    """20,000 positions of one seed: counts agree with the softmax of what is kept (chi-square)."""
    num = 20_000
    logits_V = torch.randn(64, generator=torch.Generator().manual_seed(3))
    p = SamplingParams(seed=11, **params)
    expected = twin_filter(logits_V, p).double().softmax(0) * num
    noise = gumbel_noise(torch.full((num,), 11), torch.arange(num), torch.arange(64)[None])
    counts = (twin_filter(logits_V, p) + noise).argmax(1).bincount(minlength=64)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()) < CHI_SQUARE_63


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
                "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
                "top_k": st.sampled_from([0, 1, 5, 255, 256, 300, 10_000]),
                "min_p": st.sampled_from([0.0, 0.1, 1.0]),
                "seed": st.integers(-(2**63), 2**63 - 1).filter(lambda s: s != -1),
            }
        ),
        min_size=1,
        max_size=6,
    ),
    vocab_size=st.sampled_from([5, SLICE, SLICE + 1, 1000]),
    scale=st.sampled_from([0.01, 1.0, 8.0]),
    data_seed=st.integers(0, 1000),
)
def test_any_mix_equals_the_twin(rows: list[dict[str, Any]], vocab_size: int, scale: float, data_seed: int) -> None:
    """Whatever the batch mates, whether the slice suffices or the whole vocabulary is sorted."""
    logits_RV = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(data_seed)) * scale
    params = [SamplingParams(**row) for row in rows]
    chosen = choose(logits_RV, params)
    for token, logits_V, p in zip(chosen, logits_RV, params, strict=True):
        if token != twin_token(logits_V, p, position=1):
            # the last kept token's cumulative mass may round to either side of p
            assert p.top_p < 1.0 and near_the_edge(logits_V, p), (token, p)
    assert chosen == [choose(logits_RV[i : i + 1], [p])[0] for i, p in enumerate(params)]


def near_the_edge(logits_V: Tensor, p: SamplingParams) -> bool:
    tighter, wider = (twin_filter(logits_V, p.clone(top_p=min(1.0, p.top_p * f))) for f in (1 - 1e-4, 1 + 1e-4))
    return bool((tighter.isfinite() != wider.isfinite()).any())


def test_equal_logits_stay_together_and_the_lowest_id_wins() -> None:
    flat = torch.zeros(1, 600)
    assert choose(flat, [SamplingParams(temperature=0.0)]) == [0]
    seen = {choose(flat, [SamplingParams(top_k=3, seed=s)])[0] for s in range(200)}
    assert len(seen) > 100  # all 600 tie with the third


def test_greedy_ignores_filters_and_random_respects_penalties() -> None:
    logits = torch.tensor([[2.0, 1.9, 1.0, 0.0]])
    repeat = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert choose(logits, [repeat], tokens=[[0]]) == [1]  # the prompt counts
    assert choose(logits, [SamplingParams(temperature=0.0, frequency_penalty=0.5)], tokens=[[0]]) == [0]  # the prompt does not
    assert choose(logits, [SamplingParams(temperature=0.0, frequency_penalty=0.5)], tokens=[[3, 0]]) == [1]
    assert choose(logits, [SamplingParams(temperature=0.0, presence_penalty=0.2)], tokens=[[3, 0, 0]]) == [1]
    twice = SamplingParams(temperature=0.0, frequency_penalty=0.06)
    assert choose(logits, [twice], tokens=[[3, 0]]) == [0] and choose(logits, [twice], tokens=[[3, 0, 0]]) == [1]


def test_repetition_penalty_pushes_negative_logits_down() -> None:
    logits = torch.tensor([[-1.0, -1.5, -9.0]])
    assert choose(logits, [SamplingParams(temperature=0.0, repetition_penalty=2.0)], tokens=[[0]]) == [1]


def test_bias_allowed_and_minimum_length() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    assert choose(logits, [SamplingParams(temperature=0.0, logit_bias={3: 50.0})]) == [3]
    assert choose(logits, [SamplingParams(temperature=0.0, allowed_token_ids=[1, 2])]) == [1]
    early = SamplingParams(temperature=0.0, min_tokens=2)
    assert choose(logits, [early], tokens=[[9, 1]], stop=frozenset({0})) == [1]
    assert choose(logits, [early], tokens=[[9, 1, 1]], stop=frozenset({0})) == [0]


def test_bad_words_block_only_their_last_token() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    greedy = [SamplingParams(temperature=0.0)]
    assert choose(logits, greedy, tokens=[[9, 2]], bad_words=[[2, 0]]) == [1]
    assert choose(logits, greedy, tokens=[[9, 3]], bad_words=[[2, 0]]) == [0]
    assert choose(logits, greedy, tokens=[[2]], bad_words=[[2, 0]]) == [0]  # a word does not begin in the prompt
    assert choose(logits, greedy, bad_words=[[0]]) == [1]


def test_grammar_mask_bits() -> None:
    words = torch.tensor([[0b101, 0], [-1, 1]], dtype=torch.int32)
    bits = unpack_bits(words, 33)
    assert bits[0].nonzero().flatten().tolist() == [0, 2]
    assert bits[1].all()
    sampler, row_R = sampler_for([SamplingParams(temperature=0.0)] * 2)
    logits = torch.arange(33.0).repeat(2, 1)
    assert sampler.sample(logits, row_R, words).token_R.tolist() == [2, 32]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_no_numbers_are_named(bad: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    params = [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(seed=2, top_p=0.5)]
    sampler, row_R = sampler_for(params)
    sampled = sampler.sample(logits.clone(), row_R)
    assert sampled.finite_R.tolist() == [True, False, True]
    logits[1] = 0.0
    assert sampled.token_R[[0, 2]].tolist() == [choose(logits, params)[0], choose(logits, params)[2]]


def test_processed_logits_are_what_was_sampled_from() -> None:
    p = SamplingParams(temperature=0.5, top_k=2, seed=0)
    sampler, row_R = sampler_for([p], keep_processed=True)
    processed = sampler.sample(torch.tensor([[1.0, 3.0, 2.0]]), row_R).processed_RV
    assert processed is not None and processed.tolist() == [[-torch.inf, 6.0, 4.0]]
