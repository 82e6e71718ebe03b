"""The mathematics of choosing a token: counter-based noise, penalties, and the filters top-k, top-p and min-p.

Laws in plain PyTorch. Noise is a pure function of (seed, position, token id), so a choice depends on nothing else in the
batch. Candidates have one order, equal logits by token id, so that every filter keeps a prefix of it and no choice depends
on how a sort breaks ties. Knows no requests; called by the sampler.

Shape letters: R rows, V vocabulary, K candidates, N rows that are asked for, L tokens of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Candidates that are looked at first; more of the vocabulary is sorted only for rows that these do not settle.
SLICE = 256

# Elements of temporary tensors [R, V]. On a CPU they should stay in its caches (three times faster than in memory);
# elsewhere few large operations are better.
_MAX_ELEMENTS_CPU = 1 << 18
_MAX_ELEMENTS = 1 << 24

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, splitmix64's increment, as a signed integer
_LOW_32 = 0xFFFFFFFF


def rows_at_a_time(logits_RV: Tensor) -> int:
    """How many rows these laws should be given at a time, so that their temporary tensors stay small."""
    max_elements = _MAX_ELEMENTS_CPU if logits_RV.device.type == "cpu" else _MAX_ELEMENTS
    return max(1, max_elements // logits_RV.shape[1])


def _shift_right_64(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's is arithmetic on signed integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _shift_right_32(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def mix_64(x: Tensor) -> Tensor:
    """splitmix64's finaliser (Steele, Lea, Flood 2014) on int64, with wrap-around: every input bit changes every output bit."""
    x = (x ^ _shift_right_64(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift_right_64(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ _shift_right_64(x, 31)


def mix_32(x: Tensor) -> Tensor:
    """The same for int32, with the constants of Wellons' search for the least biased one of this shape ("lowbias32")."""
    x = (x ^ _shift_right_32(x, 16)) * 0x7FEB352D
    x = (x ^ _shift_right_32(x, 15)) * -2073254261  # 0x846CA68B
    return x ^ _shift_right_32(x, 16)


def _low_32(x: Tensor) -> Tensor:
    """The low half of int64 as int32; the value is brought into range first, so that the cast is defined everywhere."""
    return ((x & _LOW_32) - ((x & 0x80000000) << 1)).int()


def uniform(seed_R: Tensor, position_R: Tensor, token_id_RK: Tensor) -> Tensor:
    """Numbers in (0, 1), float32 [R, K], for tokens `token_id_RK` ([1, V] broadcasts) at int64 seeds and positions.

    A 64-bit key of seed and position, then two rounds over the token id, one for each half of the key: two keys that agree
    in one half only still give unrelated numbers. 31 bits, so that numbers near 0 are as fine as 2^-32.
    """
    key_R = mix_64(mix_64(seed_R + _GOLDEN) + position_R * _GOLDEN)
    low_R1, high_R1 = _low_32(key_R)[:, None], _low_32(key_R >> 32)[:, None]
    bits_RK = mix_32(mix_32(token_id_RK.int() ^ low_R1) ^ high_R1) & 0x7FFFFFFF
    # The largest ones round to 1 in float32.
    return bits_RK.float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)


def gumbel_noise(seed_R: Tensor, position_R: Tensor, token_id_RK: Tensor) -> Tensor:
    """Standard Gumbel noise [R, K] in float32, always finite: argmax(logits + noise) is a sample of softmax(logits).

    -log(-log(1 - u)), because the large values, which win, need the fine end of u.
    """
    return uniform(seed_R, position_R, token_id_RK).neg_().log1p_().neg_().log_().neg_()


def ordered_top(values_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of float32 `values_RV`, in descending order, equal ones by token id: (values, ids int64), [R, K].

    The order is that of one integer per token, made of the value's bits above the reversed token id, so it does not depend
    on the sort, the device or the number of rows.
    """
    width = values_RV.shape[1]
    bits_RV = (values_RV + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    bits_RV = bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF)
    key_RV = bits_RV.long() * (1 << 32) + torch.arange(width - 1, -1, -1, device=values_RV.device)
    whole = count >= width
    key_RK = key_RV.sort(dim=1, descending=True).values if whole else key_RV.topk(count, dim=1).values
    ids_RK = (width - 1) - (key_RK & _LOW_32)
    return values_RV.gather(1, ids_RK), ids_RK


def log_normaliser(logits_RV: Tensor) -> Tensor:
    """logsumexp over the vocabulary, float64 [R]; summed in float64, so that the order of the sum cannot be seen."""
    most_R1 = logits_RV.amax(1, keepdim=True)
    return (logits_RV - most_R1).exp_().sum(1, dtype=torch.float64).log_() + most_R1[:, 0]


def count_kept(
    values_RK: Tensor, normaliser_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """How many of the ordered candidates the filters keep (at least 1), and whether the K show it: (count_R, settled_R).

    values_RK: the K largest logits after temperature; normaliser_R: logsumexp over the whole vocabulary; top_p and min_p are
    float64, top_k <= 0 is off. min-p keeps tokens of at least min_p times the greatest probability; top-k keeps k; top-p
    keeps the fewest whose mass reaches top_p, within the renormalised mass of what the other two kept.
    """
    num_candidates = values_RK.shape[1]
    rank_K = torch.arange(num_candidates, device=values_RK.device)
    least_R1 = values_RK[:, :1] + min_p_R.float().log()[:, None]  # min_p = 0: -inf
    by_min_p_R = (values_RK >= least_R1).sum(1)
    # When all K pass, there may be more.
    by_min_p_R = torch.where(by_min_p_R == num_candidates, vocab_size, by_min_p_R)
    first_R = torch.minimum(by_min_p_R, torch.where(top_k_R > 0, top_k_R.clamp(max=vocab_size), vocab_size))
    untouched_R = (min_p_R <= 0) & ((top_k_R <= 0) | (top_k_R >= vocab_size))

    kept_RK = rank_K < first_R[:, None]
    prob_RK = torch.exp(values_RK.double() - normaliser_R[:, None]) * kept_RK
    mass_R = torch.where(untouched_R, 1.0, prob_RK.sum(1))
    before_RK = prob_RK.cumsum(1) - prob_RK
    nucleus_R = ((before_RK < (top_p_R * mass_R)[:, None]) & kept_RK).sum(1)
    count_R = torch.where(top_p_R < 1.0, nucleus_R, first_R).clamp(min=1)
    settled_R = (first_R <= num_candidates) | (untouched_R & (count_R < num_candidates))
    return count_R, settled_R


def penalise_(
    logits_RV: Tensor, is_seen_RV: Tensor, count_RV: Tensor, repetition_R: Tensor, frequency_R: Tensor, presence_R: Tensor
) -> None:
    """Repetition divides the positive and multiplies the negative logits of seen tokens (prompt and output); frequency takes
    off its value for each occurrence in the output, presence once. In place; `count_RV` is of the output."""
    repetition_R1 = repetition_R[:, None]
    repeated_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV.copy_(torch.where(is_seen_RV, repeated_RV, logits_RV))
    logits_RV.sub_(frequency_R[:, None] * count_RV + presence_R[:, None] * (count_RV > 0))


def penalise_rows_(
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
    """`penalise_` for the rows `at_N` of the logits, with what their tokens are counted to be.

    token_ids: int32 [all rows, L]; row_N says which of these rows belong to `at_N`, num_prompt_N and num_tokens_N (int64) how
    long prompt and whole are; max_tokens: at least the greatest of these.
    """
    token_NL = token_ids[row_N, :max_tokens].long()
    position_L = torch.arange(max_tokens, device=logits_RV.device)
    is_token_NL = position_L < num_tokens_N[:, None]
    is_output_NL = is_token_NL & (position_L >= num_prompt_N[:, None])
    zeros_NV = logits_RV.new_zeros(len(at_N), logits_RV.shape[1])
    seen_NV = zeros_NV.scatter_add(1, token_NL, is_token_NL.to(logits_RV.dtype)) > 0
    count_NV = zeros_NV.scatter_add_(1, token_NL, is_output_NL.to(logits_RV.dtype))
    logits_NV = logits_RV[at_N]
    penalise_(logits_NV, seen_NV, count_NV, repetition_N, frequency_N, presence_N)
    logits_RV[at_N] = logits_NV


def choose_unsettled_(
    token_N: Tensor,
    settled_N: Tensor,
    logits_RV: Tensor,
    at_N: Tensor,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    seed_N: Tensor,
    position_N: Tensor,
) -> None:
    """Overwrites the tokens (int64) of rows that are not settled with the choice among all that their filters keep.

    By a sort of the whole vocabulary, for all rows, as who may not look which of them are settled has to. The numbers of rows
    are as `count_kept` and `gumbel_noise` take them.
    """
    vocab_size = logits_RV.shape[1]
    scaled_NV = logits_RV[at_N].div_(temperature_N[:, None])
    values_NV, ids_NV = ordered_top(scaled_NV, vocab_size)
    count_N, _ = count_kept(values_NV, log_normaliser(scaled_NV), top_k_N, top_p_N, min_p_N, vocab_size)
    values_NV.masked_fill_(torch.arange(vocab_size, device=logits_RV.device) >= count_N[:, None], -torch.inf)
    best_N1 = gumbel_noise(seed_N, position_N, ids_NV).add_(values_NV).argmax(1, keepdim=True)
    token_N.copy_(torch.where(settled_N, token_N, ids_NV.gather(1, best_N1)[:, 0]))
