"""A step is launched before the result of the one before it is taken: what that changes, and what it must not change.

The runner notes who calls what, and can fail at each of its three calls: when a step is executed, sampled, or its result taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from halfbyte.config import SchedulerConfig
from halfbyte.engine.core import EngineCore
from halfbyte.engine.scheduler import Scheduler
from halfbyte.kvcache.manager import KVCacheManager
from halfbyte.kvcache.spec import KVCacheSpec, make_layout
from halfbyte.types import EngineOutput, EngineRequest, ModelRunnerOutput, SamplingParams, SchedulerOutput

PLACES = ("execute", "sample", "result")


@dataclass
class LateOutput:
    """The result of step number `number`, which may fail."""

    runner: LateRunner
    number: int
    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        self.runner.note("result", self.number, self.output.request_ids)
        return self.output


@dataclass
class LateRunner:
    """Wraps the fake runner. calls: (name, number of the step) in their order. poisoned: (name, request): such a call raises."""

    inner: Any
    calls: list[tuple[str, int]] = field(default_factory=list)
    steps: list[SchedulerOutput] = field(default_factory=list)
    poisoned: set[tuple[str, str]] = field(default_factory=set)

    def note(self, name: str, number: int, request_ids: list[str]) -> None:
        self.calls.append((name, number))
        if any((name, request_id) in self.poisoned for request_id in request_ids):
            raise RuntimeError("the device did not like this batch")

    def execute(self, scheduled: SchedulerOutput) -> None:
        for name in ("finished_request_ids", "preempted_request_ids"):  # a real runner ignores those that never entered
            setattr(scheduled, name, [i for i in getattr(scheduled, name) if i in self.inner.rows])
        self.inner.execute(scheduled)
        if scheduled.num_scheduled_tokens:
            self.steps.append(scheduled)
            self.note("execute", len(self.steps), list(scheduled.num_scheduled_tokens))

    def sample(self, grammar_mask: Any = None) -> LateOutput:
        self.note("sample", len(self.steps), list(self.steps[-1].num_scheduled_tokens))
        return LateOutput(self, len(self.steps), self.inner.sample(grammar_mask))

    def close(self) -> None:
        self.inner.close()


class Engine:
    """An engine core over that runner, and what its requests' owners have heard."""

    def __init__(
        self,
        runner_class: Any,
        *,
        ahead: bool = True,
        num_blocks: int = 100,
        caching: bool = True,
        max_model_len: int = 512,
        windows: tuple[int | None, ...] = (None,),
        **config: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_num_queued_reqs": None,
            "max_num_queued_tokens": None,
            "long_prefill_token_threshold": 0,
            "enable_chunked_prefill": True,
            "policy": "fcfs",
            "max_logprobs": 20,
            "logprobs_mode": "raw_logprobs",
        }
        settings = SchedulerConfig(**(defaults | config))
        layout = make_layout([KVCacheSpec(1, 8, 8, 4, window, "float32") for window in windows], lambda spec: 64)
        batched = settings.max_num_batched_tokens
        self.manager = KVCacheManager(layout, num_blocks, enable_prefix_caching=caching, max_num_batched_tokens=batched)
        self.model = runner_class(layout, self.manager.pool, settings.max_num_seqs)
        self.runner = LateRunner(self.model)
        scheduler = Scheduler(settings, self.manager, max_model_len=max_model_len)
        self.core = EngineCore(scheduler, self.runner, async_scheduling=ahead)
        self.heard: dict[str, list[EngineOutput]] = {}
        self.num_scheduled_tokens = self.num_preemptions = 0

    def add(self, name: str, prompt: list[int], max_tokens: int = 4, eos: list[int] | None = None, **sampling: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        self.core.add([EngineRequest(name, prompt, params, eos or [], 0.0, max_tokens)])

    def step(self) -> dict[str, list[int]]:
        """The new tokens of each request that has news."""
        done = self.core.step()
        self.manager.check()
        self.num_scheduled_tokens += done.stats.num_scheduled_tokens
        self.num_preemptions += done.stats.num_preemptions
        for output in done.outputs:
            self.heard.setdefault(output.request_id, []).append(output)
        return {output.request_id: output.new_token_ids for output in done.outputs}

    def run(self) -> None:
        for _ in range(1000):
            if not self.core.has_work():
                assert self.manager.usage == 0.0
                return
            self.step()
        raise AssertionError("the engine did not come to an end")

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.heard[name] for token in output.new_token_ids]

    def end(self, name: str) -> str | None:
        """How the request ended: with one last output."""
        assert [bool(o.finish_reason) for o in self.heard[name]] == [False] * (len(self.heard[name]) - 1) + [True]
        return self.heard[name][-1].finish_reason

    def story(self, prompt: list[int], count: int) -> list[int]:
        tokens: list[int] = self.model.expected_tokens(prompt, None, count)
        return tokens

    def rare(self, prompt: list[int], at_least: int) -> tuple[int, int]:
        """(index, token) of a generated token that none before it equals."""
        tokens = self.story(prompt, at_least + 10)
        index = next(i for i in range(at_least, len(tokens)) if tokens[i] not in tokens[:i])
        return index, tokens[index]

    def computed(self, name: str) -> int:
        return sum(step.num_scheduled_tokens.get(name, 0) for step in self.runner.steps)


@pytest.fixture
def engine(fake_runner: Any) -> Callable[..., Engine]:
    return lambda **settings: Engine(fake_runner, **settings)


def test_the_next_step_is_launched_before_a_result_is_taken(engine: Callable[..., Engine]) -> None:
    one = engine()
    one.add("a", [1, 2, 3], max_tokens=3)
    tokens = one.story([1, 2, 3], 3)
    assert [one.step() for _ in range(3)] == [{"a": [token]} for token in tokens], "no token waits for a step after the next"
    assert one.runner.calls == [
        *(("execute", 1), ("sample", 1), ("execute", 2), ("sample", 2), ("result", 1)),
        *(("execute", 3), ("sample", 3), ("result", 2)),
        ("result", 3),
    ]
    assert one.end("a") == "length" and not one.core.has_work()


def test_without_it_each_result_is_taken_at_once(engine: Callable[..., Engine]) -> None:
    one = engine(ahead=False)
    one.add("a", [1, 2, 3], max_tokens=2)
    one.run()
    assert one.runner.calls == [(name, number) for number in (1, 2) for name in PLACES]


def test_a_request_that_arrives_while_a_step_is_in_flight_is_in_the_next(engine: Callable[..., Engine]) -> None:
    one = engine()
    one.add("a", [1, 2, 3], max_tokens=9)
    one.step()
    one.add("b", [4, 5], max_tokens=2)
    assert list(one.step()) == ["a"] and one.runner.steps[-1].num_scheduled_tokens == {"a": 1, "b": 2}
    assert list(one.step()) == ["a", "b"], "in the result after"
    one.run()
    assert one.tokens("b") == one.story([4, 5], 2)


@pytest.mark.parametrize("ahead", [False, True])
def test_known_ends_cost_no_step_too_many(engine: Callable[..., Engine], ahead: bool) -> None:
    one = engine(ahead=ahead, max_model_len=12)
    one.add("a", [1, 2, 3], max_tokens=5)
    one.add("long", [4] * 9, max_tokens=50)
    one.run()
    assert (one.computed("a"), one.computed("long")) == (3 + 4, 11) and len(one.tokens("long")) == 3
    assert one.num_scheduled_tokens == 18


def test_a_stop_token_costs_one_step_that_nobody_hears_of(engine: Callable[..., Engine]) -> None:
    one = engine()
    index, token = one.rare([1, 2, 3], 2)
    one.add("a", [1, 2, 3], max_tokens=30, eos=[token])
    one.add("b", [7, 8], max_tokens=index + 6)
    one.run()
    assert one.tokens("a") == one.story([1, 2, 3], index + 1) and one.end("a") == "stop"
    assert one.tokens("b") == one.story([7, 8], index + 6)
    assert one.computed("a") == 3 + index + 1, "a step with the stop token itself"
    assert one.num_scheduled_tokens == 3 + index + 2 + index + 5, "which does not count"
    last = max(i for i, step in enumerate(one.runner.steps) if "a" in step.num_scheduled_tokens)
    assert one.runner.steps[last + 1].finished_request_ids == ["a"], "its row is released by the step after"


def test_the_last_request_leaves_nothing_in_flight(engine: Callable[..., Engine]) -> None:
    one = engine()
    index, token = one.rare([1, 2, 3], 1)
    one.add("a", [1, 2, 3], max_tokens=30, eos=[token])
    while "a" not in one.heard or not one.heard["a"][-1].finish_reason:
        one.step()
    assert one.core.has_work() and one.manager.usage == 0.0, "its step too many"
    assert one.step() == {} and not one.core.has_work() and not one.model.rows
    assert [call for call in one.runner.calls if call[0] == "result"] == [("result", n + 1) for n in range(index + 2)]


def test_an_aborted_request_gives_its_blocks_away_while_it_is_computed(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=5, max_num_seqs=2)
    one.add("a", [1] * 12, max_tokens=4)
    one.step()
    one.core.abort(["a"])
    one.add("b", [2] * 15, max_tokens=1)
    assert one.step() == {"a": []}, "nothing is heard of the token in flight"
    assert one.runner.steps[-1].num_scheduled_tokens == {"b": 15} and one.runner.steps[-1].finished_request_ids == ["a"]
    one.run()
    assert one.end("a") == "abort" and len(one.tokens("a")) == 1 and one.tokens("b") == one.story([2] * 15, 1)


def test_an_id_is_used_again_while_its_first_owner_is_in_flight(engine: Callable[..., Engine]) -> None:
    one = engine()
    one.add("a", [1, 2, 3], max_tokens=9)
    one.step()
    one.core.abort(["a"])
    one.add("a", [7, 8], max_tokens=3)
    one.step()
    assert one.heard.pop("a")[-1].finish_reason == "abort"
    one.run()
    assert one.tokens("a") == one.story([7, 8], 3)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_raises_costs_only_the_culprit(engine: Callable[..., Engine], place: str, ahead: bool) -> None:
    one = engine(ahead=ahead)
    prompts = {"a": [1, 2, 3, 4, 5], "bad": [6, 7], "c": [8, 9, 10]}
    for name, prompt in prompts.items():
        one.add(name, prompt, max_tokens=7, prompt_logprobs=0)
    one.step()
    one.step()
    one.runner.poisoned = {(place, "bad")}
    one.run()
    assert one.end("bad") == "error" and "could not compute" in (one.heard["bad"][-1].error or "")
    assert one.tokens("bad") == one.story([6, 7], len(one.tokens("bad")))
    for name in ("a", "c"):
        assert one.tokens(name) == one.story(prompts[name], 7) and one.end(name) == "length"
        assert [entry.token_id for entry in one.heard[name][0].prompt_logprobs or ()] == prompts[name][1:]


def test_what_was_launched_after_a_step_that_raised_is_computed_again(engine: Callable[..., Engine]) -> None:
    one = engine(max_num_batched_tokens=2)
    one.runner.poisoned = {("result", "bad")}
    one.add("bad", [6, 7], max_tokens=9)
    one.add("after", [1] * 9, max_tokens=5, prompt_logprobs=0)
    one.step()
    assert [step.num_scheduled_tokens for step in one.runner.steps] == [{"bad": 2}, {"bad": 1, "after": 1}]
    assert one.end("bad") == "error" and one.tokens("bad") == []
    one.run()
    assert one.tokens("after") == one.story([1] * 9, 5) and one.end("after") == "length"
    assert [entry.token_id for entry in one.heard["after"][0].prompt_logprobs or ()] == [1] * 8


def test_two_steps_in_flight_that_both_raise_cost_two_culprits(engine: Callable[..., Engine]) -> None:
    one = engine(max_num_batched_tokens=2)
    one.runner.poisoned = {("result", "a"), ("execute", "b")}
    for name, prompt in (("a", [6, 7]), ("b", [8]), ("c", [9])):
        one.add(name, prompt, max_tokens=3)
    one.step()
    assert one.runner.calls[-2:] == [("execute", 2), ("result", 1)], "what was launched before is taken first"
    one.run()
    assert (one.end("a"), one.end("b"), one.end("c")) == ("error", "error", "length")
    assert one.tokens("c") == one.story([9], 3)


def test_a_step_that_raises_loses_no_token_of_the_one_before(engine: Callable[..., Engine]) -> None:
    one = engine()
    one.add("a", [1, 2, 3], max_tokens=9)
    one.runner.poisoned = {("execute", "b")}
    one.step()
    one.add("b", [4, 5])
    assert one.step() == {"a": one.story([1, 2, 3], 2)[1:]}
    one.run()
    assert one.tokens("a") == one.story([1, 2, 3], 9) and one.end("b") == "error"


def test_an_isolated_request_takes_blocks_from_others(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=7, max_model_len=25, caching=False)
    for name, length in (("a", 8), ("b", 4), ("c", 12)):
        one.add(name, [ord(name)] * length, max_tokens=9)
    one.runner.poisoned = {("execute", "c")}
    one.step()
    one.runner.poisoned = set()
    for _ in range(2):
        one.step()
    assert [list(step.num_scheduled_tokens) for step in one.runner.steps[1:4]] == [["a"], ["a"], ["b"]], (
        "each until it has a token"
    )
    one.run()
    assert one.num_preemptions > 0, "those before c grew meanwhile"
    for name, length in (("a", 8), ("b", 4), ("c", 12)):
        assert one.tokens(name) == one.story([ord(name)] * length, 9)


def test_a_request_is_isolated_once(engine: Callable[..., Engine]) -> None:
    one = engine()
    one.runner.poisoned = {("execute", "b")}
    for name in "abc":
        one.add(name, [ord(name)] * 3, max_tokens=9)
    one.step()
    one.runner.poisoned = set()
    one.step()
    one.runner.poisoned = {("result", "a")}
    one.step()
    assert one.end("a") == "error" and list(one.runner.steps[-1].num_scheduled_tokens) == ["b"], "which built upon it"
    alone = len(one.runner.steps)
    one.run()
    assert [list(step.num_scheduled_tokens) for step in one.runner.steps[alone : alone + 5]] == [
        ["b"],
        ["b"],
        ["c"],
        ["c"],
        ["b", "c"],
    ]
    assert [one.tokens(name) for name in "bc"] == [one.story([ord(name)] * 3, 9) for name in "bc"]


def test_bad_numbers_cost_one_request_and_nothing_of_it_stays(engine: Callable[..., Engine]) -> None:
    one = engine()
    prompt = list(range(12))
    one.add("bad", prompt, max_tokens=20)
    one.add("good", [7, 8], max_tokens=9)
    for _ in range(3):
        one.step()
    one.model.bad = {"bad"}
    one.run()
    assert one.end("bad") == "error" and one.tokens("bad") == one.story(prompt, 4), "all that were sampled before"
    assert one.tokens("good") == one.story([7, 8], 9)
    one.model.bad = set()
    one.add("again", prompt)
    one.run()
    assert one.heard["again"][-1].num_cached_tokens == 0


def test_only_what_has_been_heard_of_is_published(engine: Callable[..., Engine]) -> None:
    one = engine()
    one.add("a", [1, 2, 3], max_tokens=9)
    one.step()
    assert one.computed("a") == 4 and one.manager.pool.num_cached == 0, "the block that the step in flight fills"
    one.step()
    assert one.computed("a") == 5 and one.manager.pool.num_cached == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_a_sliding_window_passes_no_block_that_waits_to_be_published(engine: Callable[..., Engine], ahead: bool) -> None:
    one = engine(ahead=ahead, windows=(None, 5))
    shared = [1] * 20
    one.add("a", shared + [2] * 20, max_tokens=2)
    one.run()
    one.add("b", shared + [3] * 9, max_tokens=2)
    one.run()
    assert one.heard["b"][0].num_cached_tokens == 20


def test_in_a_full_pool_the_window_passes_it_all_the_same(engine: Callable[..., Engine]) -> None:
    one = engine(windows=(5,), num_blocks=7, max_num_batched_tokens=12)
    one.add("a", [1] * 80, max_tokens=9)
    one.run()
    assert one.tokens("a") == one.story([1] * 80, 9) and one.num_preemptions == 0


def test_a_token_in_flight_of_a_preempted_request_is_delivered(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=5, max_model_len=17, caching=False)
    one.add("a", [1] * 8, max_tokens=8)
    one.add("b", [2] * 8, max_tokens=8, prompt_logprobs=0)
    assert list(one.step()) == ["a", "b"]
    assert one.runner.steps[1].preempted_request_ids == ["b"] and one.runner.steps[1].num_scheduled_tokens == {"a": 1}
    assert [entry.token_id for entry in one.heard["b"][0].prompt_logprobs or ()] == [2] * 7
    one.run()
    [resumed] = [row for step in one.runner.steps[1:] for row in step.new_rows]
    assert resumed.token_ids == [2] * 8 + one.story([2] * 8, 1)
    for name, prompt in (("a", [1] * 8), ("b", [2] * 8)):
        assert one.tokens(name) == one.story(prompt, 8) and one.end(name) == "length"
    assert one.heard["b"][-1].num_preemptions == 1


def test_prompt_logprobs_come_once_when_the_token_in_flight_is_lost(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=6, max_model_len=17, caching=False, max_num_batched_tokens=10)
    one.add("a", [1] * 8, max_tokens=8)
    one.add("b", [2] * 8, max_tokens=8, prompt_logprobs=0)
    one.step()
    one.runner.poisoned = {("result", "b")}
    one.step()
    assert [step.num_scheduled_tokens for step in one.runner.steps[1:3]] == [{"a": 1, "b": 6}, {"a": 1}]
    one.runner.poisoned = set()
    one.run()
    assert one.tokens("b") == one.story([2] * 8, 8)
    assert [entry.token_id for entry in one.heard["b"][0].prompt_logprobs or ()] == [2] * 7


def test_prompt_logprobs_of_a_prompt_that_is_preempted_half_way_come_once(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=8, max_num_batched_tokens=4, max_model_len=25, caching=False)
    one.add("a", [1] * 3, max_tokens=20)
    one.step()
    one.add("b", [2] * 20, max_tokens=2, prompt_logprobs=0)
    one.run()
    assert one.heard["b"][0].num_preemptions == 1, "before its first token"
    assert one.tokens("b") == one.story([2] * 20, 2)
    assert [entry.token_id for entry in one.heard["b"][0].prompt_logprobs or ()] == [2] * 19


@pytest.mark.parametrize("ahead", [False, True])
def test_nobody_gives_way_while_a_last_token_is_in_flight(engine: Callable[..., Engine], ahead: bool) -> None:
    one = engine(ahead=ahead, num_blocks=5, max_model_len=17, caching=False)
    one.add("a", [1] * 7, max_tokens=2)
    one.add("b", [2] * 7, max_tokens=6)
    one.add("c", [3] * 4, max_tokens=1)
    one.run()
    assert one.num_preemptions == 0, "the blocks of a come back by themselves"
    assert one.tokens("b") == one.story([2] * 7, 6) and one.tokens("c") == one.story([3] * 4, 1)


def test_a_mask_waits_for_the_tokens_before_it(engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    schedule = one.core.scheduler.schedule

    def with_mask() -> SchedulerOutput:
        scheduled = schedule()
        scheduled.needs_grammar_mask = True
        return scheduled

    monkeypatch.setattr(one.core.scheduler, "schedule", with_mask)
    one.add("a", [1, 2, 3], max_tokens=3)
    one.run()
    assert one.runner.calls == [
        *(("execute", 1), ("sample", 1), ("execute", 2), ("result", 1), ("sample", 2)),
        *(("execute", 3), ("result", 2), ("sample", 3)),
        ("result", 3),
    ]
    assert one.tokens("a") == one.story([1, 2, 3], 3)
