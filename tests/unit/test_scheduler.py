"""The scheduler, one rule per test, with a runner that needs no model (tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from halfbyte.types import EngineOutput, ModelRunnerOutput
from tests.unit.scheduled_engine import Engine


@pytest.fixture
def engine(fake_runner: Any) -> Callable[..., Engine]:
    return lambda **settings: Engine(fake_runner, **settings)


def test_a_request_from_start_to_end(engine: Callable[..., Engine]) -> None:
    one = engine()
    assert one.add("r", [1, 2, 3], max_tokens=3) is None
    step = one.step()
    [row] = step.new_rows
    assert (row.token_ids, row.num_prompt_tokens, row.num_computed_tokens, row.block_ids) == ([1, 2, 3], 3, 0, [[1]])
    assert step.num_scheduled_tokens == {"r": 3} and step.total_num_scheduled_tokens == 3
    step = one.step()
    [grown] = step.grown_rows
    assert (grown.num_computed_tokens, grown.new_block_ids, step.new_rows) == (3, [[]], [])
    [grown] = one.step().grown_rows
    assert (grown.num_computed_tokens, grown.new_block_ids) == (4, [[2]])
    assert one.tokens("r") == one.runner.expected_tokens([1, 2, 3], None, 3)
    assert one.last("r").finish_reason == "length" and not one.scheduler.has_work()
    assert one.scheduler.schedule().finished_request_ids == ["r"]


def test_the_first_output_says_when_it_was_scheduled(engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    monkeypatch.setattr("halfbyte.engine.scheduler.time.monotonic", lambda: 123.5)
    one.add("r", 5, max_tokens=3)
    one.run()
    assert [output.scheduled_s for output in one.outputs["r"]] == [123.5, None, None]


def test_prompts_are_chunked_and_mixed_with_decodes(engine: Callable[..., Engine]) -> None:
    one = engine(max_num_batched_tokens=8)
    one.add("a", 4, max_tokens=6)
    one.step()
    one.add("b", 20, max_tokens=2)
    steps = one.run()
    assert [step.num_scheduled_tokens for step in steps[:4]] == [
        {"a": 1, "b": 7},
        {"a": 1, "b": 7},
        {"a": 1, "b": 6},
        {"a": 1, "b": 1},
    ]
    assert len(one.tokens("a")) == 6 and len(one.tokens("b")) == 2


def test_prompts_are_cut_short_only_beside_decodes(engine: Callable[..., Engine]) -> None:
    one = engine(max_num_batched_tokens=32, max_num_mixed_tokens=6)
    one.add("a", 20, max_tokens=3)
    assert one.step().num_scheduled_tokens == {"a": 20}, "nobody waits for a next token"
    one.add("b", 10)
    one.add("c", 3)
    assert one.step().num_scheduled_tokens == {"a": 1, "b": 6}
    assert one.step().num_scheduled_tokens == {"a": 1, "b": 4, "c": 2}
    assert one.step().num_scheduled_tokens == {"b": 1, "c": 1}
    one.run()


def test_the_long_prefill_threshold_leaves_room_for_others(engine: Callable[..., Engine]) -> None:
    one = engine(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    one.add("long", 40)
    assert one.step().num_scheduled_tokens == {"long": 16}, "alone it may have everything"
    one.add("short", 5)
    assert one.step().num_scheduled_tokens == {"long": 6, "short": 5}


def test_without_chunking_a_prompt_waits_for_a_step_that_holds_it(engine: Callable[..., Engine]) -> None:
    one = engine(max_num_batched_tokens=16, enable_chunked_prefill=False, long_prefill_token_threshold=2)
    one.add("a", 10, max_tokens=2)
    one.add("b", 10, max_tokens=2)
    assert [step.num_scheduled_tokens for step in one.run()] == [{"a": 10}, {"a": 1, "b": 10}, {"b": 1}]
    refusal = one.add("c", 17)
    assert refusal and refusal.error and "17 tokens" in refusal.error and "--max-num-batched-tokens is 16" in refusal.error


def test_max_num_seqs_limits_the_running(engine: Callable[..., Engine]) -> None:
    one = engine(max_num_seqs=2)
    for name in "abc":
        one.add(name, 4, max_tokens=3)
    assert list(one.step().num_scheduled_tokens) == ["a", "b"]
    assert (one.scheduler.stats().num_running, one.scheduler.stats().num_waiting) == (2, 1)
    one.run()
    assert one.last("c").finish_reason == "length"


def test_priority_serves_the_smaller_number_then_the_earlier(engine: Callable[..., Engine]) -> None:
    one = engine(max_num_seqs=1, policy="priority")
    one.add("late", 4, max_tokens=1, priority=0, arrival_s=2.0)
    one.add("early", 4, max_tokens=1, priority=0, arrival_s=1.0)
    one.add("urgent", 4, max_tokens=1, priority=-3, arrival_s=9.0)
    one.add("idle", 4, max_tokens=1, priority=7)
    assert [request.request_id for request in one.scheduler.waiting] == ["urgent", "early", "late", "idle"]
    assert [next(iter(step.num_scheduled_tokens)) for step in one.run()] == ["urgent", "early", "late", "idle"]


def test_fcfs_ignores_priority(engine: Callable[..., Engine]) -> None:
    one = engine(max_num_seqs=1)
    one.add("a", 4, max_tokens=1, priority=5, arrival_s=9.0)
    one.add("b", 4, max_tokens=1, priority=-5, arrival_s=1.0)
    assert [next(iter(step.num_scheduled_tokens)) for step in one.run()] == ["a", "b"]


def test_preemption_takes_the_last_and_returns_it_first(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=7, max_model_len=25)
    for name in "abc":
        one.add(name, [ord(name)] * 7, max_tokens=6)
    one.add("d", 4, max_tokens=1)
    one.step()
    one.step()
    step = one.step()
    assert step.preempted_request_ids == ["c"] and list(step.num_scheduled_tokens) == ["a", "b"] and not step.new_rows
    assert [request.request_id for request in one.scheduler.waiting] == ["c", "d"]
    resumed = [row for later in one.run() for row in later.new_rows if row.request_id == "c"]
    assert [row.num_prompt_tokens for row in resumed] == [7] and len(resumed[0].token_ids) == 9
    assert one.last("c").num_preemptions == 1
    for name in "abc":
        assert one.tokens(name) == one.runner.expected_tokens([ord(name)] * 7, None, 6)
    assert one.scheduler.stats().num_preemptions == 1 and one.manager.usage == 0.0


def test_a_victim_that_was_scheduled_returns_its_budget(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=15, max_num_batched_tokens=9, policy="priority", caching=False, long_prefill_token_threshold=7)
    one.add("low", 45, priority=1)
    one.step()
    one.add("high", 1, max_tokens=9)
    one.add("next", 1, max_tokens=9)
    for _ in range(4):
        assert one.step().num_scheduled_tokens == {"low": 7, "high": 1, "next": 1}
    one.scheduler.config = replace(one.scheduler.config, long_prefill_token_threshold=8)
    # low takes 8 of the 9 tokens and the last blocks; high needs a block, and then there is budget for the next, too
    step = one.step()
    assert (step.preempted_request_ids, step.num_scheduled_tokens) == (["low"], {"high": 1, "next": 1})
    assert [row.request_id for row in step.grown_rows] == ["high", "next"]
    one.run()
    assert one.last("low").num_preemptions == 1


def test_a_prefix_hit_is_counted_and_leaves_one_token(engine: Callable[..., Engine]) -> None:
    one = engine()
    prompt = list(range(12))
    one.add("a", prompt)
    one.run()
    one.scheduler.stats()
    one.add("b", prompt)
    step = one.step()
    assert step.num_scheduled_tokens == {"b": 4} and step.new_rows[0].num_computed_tokens == 8
    one.run()
    assert one.tokens("a") == one.tokens("b")
    assert (one.outputs["a"][0].num_cached_tokens, one.outputs["b"][0].num_cached_tokens) == (0, 8)
    stats = one.scheduler.stats()
    assert (stats.prefix_cache_queries_tokens, stats.prefix_cache_hits_tokens) == (12, 8)
    assert one.scheduler.stats().prefix_cache_queries_tokens == 0


def test_cache_salts_isolate(engine: Callable[..., Engine]) -> None:
    one = engine()
    for name, salt in (("a", "x"), ("b", "y"), ("c", None), ("d", "x")):
        one.add(name, list(range(12)), cache_salt=salt)
        one.run()
    assert [one.last(name).num_cached_tokens for name in "abcd"] == [0, 0, 0, 8]


def test_prompt_logprobs_read_no_cache_and_come_with_the_first_token(engine: Callable[..., Engine]) -> None:
    one = engine(max_num_batched_tokens=5)
    prompt = list(range(12))
    one.add("a", prompt)
    one.run()
    one.add("b", prompt, sampling={"prompt_logprobs": 0})
    one.run()
    first = one.outputs["b"][0]
    assert first.num_cached_tokens == 0 and len(first.new_token_ids) == 1
    assert [entry.token_id for entry in first.prompt_logprobs or ()] == prompt[1:]
    assert all(output.prompt_logprobs is None for output in one.outputs["b"][1:] + one.outputs["a"])


@pytest.mark.parametrize("length", [0, 8, 9])
def test_a_prompt_without_room_for_a_token_is_refused_with_numbers(engine: Callable[..., Engine], length: int) -> None:
    one = engine(max_model_len=8)
    refusal = one.add("r", length)
    assert refusal is not None and refusal.finish_reason == "error" and not one.scheduler.has_work()
    assert refusal.error and (f"{length} tokens" in refusal.error and "max_model_len=8" in refusal.error if length else True)
    assert one.add("s", 7, max_tokens=5) is None
    one.run()
    assert len(one.tokens("s")) == 1 and one.last("s").finish_reason == "length"


def test_a_prompt_bigger_than_the_cache_is_refused_and_the_next_is_served(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=33, max_model_len=512)
    refusal = one.add("big", 300)
    assert refusal is not None and refusal.error is not None
    assert "300 tokens needs 75 KV blocks" in refusal.error and "32 (at most 128 tokens" in refusal.error
    assert "--kv-cache-memory-bytes" in refusal.error
    one.add("small", 20, max_tokens=3)
    one.run()
    assert len(one.tokens("small")) == 3


def test_a_generation_ends_where_the_cache_does(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=5, max_model_len=512)
    one.add("r", 10, max_tokens=100)
    one.run()
    assert len(one.tokens("r")) == 7 and one.last("r").finish_reason == "length"


def stop_case(one: Engine, name: str, index: int, **fields: Any) -> EngineOutput:
    """Run prompt [5, 6] with what `fields` makes of its generated token number `index`."""
    token = one.runner.expected_tokens([5, 6], None, 10)[index]
    made = {key: value(token) if callable(value) else value for key, value in fields.items()}
    one.add(name, [5, 6], max_tokens=10, **made)
    one.run()
    return one.last(name)


def test_stop_rules(engine: Callable[..., Engine]) -> None:
    one = engine()
    tokens = one.runner.expected_tokens([5, 6], None, 10)
    index = next(i for i in range(2, 9) if tokens[i] not in tokens[:i])
    eos = stop_case(one, "eos", index, eos=lambda token: [token])
    assert (one.tokens("eos"), eos.finish_reason, eos.stop_token_id) == (tokens[: index + 1], "stop", None)
    user = stop_case(one, "user", index, sampling=lambda token: {"stop_token_ids": [token]})
    assert (one.tokens("user"), user.finish_reason, user.stop_token_id) == (tokens[: index + 1], "stop", tokens[index])
    both = stop_case(one, "both", index, eos=lambda t: [t], sampling=lambda t: {"stop_token_ids": [t]})
    assert (both.finish_reason, both.stop_token_id) == ("stop", None)
    ignored = stop_case(one, "ignored", index, eos=lambda t: [t], sampling=lambda t: {"ignore_eos": True})
    assert (one.tokens("ignored"), ignored.finish_reason) == (tokens, "length")
    own = stop_case(one, "own", index, eos=lambda t: [t], sampling=lambda t: {"ignore_eos": True, "stop_token_ids": [t]})
    assert (own.finish_reason, own.stop_token_id) == ("stop", tokens[index])
    early = stop_case(one, "early", index, eos=lambda t: [t], sampling=lambda t: {"min_tokens": index + 2, "max_tokens": 10})
    assert len(one.tokens("early")) > index + 1 and early.num_cached_tokens == 0
    exact = stop_case(one, "exact", index, eos=lambda t: [t], sampling=lambda t: {"min_tokens": index + 1, "max_tokens": 10})
    assert (len(one.tokens("exact")), exact.finish_reason) == (index + 1, "stop")


def test_logprobs_travel_with_their_tokens(engine: Callable[..., Engine]) -> None:
    one = engine()
    one.add("r", 3, max_tokens=3)
    one.run()
    assert [[entry.token_id for entry in output.logprobs or ()] for output in one.outputs["r"]] == [[t] for t in one.tokens("r")]


def test_several_tokens_at_once_end_at_the_first_stop(engine: Callable[..., Engine]) -> None:
    one = engine()
    one.add("r", 3, max_tokens=9, eos=[7])
    one.scheduler.schedule()
    [output] = one.scheduler.update(ModelRunnerOutput(["r"], [[3, 7, 4]], [None]))
    assert (output.new_token_ids, output.finish_reason) == ([3, 7], "stop")


def test_abort_in_every_state(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=7, max_model_len=25)
    for name in ("a", "b", "c", "waiting"):
        one.add(name, 7, max_tokens=6)
    [output] = one.scheduler.abort(["waiting", "nobody", "waiting"])
    assert (output.request_id, output.finish_reason, output.scheduled_s) == ("waiting", "abort", None)
    one.step()
    one.step()
    assert one.step().preempted_request_ids == ["c"]
    ends = one.hear(one.scheduler.abort(["c", "a"]))
    assert [(end.request_id, end.finish_reason) for end in ends] == [("c", "abort"), ("a", "abort")]
    one.manager.check()
    assert one.scheduler.abort(["a", "c"]) == [] and len(one.scheduler.running) == 1
    step = one.step()
    assert step.finished_request_ids == ["a"], "only a row that the runner still has is released"
    one.run()
    assert one.last("b").finish_reason == "length" and one.manager.usage == 0.0


def test_abort_between_schedule_and_update(engine: Callable[..., Engine]) -> None:
    one = engine()
    one.add("a", 3)
    one.add("b", 3)
    one.runner.execute(one.scheduler.schedule())
    one.hear(one.scheduler.abort(["a"]))
    assert [output.request_id for output in one.scheduler.update(one.runner.sample().result())] == ["b"]
    assert one.last("a").finish_reason == "abort"
    assert one.step().finished_request_ids == ["a"]


def test_a_bad_row_fails_alone_and_is_not_shared(engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture) -> None:
    one = engine()
    prompt = list(range(12))
    one.add("bad", prompt, max_tokens=9)
    one.add("good", 6, max_tokens=9)
    one.step()
    one.runner.bad = {"bad"}
    one.run()
    last = one.last("bad")
    assert (last.finish_reason, last.new_token_ids) == ("error", []) and last.error and "non-finite" in last.error
    assert len(one.tokens("good")) == 9 and one.manager.usage == 0.0
    assert [record.getMessage().startswith("request bad failed") for record in caplog.records] == [True]
    one.runner.bad = set()
    one.add("again", prompt)
    one.run()
    assert one.last("again").num_cached_tokens == 0


def test_a_reused_id_takes_its_new_place(engine: Callable[..., Engine]) -> None:
    one = engine(max_num_seqs=1)
    one.add("a", 4, max_tokens=1)
    one.add("b", 4, max_tokens=1)
    one.add("c", 4, max_tokens=1)
    one.scheduler.abort(["b"])
    one.add("b", 4, max_tokens=1)
    assert [next(iter(step.num_scheduled_tokens)) for step in one.run()] == ["a", "c", "b"]


def test_isolated_requests_are_recomputed_one_at_a_time(engine: Callable[..., Engine]) -> None:
    one = engine(max_num_batched_tokens=8)
    one.add("a", 4, max_tokens=9)
    one.step()
    one.add("b", 12, max_tokens=9)
    one.add("c", 4, max_tokens=9)
    one.step()
    failing = one.scheduler.schedule()
    assert list(failing.num_scheduled_tokens) == ["a", "b", "c"]
    one.runner.execute(failing)
    assert one.scheduler.recover("not shown") == []
    steps = [one.step() for _ in range(2)]
    assert [list(step.num_scheduled_tokens) for step in steps] == [["a"], ["b"]]
    assert steps[0].preempted_request_ids == ["a", "b", "c"]
    assert list(one.scheduler.schedule().num_scheduled_tokens) == ["c"]
    [end] = one.hear(one.scheduler.recover("cannot be computed"))
    assert (end.finish_reason, end.error, end.new_token_ids) == ("error", "cannot be computed", [])
    one.runner.rows["c"] = None  # the failing step had entered it
    assert list(one.step().num_scheduled_tokens) == ["a", "b"]
    one.run()
    assert len(one.tokens("a")) == len(one.tokens("b")) == 9
    assert one.last("a").num_preemptions == 0 and one.manager.usage == 0.0


def test_isolated_requests_come_before_those_that_wait(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=7, max_num_batched_tokens=8, max_model_len=25, caching=False)
    one.add("a", 8, max_tokens=9)
    one.step()
    one.add("b", 8, max_tokens=9)
    one.step()
    one.scheduler.schedule()
    one.scheduler.recover("not shown")
    one.add("c", 4, max_tokens=2)
    batches = [list(step.num_scheduled_tokens) for step in one.run()]
    assert batches[:4] == [["a"], ["a"], ["b"], ["a", "b"]], "a needs two steps"
    assert len(one.tokens("a")) == len(one.tokens("b")) == 9 and len(one.tokens("c")) == 2


def test_a_pool_for_two_of_sixteen_never_stalls(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=21, max_num_seqs=16, max_model_len=60)
    for index in range(100):
        one.add(f"r{index}", [index, index + 1, index + 2], max_tokens=35)
    preemptions = 0
    for step in one.run(limit=4000):
        assert step.num_scheduled_tokens
        preemptions += len(step.preempted_request_ids)
    assert preemptions > 0
    for index in range(100):
        prompt = [index, index + 1, index + 2]
        assert one.tokens(f"r{index}") == one.runner.expected_tokens(prompt, None, 35)
        assert one.last(f"r{index}").num_preemptions <= 10
    assert one.manager.usage == 0.0


def test_high_priority_first_in_a_tiny_pool(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=13, max_num_seqs=16, max_model_len=40, policy="priority")
    for index in range(15):
        one.add(f"low{index}", [index] * 6, max_tokens=12, priority=5, arrival_s=1.0)
    for _ in range(3):
        one.step()
    for index in range(3):
        one.add(f"high{index}", [50 + index] * 6, max_tokens=12, priority=0, arrival_s=2.0)
    ends = [name for step in one.run() for name in step.finished_request_ids]
    waiting_lows = [name for name in ends if name.startswith("low")][3:]
    assert all(ends.index(f"high{index}") < ends.index(name) for index in range(3) for name in waiting_lows[1:])


def test_a_waiting_head_that_does_not_fit_stops_nothing(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=11, policy="priority", max_model_len=41)
    one.add("small", 12, max_tokens=8, priority=3)
    one.step()
    one.add("head", 32, max_tokens=2)
    one.add("behind", 2, max_tokens=2, priority=1)
    steps = one.run()
    assert all(step.num_scheduled_tokens for step in steps)
    assert [row.request_id for step in steps for row in step.new_rows] == ["head", "behind"]


def test_a_blocked_head_is_not_matched_again_each_step(engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine(num_blocks=41, max_model_len=200, max_num_batched_tokens=64)
    one.add("a", 100, max_tokens=50)
    one.step()
    one.step()
    one.add("head", 150, max_tokens=2)
    calls = []
    match = one.manager.match_prefix
    monkeypatch.setattr(one.manager, "match_prefix", lambda user: calls.append(user) or match(user))
    for _ in range(30):
        one.step()
    assert len(calls) < 5, "its prefix is looked up only when enough has changed"
    one.run()
    assert len(one.tokens("head")) == 2


def test_usage_is_exact_and_zero_when_idle(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=101)
    for index, length in enumerate((3, 4, 17)):
        one.add(f"r{index}", length, max_tokens=4)
    one.step()
    assert one.scheduler.stats().kv_cache_usage == (1 + 1 + 5) / 100
    one.run()
    stats = one.scheduler.stats()
    assert (stats.kv_cache_usage, stats.num_running, stats.num_waiting) == (0.0, 0, 0)
    assert one.manager.pool.num_cached > 0


def test_the_step_counter_counts_tokens(engine: Callable[..., Engine]) -> None:
    one = engine()
    one.add("r", 5, max_tokens=3)
    one.run()
    assert one.scheduler.stats().num_scheduled_tokens == 7
    assert one.scheduler.stats().num_scheduled_tokens == 0
