"""Teacher-forced scoring: what a model says at each position of a given text, read through the paged KV cache.

A text is run as a request would be, in steps of a few positions: a real row, blocks from the cache's manager, the attention
back end and the KV format of the runner. So two runners that differ in their KV format differ in just what the format costs.
Knows the runner and the cache's manager; knows no scheduler and no text. The engine has to be idle meanwhile. Called by
`halfbyte kv-eval`.

Shape letters: N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfbyte.errors import CapacityError
from halfbyte.kvcache.manager import KVCacheManager
from halfbyte.model_runner.runner import ModelRunner
from halfbyte.types import GrownRow, NewRow, SamplingParams, SchedulerOutput

# Positions whose logits exist at a time: 128 MiB of float32 at 262,144 tokens of vocabulary.
DEFAULT_STEP_TOKENS = 128
# float32 log probabilities that exist at a time, of each of two runners
_LOGPROBS_BYTES = 64 << 20


@dataclass(slots=True)
class _ScoredText:
    """A text as a user of the cache. Its blocks are never shared: each position is computed and written here."""

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    skip_prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class PositionScores:
    """How two runners predict the same tokens; one entry per position, in nats.

    kl_N: KL(base || other) of the whole distribution. base_nll_N, other_nll_N: minus the log probability of the token that
    follows. agrees_N: whether both have the same most likely token.
    """

    kl_N: Tensor
    base_nll_N: Tensor
    other_nll_N: Tensor
    agrees_N: Tensor


def score(
    runner: ModelRunner, manager: KVCacheManager, token_ids: Sequence[int], step_tokens: int = DEFAULT_STEP_TOKENS
) -> Iterator[Tensor]:
    """float32 logits [N, V] of all positions of a text, step by step; N is at most `step_tokens`. See `steps`."""
    for _ in steps(runner, manager, token_ids, step_tokens):
        yield runner.step_logits()


def steps(runner: ModelRunner, manager: KVCacheManager, token_ids: Sequence[int], step_tokens: int) -> Iterator[tuple[int, int]]:
    """Run a text in steps; after each, the position of its first token and how many it had.

    The row and its blocks are given back when the iterator ends or is closed. CapacityError when the cache cannot hold the text.
    """
    text = _ScoredText("scored text", list(token_ids))
    try:
        while text.num_computed_tokens < len(text.token_ids):
            num_tokens = min(step_tokens, len(text.token_ids) - text.num_computed_tokens)
            runner.execute(_next_step(text, manager, num_tokens))
            text.num_computed_tokens += num_tokens
            yield text.num_computed_tokens - num_tokens, num_tokens
    finally:
        manager.free(text)
        runner.execute(SchedulerOutput(finished_request_ids=[text.request_id]))


def compare(base_NV: Tensor, other_NV: Tensor, next_token_N: Tensor) -> PositionScores:
    """Two runners' logits at the same positions. Logarithms are float32, sums float64: equal logits have a divergence of 0."""
    num_rows = max(1, _LOGPROBS_BYTES // (4 * base_NV.shape[1]))
    parts = [
        _compare_rows(base_NV[rows], other_NV[rows].to(base_NV.device), next_token_N[rows].to(base_NV.device))
        for rows in (slice(start, start + num_rows) for start in range(0, base_NV.shape[0], num_rows))
    ]
    return PositionScores(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))


def _compare_rows(base_NV: Tensor, other_NV: Tensor, next_token_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    base_logprob_NV = base_NV.float().log_softmax(-1)
    other_logprob_NV = other_NV.float().log_softmax(-1)
    next_N1 = next_token_N[:, None]
    return (
        (base_logprob_NV.exp() * (base_logprob_NV - other_logprob_NV)).sum(-1, dtype=torch.float64),
        -base_logprob_NV.gather(1, next_N1)[:, 0].double(),
        -other_logprob_NV.gather(1, next_N1)[:, 0].double(),
        base_NV.argmax(-1) == other_NV.argmax(-1),
    )


def _next_step(text: _ScoredText, manager: KVCacheManager, num_tokens: int) -> SchedulerOutput:
    """The step that computes the next `num_tokens` tokens of the text, which enters with its first one."""
    block_ids = manager.allocate(text, num_tokens)
    if block_ids is None:
        raise CapacityError(
            f"a text of {len(text.token_ids)} tokens needs {manager.blocks_needed(len(text.token_ids))} KV blocks, "
            f"{manager.num_free_blocks} are free; shorten it or raise --kv-cache-memory-bytes"
        )
    step = SchedulerOutput(num_scheduled_tokens={text.request_id: num_tokens})
    computed = text.num_computed_tokens
    if computed:
        step.grown_rows.append(GrownRow(text.request_id, computed, block_ids))
    else:
        num_known = len(text.token_ids)
        params = SamplingParams(temperature=0.0)
        step.new_rows.append(NewRow(text.request_id, text.token_ids, num_known, 0, block_ids, params, frozenset()))
    return step
