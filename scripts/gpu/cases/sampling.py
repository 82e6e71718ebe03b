"""Choosing tokens: greedy and noisy choice, candidates in order, filters, penalties; vocabularies of even and of odd width.

Shape letters: R rows of logits, V vocabulary, N rows that are asked for, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from halfbyte.kernels.triton.filters import count_kept
from halfbyte.kernels.triton.nucleus import choose_unsettled_
from halfbyte.kernels.triton.penalties import penalise_
from halfbyte.kernels.triton.sampling import TritonSampling
from halfbyte.platform import Platform
from scripts.gpu.cases.case import Case, indices, numbers

ROWS, CANDIDATES, MAX_TOKENS = 24, 1024, 8192


def sampling_cases() -> Iterator[Case]:
    yield from (_choice(vocab_size) for vocab_size in (128256, 50257))
    yield from (_ordered(vocab_size) for vocab_size in (128256, 50257))
    yield from (_nucleus(vocab_size) for vocab_size in (128256, 50257))
    yield _filters()
    yield _penalties()


def _choice(vocab_size: int) -> Case:
    def launch(platform: Platform) -> None:
        logits_RV, at_N = numbers(ROWS, vocab_size, dtype=torch.float32), indices(ROWS)
        temperature_N = numbers(ROWS, dtype=torch.float32)
        sampling = TritonSampling()
        sampling.best(logits_RV)
        sampling.noisy_best(logits_RV, at_N, temperature_N, indices(ROWS), indices(ROWS))
        sampling.gumbel_noise(indices(ROWS), indices(ROWS), indices(ROWS, CANDIDATES))
        sampling.rank(logits_RV, indices(ROWS))

    return Case(f"sampling choice V{vocab_size}", launch, is_sampled=vocab_size == 128256)


def _ordered(vocab_size: int) -> Case:
    def launch(platform: Platform) -> None:
        logits_RV, at_N = numbers(ROWS, vocab_size, dtype=torch.float32), indices(ROWS)
        temperature_N = numbers(ROWS, dtype=torch.float32)
        sampling = TritonSampling()
        sampling.ordered_top(logits_RV, at_N, temperature_N, CANDIDATES)
        sampling.log_normaliser(logits_RV, at_N, temperature_N)

    return Case(f"sampling candidates V{vocab_size}", launch)


def _nucleus(vocab_size: int) -> Case:
    def launch(platform: Platform) -> None:
        logits_RV, settled_N = numbers(ROWS, vocab_size, dtype=torch.float32), numbers(ROWS, dtype=torch.bool)
        i_N, float_N, double_N = indices(ROWS), numbers(ROWS, dtype=torch.float32), numbers(ROWS, dtype=torch.float64)
        choose_unsettled_(i_N, settled_N, logits_RV, i_N, float_N, i_N, double_N, double_N, i_N, i_N)

    return Case(f"sampling nucleus V{vocab_size}", launch)


def _filters() -> Case:
    def launch(platform: Platform) -> None:
        values_NK, normaliser_N = numbers(ROWS, CANDIDATES, dtype=torch.float32), numbers(ROWS, dtype=torch.float64)
        top_p_N, min_p_N = (numbers(ROWS, dtype=torch.float64) for _ in range(2))
        count_kept(values_NK, normaliser_N, indices(ROWS), top_p_N, min_p_N, 128256)

    return Case("sampling filters", launch)


def _penalties() -> Case:
    def launch(platform: Platform) -> None:
        logits_RV, token_ids = numbers(ROWS, 128256, dtype=torch.float32), numbers(64, MAX_TOKENS, dtype=torch.int32)
        i_N, penalty_N = indices(ROWS), numbers(ROWS, dtype=torch.float32)
        penalise_(logits_RV, i_N, token_ids, i_N, i_N, i_N, penalty_N, penalty_N, penalty_N, MAX_TOKENS)

    return Case("sampling penalties", launch)
