"""Log probabilities against log_softmax and plain sorting, whatever each position asks.

Shape letters: N positions, V vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.model_runner.logprobs import Listed, token_logprobs

VOCAB = 300
asks = st.one_of(st.sampled_from([0, 1, 5, 256, 257, 299, 300, 5000, -1]), st.lists(st.integers(0, VOCAB - 1), max_size=6))


@settings(max_examples=60, deadline=None)
@given(listed=st.lists(asks, min_size=1, max_size=6), data_seed=st.integers(0, 99), coarse=st.booleans(), normalise=st.booleans())
def test_each_position_gets_what_it_asks(listed: list[Listed], data_seed: int, coarse: bool, normalise: bool) -> None:
    generator = torch.Generator().manual_seed(data_seed)
    scores_NV = torch.randn(len(listed), VOCAB, generator=generator) * 4
    if coarse:  # many equal logits, as bfloat16 heads give
        scores_NV = scores_NV.round()
    token_N = torch.randint(0, VOCAB, (len(listed),), generator=generator)
    entries = token_logprobs(scores_NV, token_N, listed, normalise=normalise)
    for entry, ask, row, token in zip(entries, listed, scores_NV, token_N.tolist(), strict=True):
        expected = (row.log_softmax(0) if normalise else row).tolist()
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(expected[token], abs=1e-5)
        assert entry.rank == 1 + sum(x > row[token] for x in row.tolist())
        if isinstance(ask, int):
            best = sorted(range(VOCAB), key=lambda i: (-row[i].item(), i))
            ids = best if ask == -1 else best[:ask]
        else:
            ids = list(ask)
        assert entry.top_token_ids == ids
        assert entry.top_logprobs == pytest.approx([expected[i] for i in ids], abs=1e-5)


def test_dropped_tokens_have_minus_infinity() -> None:
    entry = token_logprobs(torch.tensor([[1.0, -torch.inf, 0.0]]), torch.tensor([0]), [-1])[0]
    assert entry.top_token_ids == [0, 2, 1] and entry.top_logprobs[2] == -math.inf
    assert math.exp(entry.logprob) + math.exp(entry.top_logprobs[1]) == pytest.approx(1.0)


def test_ids_outside_the_vocabulary_have_no_score() -> None:
    entry = token_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]), [[2, -1, 3, 2**40], 1])[0]
    assert entry.top_token_ids == [2, -1, 3, 2**40] and entry.top_logprobs[1:] == [-math.inf] * 3


def test_the_best_of_equals_is_the_greedy_choice() -> None:
    scores = torch.tensor([[1.0, 5.0, 0.0, 5.0, 5.0]])
    entry = token_logprobs(scores, scores.argmax(1), [2])[0]
    assert (entry.token_id, entry.rank, entry.top_token_ids) == (1, 1, [1, 3])


def test_rank_and_order_are_those_of_the_logits() -> None:
    """Far below the best, log probabilities of different logits round to one value; the sampler tells them apart."""
    scores = torch.tensor([[0.0, 40.0, 1e-6, 0.0]])
    assert scores.log_softmax(1)[0, 0] == scores.log_softmax(1)[0, 2]
    entry = token_logprobs(scores, torch.tensor([2]), [-1])[0]
    assert (entry.rank, entry.top_token_ids) == (2, [1, 2, 0, 3])
