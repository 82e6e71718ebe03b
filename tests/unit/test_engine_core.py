"""A failing request fails alone: non-finite rows, steps that raise, refusals; and the in-process client's inbox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from halfbyte.config import SchedulerConfig
from halfbyte.engine.client import InProcessClient
from halfbyte.engine.core import EngineCore
from halfbyte.engine.scheduler import Scheduler
from halfbyte.kvcache.manager import KVCacheManager
from halfbyte.kvcache.spec import KVCacheSpec, make_layout
from halfbyte.types import EngineOutput, EngineRequest, SamplingParams, SchedulerOutput

LAYOUT = make_layout([KVCacheSpec(1, 4, 4, 4, None, "float32")] * 2, lambda spec: 128)


class FragileRunner:
    """Wraps the fake runner; a step that holds a poisoned request raises, before or after the rows have entered."""

    def __init__(self, inner: Any, poisoned: set[str], late: bool) -> None:
        self.inner, self.poisoned, self.late = inner, poisoned, late
        self.steps: list[list[str]] = []

    def execute(self, scheduled: SchedulerOutput) -> None:
        self.steps.append(list(scheduled.num_scheduled_tokens))
        self.release(scheduled)
        if not self.late:
            self.explode(scheduled)
        self.inner.execute(scheduled)
        if self.late:
            self.explode(scheduled)

    def release(self, scheduled: SchedulerOutput) -> None:
        """A real runner ignores ids it does not hold; the fake one is strict."""
        for name in ("finished_request_ids", "preempted_request_ids"):
            setattr(scheduled, name, [i for i in getattr(scheduled, name) if i in self.inner.rows])

    def explode(self, scheduled: SchedulerOutput) -> None:
        if self.poisoned & set(scheduled.num_scheduled_tokens):
            raise RuntimeError("the kernel did not like this batch")

    def sample(self, grammar_mask: Any = None) -> Any:
        return self.inner.sample(grammar_mask)

    def close(self) -> None:
        self.inner.close()


def request(name: str, prompt: list[int], max_tokens: int = 4) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(temperature=0.0), [], 0.0, max_tokens)


@pytest.fixture
def make_core(fake_runner: Any) -> Callable[..., EngineCore]:
    def make(poisoned: set[str] | None = None, late: bool = False) -> EngineCore:
        config = SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_num_queued_reqs=None,
            max_num_queued_tokens=None,
            long_prefill_token_threshold=0,
            enable_chunked_prefill=True,
            policy="fcfs",
            max_logprobs=20,
            logprobs_mode="raw_logprobs",
        )
        manager = KVCacheManager(LAYOUT, 32, enable_prefix_caching=True, max_num_batched_tokens=64)
        runner = FragileRunner(fake_runner(LAYOUT, manager.pool, 8), poisoned or set(), late)
        return EngineCore(Scheduler(config, manager, max_model_len=64), runner)

    return make


def drain(core: EngineCore) -> dict[str, list[EngineOutput]]:
    outputs: dict[str, list[EngineOutput]] = {}
    for _ in range(100):
        if not core.has_work():
            return outputs
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("the engine did not come to an end")


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_raises_costs_only_the_culprit(make_core: Callable[..., EngineCore], late: bool) -> None:
    prompts = {"a": [1, 2, 3, 4, 5], "bad": [6, 7], "c": [8, 9, 10]}
    core = make_core({"bad"}, late)
    core.add([request(name, prompt) for name, prompt in prompts.items()])
    outputs = drain(core)
    assert outputs["bad"][-1].finish_reason == "error" and outputs["bad"][-1].error
    assert "kernel" not in outputs["bad"][-1].error
    for name in ("a", "c"):
        tokens = [t for output in outputs[name] for t in output.new_token_ids]
        assert tokens == core.runner.inner.expected_tokens(prompts[name], None, 4)
        assert [o.finish_reason for o in outputs[name] if o.finish_reason] == ["length"]
    assert core.scheduler.manager.usage == 0
    core.scheduler.manager.check()


def test_a_healthy_request_after_a_culprit_is_served(make_core: Callable[..., EngineCore]) -> None:
    core = make_core({"bad"})
    core.add([request("bad", [1, 2])])
    assert drain(core)["bad"][-1].finish_reason == "error"
    core.add([request("good", [1, 2])])
    assert drain(core)["good"][-1].finish_reason == "length"


def test_refusals_and_aborts_come_with_the_next_step(make_core: Callable[..., EngineCore]) -> None:
    core = make_core()
    core.add([request("long", list(range(64))), request("gone", [1, 2, 3])])
    core.abort(["gone", "unknown"])
    outputs = drain(core)
    assert outputs["long"][0].finish_reason == "error" and "max_model_len=64" in (outputs["long"][0].error or "")
    assert [o.finish_reason for o in outputs["gone"]] == ["abort"]


def test_in_process_client_takes_messages_in_order(make_core: Callable[..., EngineCore]) -> None:
    client = InProcessClient(make_core(), info=None)  # type: ignore[arg-type]
    assert client.receive(timeout_s=0.0) is None
    client.add([request("a", [1, 2, 3], max_tokens=2)])
    client.abort(["a"])
    step = client.receive()
    assert step is not None and [o.finish_reason for o in step.outputs] == ["abort"]
