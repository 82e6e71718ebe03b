"""Requests for vectors in the scheduler: one output ends them, over chunks and failed steps; nothing that counts is skipped."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.config import SchedulerConfig
from halfbyte.engine.scheduler import Scheduler
from halfbyte.kvcache.manager import KVCacheManager
from halfbyte.kvcache.spec import KVGroup, KVLayout
from halfbyte.pooling import Pooling
from halfbyte.types import EngineOutput, EngineRequest, ModelRunnerOutput, SamplingParams, SchedulerOutput

BLOCK = 4
WITHOUT_CACHE = KVLayout((), (), ())
PAGED = KVLayout((KVGroup((0,), None, BLOCK),), (), (8,))


def scheduler_of(layout: KVLayout, **config: Any) -> Scheduler:
    settings: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_num_queued_reqs": None,
        "max_num_queued_tokens": None,
        "long_prefill_token_threshold": 0,
        "enable_chunked_prefill": bool(layout.groups),
        "policy": "fcfs",
        "max_logprobs": 0,
        "logprobs_mode": "raw_logprobs",
    }
    budget = (settings | config)["max_num_batched_tokens"]
    num_blocks = 32 if layout.groups else 2
    manager = KVCacheManager(layout, num_blocks, enable_prefix_caching=bool(layout.groups), max_num_batched_tokens=budget)
    return Scheduler(SchedulerConfig(**settings | config), manager, max_model_len=32, worth_waiting_tokens=1000)


def add(scheduler: Scheduler, name: str, length: int, *, reads_all: bool = False) -> EngineOutput | None:
    return scheduler.add(
        EngineRequest(
            request_id=name,
            prompt_token_ids=list(range(length)),
            sampling=SamplingParams(temperature=0.0, max_tokens=1, seed=0),
            eos_token_ids=[],
            arrival_s=0.0,
            max_tokens=0,
            pooling=Pooling("token_embed" if reads_all else "embed", True, reads_all),
        )
    )


def step(scheduler: Scheduler, pieces: dict[str, bytes], bad: frozenset[str] = frozenset()) -> tuple[SchedulerOutput, Any]:
    scheduled = scheduler.schedule()
    ids = list(scheduled.num_scheduled_tokens)
    output = ModelRunnerOutput(ids, [[] for _ in ids], [None] * len(ids), pooled=pieces, bad_rows=bad)
    return scheduled, scheduler.update(output) if ids else []


def test_a_prompt_in_chunks_ends_with_all_of_its_pieces() -> None:
    scheduler = scheduler_of(PAGED)
    add(scheduler, "a", 20, reads_all=True)
    for piece, count in ((b"one ", 8), (b"two ", 8)):
        scheduled, outputs = step(scheduler, {"a": piece})
        assert scheduled.num_scheduled_tokens == {"a": count} and outputs == []
    _, [last] = step(scheduler, {"a": b"three"})
    assert (last.pooled, last.finish_reason, last.new_token_ids) == (b"one two three", "stop", [])
    assert not scheduler.has_work()
    scheduler.manager.check()


def test_what_was_collected_before_a_failed_step_comes_again() -> None:
    scheduler = scheduler_of(PAGED)
    add(scheduler, "a", 12, reads_all=True)
    add(scheduler, "b", 3)
    step(scheduler, {"a": b"lost "})
    scheduler.schedule()
    assert scheduler.recover("broken") == []
    ends: dict[str, bytes | None] = {}
    while scheduler.has_work():
        scheduled = scheduler.schedule()
        ids = list(scheduled.num_scheduled_tokens)
        pieces = {i: b"x" * n for i, n in scheduled.num_scheduled_tokens.items()}
        ends |= {
            o.request_id: o.pooled
            for o in scheduler.update(ModelRunnerOutput(ids, [[]] * len(ids), [None] * len(ids), pooled=pieces))
        }
    assert ends["a"] == b"x" * 12 and ends["b"] is not None


@pytest.mark.parametrize("reads_all", [False, True])
def test_only_what_needs_the_last_state_skips_what_is_cached(reads_all: bool) -> None:
    scheduler = scheduler_of(PAGED, max_num_batched_tokens=16)
    add(scheduler, "first", 13)
    step(scheduler, {"first": b"v"})
    add(scheduler, "second", 13, reads_all=reads_all)
    scheduled, [last] = step(scheduler, {"second": b"v"})
    cached = 0 if reads_all else 12
    assert scheduled.num_scheduled_tokens == {"second": 13 - cached} and last.num_cached_tokens == cached


def test_a_bad_row_fails_alone() -> None:
    scheduler = scheduler_of(PAGED)
    add(scheduler, "bad", 3)
    add(scheduler, "good", 3)
    _, outputs = step(scheduler, {"bad": b"nan", "good": b"v"}, frozenset({"bad"}))
    ends = {output.request_id: output for output in outputs}
    assert ends["bad"].finish_reason == "error" and ends["bad"].pooled is None and "non-finite" in (ends["bad"].error or "")
    assert ends["good"].pooled == b"v"


def test_without_a_cache_texts_come_whole_and_in_their_order() -> None:
    scheduler = scheduler_of(WITHOUT_CACHE)
    for name, length in (("a", 5), ("b", 5), ("c", 3), ("d", 8)):
        assert add(scheduler, name, length) is None
    refusal = add(scheduler, "long", 9)
    assert refusal is not None and "--max-num-batched-tokens is 8" in (refusal.error or "")
    batches = []
    while scheduler.has_work():
        scheduled, _ = step(scheduler, dict.fromkeys("abcd", b"v"))
        batches.append(scheduled.num_scheduled_tokens)
        assert all(row.block_ids == [] for row in scheduled.new_rows)
    assert batches == [{"a": 5}, {"b": 5, "c": 3}, {"d": 8}]
    assert scheduler.stats().kv_cache_usage == 0.0
