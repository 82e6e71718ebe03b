"""The sampler's pipeline: every option and any mix of them against an obvious twin, in any batch.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfbyte.kernels.sampling import SLICE, gumbel_noise
from halfbyte.model_runner.device import HOST
from halfbyte.model_runner.logit_edits import unpack_bits
from halfbyte.model_runner.request_rows import RequestRows
from halfbyte.model_runner.sampler import Sampled, Sampler
from halfbyte.model_runner.sampling_kernels import TORCH_SAMPLING, SamplingKernels, TorchSampling
from halfbyte.types import NewRow, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
# Chi-square with 63 degrees of freedom exceeds this once in a million.
CHI_SQUARE_63 = 127.0
# The laws where the host may not look whether candidates settle a row.
UNSEEN = TorchSampling(is_host=False)


@dataclass
class Case:
    """One row: what it asks and the tokens that it has."""

    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    stop: frozenset[int] = frozenset()
    bad_words: list[list[int]] = field(default_factory=list)


def run(
    logits_RV: Tensor,
    cases: list[Case],
    *,
    keep_processed: bool = False,
    mask: Tensor | None = None,
    kernels: SamplingKernels = TORCH_SAMPLING,
) -> Sampled:
    rows = RequestRows(len(cases) + 2, 64, logits_RV.shape[1], HOST)
    rows.add(NewRow("other", [3, 3], 1, 0, [[]], SamplingParams(seed=1, repetition_penalty=3.0), frozenset()))  # not in the batch
    row_R = [
        rows.add(NewRow(str(i), c.prompt + c.output, len(c.prompt), 0, [[]], c.params, c.stop, c.bad_words))
        for i, c in enumerate(cases)
    ]
    rows.apply()
    return Sampler(rows, keep_processed=keep_processed, kernels=kernels).sample(logits_RV.clone(), np.array(row_R), mask)


def choose(logits_RV: Tensor, *cases: Case | SamplingParams, mask: Tensor | None = None) -> list[int]:
    whole = [c if isinstance(c, Case) else Case(c) for c in cases]
    tokens: list[int] = run(logits_RV, whole, mask=mask).token_R.tolist()
    return tokens


def twin_edits(logits: list[float], case: Case, allowed_by_grammar: list[bool] | None = None) -> list[float]:
    """What the options before temperature do, one token at a time."""
    p, result = case.params, list(logits)
    for token, bias in (p.logit_bias or {}).items():
        result[token] += bias
    for token in range(len(result)):
        seen, count = token in case.prompt + case.output, case.output.count(token)
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            result[token] = -math.inf
        if token in case.stop and len(case.output) < p.min_tokens:
            result[token] = -math.inf
        if seen:
            result[token] *= p.repetition_penalty ** (-1 if result[token] > 0 else 1)
        result[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
        for word in case.bad_words:
            n = len(word) - 1
            if word[-1] == token and n <= len(case.output) and case.output[len(case.output) - n :] == word[:-1]:
                result[token] = -math.inf
        if allowed_by_grammar is not None and not allowed_by_grammar[token]:
            result[token] = -math.inf
    return result


def twin_filters(logits: list[float], p: SamplingParams) -> tuple[list[float], float]:
    """Logits after temperature and filters, dropped ones -inf; and how near the mass of the last kept one comes to top_p."""
    scaled = [x / p.temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    weight = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    kept = [i for i in order if weight[i] >= p.min_p]
    kept = kept[: p.top_k] if p.top_k else kept
    mass, before, nucleus, gap = math.fsum(weight[i] for i in kept), 0.0, set(), math.inf
    for i in kept:
        gap = min(gap, abs(before / mass - p.top_p))
        if before < p.top_p * mass or p.top_p == 1.0:
            nucleus.add(i)
        before += weight[i]
    return [x if i in nucleus else -math.inf for i, x in enumerate(scaled)], gap if p.top_p < 1.0 else math.inf


def twin_token(filtered: list[float], p: SamplingParams, position: int) -> tuple[int, float]:
    """The token, and its lead over the second."""
    if p.greedy:
        scores = filtered
    else:
        noise = gumbel_noise(torch.tensor([p.seed]), torch.tensor([position]), torch.arange(len(filtered))[None])[0]
        scores = [x + g for x, g in zip(filtered, noise.tolist(), strict=True)]
    best = max(range(len(scores)), key=lambda i: (scores[i], -i))
    rest = [x for i, x in enumerate(scores) if i != best]
    return best, scores[best] - max(rest) if scores[best] > -math.inf else math.inf


VOCAB = 14
tokens = st.integers(0, VOCAB - 1)
params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.31, 1.0, 2.0]),
        "top_p": st.sampled_from([1.0, 0.951, 0.513, 0.013]),
        "top_k": st.sampled_from([0, 0, 1, 5, 13, 14, 900]),
        "min_p": st.sampled_from([0.0, 0.0, 0.103, 1.0]),
        "seed": st.integers(-(2**63), 2**63 - 1).filter(lambda s: s != -1),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.37, 0.71]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.43, -1.1]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.7, -0.9]),
        "logit_bias": st.none() | st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 2.5, 100.0]), max_size=4),
        "allowed_token_ids": st.none() | st.lists(tokens, min_size=1, max_size=12),
        "min_tokens": st.sampled_from([0, 0, 1, 3]),
    }
)
cases = st.builds(
    Case,
    params=params.map(lambda p: SamplingParams(**p)),
    prompt=st.lists(tokens, min_size=1, max_size=8),
    output=st.lists(tokens, max_size=8),
    stop=st.frozensets(tokens, max_size=3),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4),
)


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(cases, min_size=1, max_size=5), data_seed=st.integers(0, 999), with_grammar=st.booleans())
def test_any_mix_of_options_equals_the_twin(batch: list[Case], data_seed: int, with_grammar: bool) -> None:
    generator = torch.Generator().manual_seed(data_seed)
    logits_RV = torch.randn(len(batch), VOCAB, generator=generator) * 3
    mask = torch.randint(1, 2**VOCAB, (len(batch), 1), generator=generator, dtype=torch.int32) if with_grammar else None
    sampled = run(logits_RV, batch, mask=mask, keep_processed=True)
    assert sampled.processed_RV is not None
    for i, case in enumerate(batch):
        bits = None if mask is None else [bool(int(mask[i, 0]) >> t & 1) for t in range(VOCAB)]
        expected, gap = twin_edits(logits_RV[i].tolist(), case, bits), math.inf
        assert sampled.finite_R[i] == (max(expected) > -math.inf)
        if not sampled.finite_R[i]:
            continue
        if not case.params.greedy:
            expected, gap = twin_filters(expected, case.params)
        if gap > 1e-5:  # else the last kept token's cumulative mass may round to either side of p
            assert sampled.processed_RV[i].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
            token, lead = twin_token(expected, case.params, len(case.prompt) + len(case.output))
            assert sampled.token_R[i] == token or lead < 1e-4
        one_mask = None if mask is None else mask[i : i + 1]
        assert choose(logits_RV[i : i + 1], case, mask=one_mask) == [sampled.token_R[i]]


filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        "top_k": st.sampled_from([0, 1, 5, 255, 256, 257, 258, 300, 10_000]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "seed": st.integers(0, 2**63 - 1),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.lists(filters.map(lambda p: SamplingParams(**p)), min_size=1, max_size=6),
    vocab_size=st.sampled_from([5, SLICE, SLICE + 1, SLICE + 2, 1000, 9000]),
    scale=st.sampled_from([0.0, 0.01, 1.0, 8.0]),
    data_seed=st.integers(0, 1000),
)
def test_slices_equal_the_whole_vocabulary(batch: list[SamplingParams], vocab_size: int, scale: float, data_seed: int) -> None:
    """Whether the first candidates suffice, more are needed or all are sorted; with ties everywhere (scale 0) too."""
    logits_RV = torch.randn(len(batch), vocab_size, generator=torch.Generator().manual_seed(data_seed)) * scale
    sampled = run(logits_RV, [Case(p) for p in batch], keep_processed=True)
    chosen = choose(logits_RV, *batch)
    assert sampled.token_R.tolist() == chosen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("halfbyte.model_runner.sampler.SLICE", vocab_size)
        whole = run(logits_RV, [Case(p) for p in batch], keep_processed=True)
    assert whole.token_R.tolist() == chosen
    assert whole.processed_RV is not None and sampled.processed_RV is not None
    assert torch.equal(whole.processed_RV, sampled.processed_RV)
    unseen = [run(logits_RV, [Case(p) for p in batch], kernels=UNSEEN, keep_processed=keep) for keep in (False, True)]
    assert [u.token_R.tolist() for u in unseen] == [chosen, chosen]
    assert unseen[1].processed_RV is not None and torch.equal(unseen[1].processed_RV, sampled.processed_RV)
    assert chosen == [choose(logits_RV[i : i + 1], p)[0] for i, p in enumerate(batch)]


@pytest.mark.parametrize("vocab_size", [SLICE + 2, 1000, 9000])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0])
def test_rows_that_need_more_candidates_equal_the_twin(vocab_size: int, scale: float) -> None:
    """Flat distributions, where much of the vocabulary is kept; batched with rows that the first candidates settle."""
    options: list[dict[str, Any]] = [
        {"top_p": 0.95137},
        {"top_p": 0.00137},
        {"top_k": 700},
        {"top_k": 700, "top_p": 0.51337},
        {"top_k": 5, "top_p": 0.513},
        {"min_p": 0.9},
        {"min_p": 0.9, "top_p": 0.95137},
        {"min_p": 0.3, "top_k": 300},
    ]
    logits_RV = torch.randn(len(options), vocab_size, generator=torch.Generator().manual_seed(6)) * scale
    asked = [SamplingParams(seed=i, **o) for i, o in enumerate(options)]
    processed = run(logits_RV, [Case(p) for p in asked], keep_processed=True).processed_RV
    assert processed is not None
    for got, logits, p in zip(processed, logits_RV, asked, strict=True):
        expected, gap = twin_filters(logits.tolist(), p)
        assert gap > 1e-7 and got.tolist() == pytest.approx(expected), p


def test_work_is_cut_into_pieces_that_show_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_RV = torch.randn(7, 400, generator=torch.Generator().manual_seed(8))
    asked = [
        Case(
            SamplingParams(seed=1, temperature=(0.0, 1.0)[i % 2], top_p=(1.0, 0.9)[i // 3 % 2], frequency_penalty=i / 4),
            output=[int(logits_RV[i].argmax())] * i,
        )
        for i in range(7)
    ]
    whole = choose(logits_RV, *asked)
    for module in ("sampling_kernels", "logit_edits"):
        monkeypatch.setattr(f"halfbyte.model_runner.{module}.rows_at_a_time", lambda logits: 2)
    assert choose(logits_RV, *asked) == whole


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.05}, {"temperature": 0.5}, {"top_k": 9, "top_p": 0.8}]
)
def test_choices_follow_the_distribution(options: dict[str, Any]) -> None:
    """8,000 rows with seeds of their own: counts agree with the softmax of what is kept (chi-square)."""
    num = 8_000
    logits_V = torch.randn(64, generator=torch.Generator().manual_seed(3))
    rows = RequestRows(num, 2, 64, HOST)
    row_R = [rows.add(NewRow(str(i), [0], 1, 0, [[]], SamplingParams(seed=i, **options), frozenset())) for i in range(num)]
    rows.apply()
    sampled = Sampler(rows, keep_processed=False).sample(logits_V.repeat(num, 1), np.array(row_R))
    counts = sampled.token_R.bincount(minlength=64)
    kept, _ = twin_filters(logits_V.tolist(), SamplingParams(**options))
    expected = torch.tensor(kept).double().softmax(0) * num
    kept_V = expected > 0
    assert counts[~kept_V].sum() == 0
    assert float(((counts[kept_V] - expected[kept_V]) ** 2 / expected[kept_V]).sum()) < CHI_SQUARE_63


def test_equal_logits_go_by_the_lowest_id() -> None:
    flat = torch.zeros(1, 600)
    assert choose(flat, GREEDY) == [0]
    for options in ({"top_k": 3}, {"top_p": 2.5 / 600}):
        assert {choose(flat, SamplingParams(seed=s, **options))[0] for s in range(60)} == {0, 1, 2}
    assert len({choose(flat, SamplingParams(seed=s, min_p=1.0))[0] for s in range(60)}) > 40  # all are as likely as the best


def test_a_seed_means_the_same_tokens_in_any_batch() -> None:
    logits_RV = torch.randn(40, 700, generator=torch.Generator().manual_seed(0))
    asked = [SamplingParams(seed=i % 3, top_p=(1.0, 0.9)[i % 2], temperature=(1.0, 0.0, 2.0)[i % 3]) for i in range(40)]
    together = choose(logits_RV, *asked)
    backwards = choose(logits_RV.flip(0), *asked[::-1])[::-1]
    alone = [choose(logits_RV[i : i + 1], asked[i])[0] for i in range(40)]
    assert together == backwards == alone


def test_positions_of_a_seed_are_independent() -> None:
    """The same logits at 400 positions give many tokens, and two seeds agree as often as chance has it."""
    flat = torch.zeros(1, 32)
    draws = [[choose(flat, Case(SamplingParams(seed=s), prompt=[0] * n))[0] for n in range(1, 60)] for s in (1, 2)]
    assert all(len(set(one)) > 20 for one in draws)
    assert sum(a == b for a, b in zip(*draws, strict=True)) < 12


def test_penalties_count_the_prompt_only_for_repetition() -> None:
    logits = torch.tensor([[2.0, 1.9, 1.0, 0.0]])
    assert choose(logits, SamplingParams(temperature=0.0, repetition_penalty=2.0)) == [1]
    once = SamplingParams(temperature=0.0, frequency_penalty=0.06)
    assert choose(logits, once) == [0]
    assert choose(logits, Case(once, output=[0])) == [0] and choose(logits, Case(once, output=[0, 0])) == [1]
    assert choose(logits, Case(SamplingParams(temperature=0.0, presence_penalty=0.2), output=[0])) == [1]


def test_bad_words_block_only_their_last_token_and_only_in_the_output() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    assert choose(logits, Case(GREEDY, output=[2], bad_words=[[2, 0]])) == [1]
    assert choose(logits, Case(GREEDY, output=[3], bad_words=[[2, 0]])) == [0]
    assert choose(logits, Case(GREEDY, prompt=[2], bad_words=[[2, 0]])) == [0]
    assert choose(logits, Case(GREEDY, prompt=[2], output=[2], bad_words=[[2, 2, 0]])) == [0]
    assert choose(logits, Case(GREEDY, bad_words=[[0], [1], [0]])) == [2]


def test_grammar_mask_bits() -> None:
    words = torch.tensor([[0b101, 0], [-1, 1]], dtype=torch.int32)
    bits = unpack_bits(words, 33)
    assert bits[0].nonzero().flatten().tolist() == [0, 2] and bits[1].all()
    assert choose(torch.arange(33.0).repeat(2, 1), GREEDY, GREEDY, mask=words) == [2, 32]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, "all -inf"])
@pytest.mark.parametrize("culprit", [GREEDY, SamplingParams(seed=1), SamplingParams(seed=1, top_p=0.5, repetition_penalty=1.1)])
def test_rows_that_are_no_numbers_are_named_and_hurt_nobody(bad: float | str, culprit: SamplingParams) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(5))
    asked = [Case(GREEDY), Case(culprit), Case(SamplingParams(seed=2, top_p=0.5))]
    healthy = run(logits, asked)
    assert healthy.finite_R.all()
    logits[1, slice(None) if isinstance(bad, str) else 4] = -torch.inf if isinstance(bad, str) else bad
    sampled = run(logits, asked)
    assert sampled.finite_R.tolist() == [True, False, True]
    assert sampled.token_R[[0, 2]].tolist() == healthy.token_R[[0, 2]].tolist()
    assert ((sampled.token_R >= 0) & (sampled.token_R < 300)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_options_leave_no_token_is_named(temperature: float) -> None:
    """Only the stop token is allowed, and it may not come yet: there is no right answer, and token 0 is a wrong one."""
    none_left = Case(SamplingParams(temperature=temperature, seed=0, allowed_token_ids=[2], min_tokens=1), stop=frozenset({2}))
    assert run(torch.zeros(2, 5), [none_left, Case(GREEDY)]).finite_R.tolist() == [False, True]


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_an_extreme_penalty_leaves_numbers(penalty: float) -> None:
    extreme = Case(SamplingParams(temperature=0.0, repetition_penalty=penalty))
    sampled = run(torch.ones(2, 5), [extreme, Case(GREEDY)])
    assert sampled.finite_R.tolist() == [True, True] and sampled.token_R[1] == 0


def test_ids_outside_the_vocabulary_reach_nothing() -> None:
    """The door refuses them; should one come through, it neither raises nor touches another token or row."""
    wild = Case(
        SamplingParams(temperature=0.0, min_tokens=5, logit_bias={-1: 50.0, 7: 50.0}, allowed_token_ids=[1, -2, 10**9]),
        stop=frozenset({-1, 9, 2**40}),
        bad_words=[[8], [-1], [1, 2**33], []],
    )
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    assert choose(logits, wild, GREEDY) == [1, 2]


def test_processed_logits_are_what_was_sampled_from() -> None:
    asked = [Case(SamplingParams(temperature=0.5, top_k=2, seed=0)), Case(GREEDY), Case(SamplingParams(temperature=2.0, seed=0))]
    processed = run(torch.tensor([[1.0, 3.0, 2.0]] * 3), asked, keep_processed=True).processed_RV
    assert processed is not None
    assert processed.tolist() == [[-torch.inf, 6.0, 4.0], [1.0, 3.0, 2.0], [0.5, 1.5, 1.0]]


def test_a_step_that_asks_nothing_does_nothing_else() -> None:
    """The fast path: greedy rows without options are one argmax."""
    only_best: Any = SimpleNamespace(best=TORCH_SAMPLING.best)
    sampled = run(torch.tensor([[0.0, 2.0], [1.0, 0.0]]), [Case(GREEDY), Case(GREEDY)], kernels=only_best)
    assert sampled.token_R.tolist() == [1, 0]
