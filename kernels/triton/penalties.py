"""Penalties in Triton: counts each row's tokens, then edits its logits; the twin of `kernels.sampling.penalise_rows_`.

The two kernels share a word per row and token: its lowest bit says that the prompt has the token, the rest how often the output
has it. Atomic operations on whole numbers, so that no order can be seen. Knows tensors; knows no requests. Called by the
sampler of a GPU.

Shape letters: R rows of logits, V vocabulary, N rows that are edited, L tokens of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.triton.launch import Launch

_TOKENS = 1024  # of a program, of either kernel


def penalise_(
    logits_RV: Tensor,
    at_N: Tensor,
    token_ids: Tensor,
    row_N: Tensor,
    num_prompt_N: Tensor,
    num_tokens_N: Tensor,
    repetition_N: Tensor,
    frequency_N: Tensor,
    presence_N: Tensor,
    max_tokens: int,
) -> None:
    """As the law: edits the rows `at_N` of the logits, in place. The penalties are float32, the numbers of rows int64."""
    if len(at_N):
        numbers = (repetition_N.contiguous(), frequency_N.contiguous(), presence_N.contiguous())
        for launch in launches_of(logits_RV, at_N, token_ids, row_N, num_prompt_N, num_tokens_N, *numbers, max_tokens):
            launch.run()


def launches_of(
    logits_RV: Tensor,
    at_N: Tensor,
    token_ids: Tensor,
    row_N: Tensor,
    num_prompt_N: Tensor,
    num_tokens_N: Tensor,
    repetition_N: Tensor,
    frequency_N: Tensor,
    presence_N: Tensor,
    max_tokens: int,
) -> list[Launch]:
    assert logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1
    width = logits_RV.shape[1]
    word_NV = torch.zeros(len(at_N), width, dtype=torch.int32, device=logits_RV.device)
    lengths = row_N, num_prompt_N, num_tokens_N
    count = Launch(
        (len(at_N), triton.cdiv(max(1, max_tokens), _TOKENS)),
        count_tokens,
        (token_ids, token_ids.stride(0), *lengths, word_NV, width, _TOKENS),
    )
    edit = Launch(
        (len(at_N), triton.cdiv(width, _TOKENS)),
        edit_logits,
        (logits_RV, logits_RV.stride(0), at_N, word_NV, repetition_N, frequency_N, presence_N, width, _TOKENS),
    )
    return [count, edit]


@triton.jit(do_not_specialize_on_alignment=["rows", "num_prompt", "num_tokens"])
def count_tokens(
    token_ids: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    num_prompt: tl.tensor,
    num_tokens: tl.tensor,
    words: tl.tensor,
    width: tl.tensor,
    TOKENS: tl.constexpr,
) -> None:
    """Grid: rows that are edited, parts of their tokens. words: int32 [N, V], zeros before."""
    n = tl.program_id(0)
    position = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token = position < tl.load(num_tokens + n)
    is_prompt = position < tl.load(num_prompt + n)
    token = tl.load(token_ids + tl.load(rows + n) * stride + position, mask=is_token, other=0)
    is_token &= (token >= 0) & (token < width)
    word = words + n.to(tl.int64) * width + token
    tl.atomic_or(word, 1, mask=is_token & is_prompt)
    tl.atomic_add(word, 2, mask=is_token & (is_prompt == 0))


@triton.jit(do_not_specialize_on_alignment=["at", "repetitions", "frequencies", "presences"])
def edit_logits(
    logits: tl.tensor,
    stride: tl.tensor,
    at: tl.tensor,
    words: tl.tensor,
    repetitions: tl.tensor,
    frequencies: tl.tensor,
    presences: tl.tensor,
    width: tl.tensor,
    TOKENS: tl.constexpr,
) -> None:
    """Grid: rows that are edited, parts of the vocabulary."""
    n = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < width
    place = logits + tl.load(at + n) * stride + token
    logit = tl.load(place, mask=is_token, other=0.0)
    word = tl.load(words + n.to(tl.int64) * width + token, mask=is_token, other=0)
    count = word >> 1
    repetition = tl.load(repetitions + n)
    repeated = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    logit = tl.where(word != 0, repeated, logit)
    taken = tl.load(frequencies + n) * count.to(tl.float32) + tl.load(presences + n) * (count > 0).to(tl.float32)
    tl.store(place, logit - taken, mask=is_token)
