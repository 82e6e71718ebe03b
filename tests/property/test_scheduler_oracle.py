"""The scheduler under random load against a small oracle that knows the rules, not the code, with and without a step ahead.

Pools hold a part of what the requests need; requests arrive late, are aborted, turn bad, share prefixes and have priorities.
What a request's owner hears is the same in all of that, whether or not steps are launched before the result of the one before
is there. The runner (tests/conftest.py) verifies at every step that all KV that a token attends to is in the request's blocks.
"""

from __future__ import annotations

import math
import os.path
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.config import SchedulerConfig
from halfbyte.engine.core import EngineCore
from halfbyte.engine.scheduler import Scheduler
from halfbyte.kvcache.manager import KVCacheManager
from halfbyte.kvcache.sizing import blocks_for_request
from halfbyte.kvcache.spec import KVCacheSpec, make_layout
from halfbyte.types import EngineOutput, EngineRequest, PendingOutput, SamplingParams, SchedulerOutput

VOCAB = 12


@dataclass
class Plan:
    """One request, and what happens to it. arrive, abort, bad: step numbers."""

    source: EngineRequest
    arrive: int
    abort: int | None
    bad: int | None


@dataclass
class Oracle:
    """Recomputes what a step may do from the outputs alone. known: tokens in flight are as good as known."""

    config: SchedulerConfig
    max_model_len: int
    max_computed: int
    worth_waiting: int
    rank: dict[str, tuple[float, ...]] = field(default_factory=dict)
    limit: dict[str, int] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)  # running requests only
    promised: dict[str, int] = field(default_factory=dict)  # tokens known when it was admitted
    waiting: set[str] = field(default_factory=set)
    prompt_budget: int = 0  # what the last step left of it
    launched: dict[str, int] = field(default_factory=dict)  # what the last step computes
    is_short: bool = False  # whether it could not grow a request, or only at the cost of another

    def max_len(self, source: EngineRequest) -> int:
        """How many tokens it may come to; what a read says takes no place."""
        return min(self.max_model_len + source.is_read, self.max_computed + 1)

    def add(self, source: EngineRequest) -> None:
        by_priority = self.config.policy == "priority"
        self.rank[source.request_id] = (*((source.priority, source.arrival_s) if by_priority else ()), len(self.rank))
        self.known[source.request_id] = len(source.prompt_token_ids)
        self.limit[source.request_id] = min(len(source.prompt_token_ids) + max(1, source.max_tokens), self.max_len(source))
        self.waiting.add(source.request_id)

    def open(self, request_id: str) -> int:
        """Tokens that may be computed: none when the last one is known or in flight."""
        known = self.known[request_id]
        return known - self.computed[request_id] if known < self.limit[request_id] else 0

    def end(self, request_id: str) -> None:
        self.waiting.discard(request_id)
        self.computed.pop(request_id, None)
        del self.known[request_id]

    def check_step(self, step: SchedulerOutput, is_ahead: bool, patient: set[str]) -> None:
        """is_ahead: the result of the step before is not there yet. patient: who may wait for what others compute."""
        counts, config = step.num_scheduled_tokens, self.config
        victims = step.preempted_request_ids
        decodes = any(self.open(request_id) == 1 for request_id in self.computed)
        ending = [request_id for request_id in self.computed if self.open(request_id) == 0]
        assert is_ahead or not ending
        assert not (victims and ending), "nobody gives way while blocks come back by themselves"
        is_mixed = bool(config.max_num_mixed_tokens) and decodes
        self.prompt_budget = config.max_num_mixed_tokens if is_mixed else config.max_num_batched_tokens
        assert sum(counts.values()) <= config.max_num_batched_tokens
        assert bool(counts) <= bool(self.known) <= (bool(counts) or is_ahead), "there is progress while there is work"
        for request_id in victims:
            del self.computed[request_id]
            self.waiting.add(request_id)
        if victims:
            assert not step.new_rows
            if self.computed:
                assert max(self.rank[r] for r in self.computed) < min(self.rank[v] for v in victims), "the last give way"
        for row in step.grown_rows:
            assert self.computed[row.request_id] == row.num_computed_tokens
        idle = self.computed.keys() - counts.keys()
        is_full = sum(counts.values()) == config.max_num_batched_tokens
        for row in step.new_rows:
            others = self.waiting - patient
            assert self.rank[row.request_id] <= min((self.rank[w] for w in others), default=(math.inf,)), "nobody is overtaken"
            assert len(row.token_ids) == self.known[row.request_id]
            self.waiting.remove(row.request_id)
            self.computed[row.request_id] = row.num_computed_tokens
            self.promised[row.request_id] = len(row.token_ids)
            if not config.enable_chunked_prefill:
                assert row.num_computed_tokens + counts[row.request_id] == len(row.token_ids)
        assert len(self.computed) <= config.max_num_seqs
        opened = {request_id: self.open(request_id) for request_id in self.computed}
        budget = config.max_num_batched_tokens
        for request_id, count in counts.items():
            open_tokens = opened[request_id]
            is_prompt = open_tokens > 1
            assert 1 <= count <= open_tokens
            if config.long_prefill_token_threshold and config.enable_chunked_prefill and len(self.known) > 1:
                open_tokens = min(open_tokens, config.long_prefill_token_threshold)
            if open_tokens > 1:
                open_tokens = min(open_tokens, self.prompt_budget)
            assert count <= open_tokens
            assert victims or count == min(open_tokens, budget), "no budget is wasted"
            budget -= count
            if is_prompt:
                self.prompt_budget -= count
        held_back = {request_id for request_id in idle if opened[request_id] > 1 and self.prompt_budget == 0}
        left = idle - held_back - set(ending)
        self.is_short = bool(victims) or bool(left and not is_full)
        assert not left or (not step.new_rows and (is_full or ending)), "running first"

    def patient(self, scheduler: Scheduler, step: SchedulerOutput, is_ahead: bool) -> set[str]:
        """Requests with a prefix in common with one that runs, long enough, which that one had not computed before this step
        (or as far as is known: without the step whose result is not there yet)."""
        size, found = scheduler.manager.block_size, set()
        done = self.computed | {row.request_id: row.num_computed_tokens for row in step.new_rows}
        for request, other in product(scheduler.waiting, scheduler.running):
            common = len(os.path.commonprefix([request.token_ids[:-1], other.token_ids])) // size * size
            known = done[other.request_id] - (self.launched.get(other.request_id, 0) if is_ahead else 0)
            is_worth_it = common >= self.worth_waiting and known < common
            if request.cache_salt == other.cache_salt and is_worth_it and not request.skip_prefix_cache:
                found.add(request.request_id)
        return found

    def check_admission(self, step: SchedulerOutput, scheduler: Scheduler, patient: set[str]) -> None:
        """Full attention only, where the arithmetic is short: who was admitted fits as a whole, who was left does not."""
        manager, counts = scheduler.manager, step.num_scheduled_tokens
        blocks = len(manager.layout.groups)
        size = manager.block_size
        owed = 0
        for request_id, computed in self.computed.items():
            held = -(-(computed + counts.get(request_id, 0)) // size)
            owed += max(0, -(-self.promised[request_id] // size) - held) * blocks
        if step.new_rows:
            assert owed <= manager.num_free_blocks
        budget = self.config.max_num_batched_tokens - sum(counts.values())
        if budget and self.waiting and len(self.computed) < self.config.max_num_seqs and not self.is_short:
            head = scheduler.waiting.first()
            if head.request_id in patient:
                return
            match = manager.match_prefix(head)
            shared = sum(manager.pool.num_references(block) > 0 for table in match.block_ids for block in table)
            needed = -(-self.known[head.request_id] // size) * blocks - shared
            too_big = not self.config.enable_chunked_prefill and self.known[head.request_id] - match.num_tokens > budget
            too_big |= self.prompt_budget == 0 and self.known[head.request_id] - match.num_tokens > 1
            assert too_big or needed + owed > manager.num_free_blocks, "nobody waits without a reason"

    def launch(self, step: SchedulerOutput) -> None:
        self.launched = dict(step.num_scheduled_tokens)
        for request_id, count in step.num_scheduled_tokens.items():
            self.computed[request_id] += count
            self.known[request_id] += self.computed[request_id] == self.known[request_id]

    def story(self, source: EngineRequest, model: Any) -> tuple[list[int], str, int | None]:
        """All tokens of an undisturbed request, why it ends, and its stop token."""
        sampling, prompt = source.sampling, source.prompt_token_ids
        count = min(max(1, source.max_tokens), self.max_len(source) - len(prompt))
        tokens = model.expected_tokens(prompt, source.cache_salt, count)
        eos = () if sampling.ignore_eos else source.eos_token_ids
        for count, token in enumerate(tokens, 1):
            if count >= sampling.min_tokens and (token in eos or token in (sampling.stop_token_ids or ())):
                return tokens[:count], "stop", None if token in eos else token
        return tokens, "length", None


def sources(draw: st.DrawFn, index: int) -> EngineRequest:
    max_tokens = draw(st.integers(0, 24))
    return EngineRequest(
        request_id=f"r{index}",
        prompt_token_ids=[1] * draw(st.integers(0, 10)) + draw(st.lists(st.integers(0, 2), min_size=1, max_size=8)),
        sampling=SamplingParams(
            min_tokens=draw(st.integers(0, max_tokens)),
            max_tokens=max(1, max_tokens),
            stop_token_ids=draw(st.sampled_from([[], [], [], [5], [3]])),
            ignore_eos=draw(st.booleans()),
            prompt_logprobs=draw(st.sampled_from([None, None, 0])),
        ),
        eos_token_ids=draw(st.sampled_from([[], [], [3]])),
        arrival_s=float(draw(st.integers(0, 3))),
        max_tokens=max_tokens,
        priority=draw(st.integers(-1, 1)),
        cache_salt=draw(st.sampled_from([None, None, "a"])),
    )


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[SchedulerConfig, KVCacheManager, int, list[Plan]]:
    chunked = draw(st.sampled_from([True, True, False]))
    budget = draw(st.integers(1, 24) if chunked else st.integers(16, 40))
    config = SchedulerConfig(
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=budget,
        max_num_queued_reqs=None,
        max_num_queued_tokens=None,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 3])),
        enable_chunked_prefill=chunked,
        max_num_mixed_tokens=draw(st.sampled_from([0, 0, 1, 2, 5])) if chunked else 0,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        max_logprobs=20,
        logprobs_mode="raw_logprobs",
    )
    size = draw(st.integers(1, 4))
    windows = draw(st.sampled_from([[None], [None], [None, 3], [5], [None, 2, 6]]))
    layout = make_layout([KVCacheSpec(1, 8, 8, size, window, "float32") for window in windows], lambda spec: 64)
    max_model_len = draw(st.integers(12, 40))
    one_request = blocks_for_request(layout, max_model_len - 1, budget)
    num_blocks = 1 + draw(st.sampled_from([one_request * 2 // 3 + 1, one_request, one_request + 1, one_request * 3 // 2]))
    caching = draw(st.sampled_from([True, True, False]))
    manager = KVCacheManager(layout, num_blocks, enable_prefix_caching=caching, max_num_batched_tokens=budget)
    plans = []
    for index in range(draw(st.integers(2, 10))):
        arrive = draw(st.sampled_from([0, 0, 0, 1, 5, 12]))
        abort = draw(st.sampled_from([None] * 7 + [arrive + draw(st.integers(0, 12))]))
        bad = draw(st.sampled_from([None] * 9 + [arrive + draw(st.integers(0, 12))]))
        plans.append(Plan(sources(draw, index), arrive, abort, bad))
    return config, manager, max_model_len, plans


class WatchedRunner:
    """The fake runner; shows each step to the oracle before it is executed, and counts the results that nobody took yet."""

    def __init__(self, inner: Any, scheduler: Scheduler, oracle: Oracle) -> None:
        self.inner, self.scheduler, self.oracle = inner, scheduler, oracle
        self.num_pending = 0
        self.counters: Counter[str] = Counter()

    def execute(self, step: SchedulerOutput) -> None:
        manager = self.scheduler.manager
        patient = self.oracle.patient(self.scheduler, step, self.num_pending > 0)
        self.oracle.check_step(step, self.num_pending > 0, patient)
        if all(group.sliding_window is None for group in manager.layout.groups):
            self.oracle.check_admission(step, self.scheduler, patient)
        manager.check()
        self.inner.execute(step)
        self.oracle.launch(step)
        self.counters.update(preempted=len(step.preempted_request_ids), scheduled=step.total_num_scheduled_tokens)

    def sample(self, grammar_mask: object = None) -> PendingOutput:
        self.num_pending += 1
        return Late(self, self.inner.sample(grammar_mask).result())

    def close(self) -> None:
        self.inner.close()


@dataclass
class Late:
    """Counts when its result is taken."""

    runner: WatchedRunner
    output: Any

    def result(self) -> Any:
        self.runner.num_pending -= 1
        return self.output


@settings(max_examples=600, deadline=None)
@given(scenario=scenarios(), is_async=st.booleans(), worth_waiting=st.sampled_from([1, 3, 64]))
def test_scheduler_against_oracle(scenario: tuple[Any, ...], is_async: bool, worth_waiting: int, fake_runner: Any) -> None:
    config, manager, max_model_len, plans = scenario
    scheduler = Scheduler(config, manager, max_model_len=max_model_len, worth_waiting_tokens=worth_waiting)
    model = fake_runner(manager.layout, manager.pool, config.max_num_seqs, VOCAB)
    max_computed = manager.max_request_tokens
    if not config.enable_chunked_prefill:
        max_computed = min(max_computed, config.max_num_batched_tokens)
    oracle = Oracle(config, max_model_len, max_computed, worth_waiting)
    runner = WatchedRunner(model, scheduler, oracle)
    core = EngineCore(scheduler, runner, async_scheduling=is_async)
    heard: dict[str, list[EngineOutput]] = {plan.source.request_id: [] for plan in plans}
    counters: Counter[str] = Counter()
    step_number, todo = 0, sorted(plans, key=lambda plan: plan.arrive)
    while todo or core.has_work():
        while todo and todo[0].arrive <= step_number:
            source = todo.pop(0).source
            model.salts[source.request_id] = source.cache_salt
            core.add([source])
            if len(source.prompt_token_ids) < oracle.max_len(source):
                oracle.add(source)
        model.bad = {plan.source.request_id for plan in plans if plan.bad is not None and plan.bad <= step_number}
        aborted = [plan.source.request_id for plan in plans if plan.abort == step_number]
        core.abort(aborted)
        for request_id in oracle.known.keys() & set(aborted):
            oracle.end(request_id)
        done = core.step()
        for output in done.outputs:
            heard[output.request_id].append(output)
            if output.finish_reason and output.request_id in oracle.known:
                oracle.end(output.request_id)
        manager.check()
        assert runner.num_pending <= is_async, "one step ahead at most"
        stats = done.stats
        counters.update(preempted=stats.num_preemptions, scheduled=stats.num_scheduled_tokens)
        assert (stats.num_running, stats.num_waiting) == (len(oracle.computed), len(oracle.waiting))
        step_number += 1
        assert step_number < 5000, "all requests end"
    check_end(scheduler, model, counters, runner.counters, is_async)
    for plan in plans:
        check_outputs(plan, heard[plan.source.request_id], oracle, model)


def check_end(scheduler: Scheduler, runner: Any, told: Counter[str], done: Counter[str], is_async: bool) -> None:
    """Nothing is left: no block, no row, no number. told: what the statistics say; done: what the runner was asked."""
    assert scheduler.manager.usage == 0.0 and scheduler.manager.num_free_blocks == scheduler.manager.pool.num_blocks - 1
    runner.execute(scheduler.schedule())
    assert not runner.rows
    assert not scheduler.running and not len(scheduler.waiting)
    assert told["preempted"] == done["preempted"]
    assert told["scheduled"] <= done["scheduled"], "a step too many does not count"
    assert is_async or told["scheduled"] == done["scheduled"]


def check_outputs(plan: Plan, outputs: list[EngineOutput], oracle: Oracle, runner: Any) -> None:
    """What the request's owner heard: the model's tokens, and exactly one end."""
    source = plan.source
    assert [bool(output.finish_reason) for output in outputs] == [False] * (len(outputs) - 1) + [True]
    tokens = [token for output in outputs for token in output.new_token_ids]
    story, reason, stop_token_id = oracle.story(source, runner)
    last = outputs[-1]
    if last.finish_reason == "abort":
        assert plan.abort is not None and last.new_token_ids == []
        assert tokens == story[: len(tokens)]
    elif last.finish_reason == "error":
        assert last.error and last.new_token_ids == []
        assert plan.bad is not None or len(source.prompt_token_ids) >= oracle.max_len(source)
        assert tokens == story[: len(tokens)]
    else:
        assert (tokens, last.finish_reason, last.stop_token_id) == (story, reason, stop_token_id)
    first = [output for output in outputs if output.new_token_ids][:1]
    assert [output.scheduled_s is not None for output in outputs if output.new_token_ids] == [True, *[False] * len(tokens)][
        : len(tokens)
    ]
    for output in first:
        wanted = source.prompt_token_ids[1:] if source.sampling.prompt_logprobs is not None else None
        assert wanted == (None if output.prompt_logprobs is None else [entry.token_id for entry in output.prompt_logprobs])
        assert output.num_cached_tokens == 0 or source.sampling.prompt_logprobs is None
