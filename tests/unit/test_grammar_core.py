"""Constraints in the engine: every token is sampled under its mask, whatever happens to the request meanwhile.

The runner samples by the digest of all tokens so far, among those that the mask allows: equal tokens mean equal masks, and a
token that was sampled without one ends its request with an error, almost surely.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from halfbyte.config import SchedulerConfig
from halfbyte.engine.core import EngineCore
from halfbyte.engine.grammar.compile import GrammarCompiler
from halfbyte.engine.grammar.preparation import Preparation
from halfbyte.engine.grammar.rows import ids_of
from halfbyte.engine.scheduler import Scheduler
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.kvcache.manager import KVCacheManager
from halfbyte.kvcache.spec import KVCacheSpec, make_layout
from halfbyte.types import (
    Constraint,
    EngineOutput,
    EngineRequest,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    Thinking,
)

LIST = 'start: "[" item ("," item)* "]"\nitem: /[0-9]{1,3}|"[a-z]{0,6}"/'
PROMPTS = {"a": [1, 2, 3], "b": [1, 2, 3, 4, 5, 6, 7, 8, 9], "c": [9, 8, 7, 6, 5] * 5}


def masked(runner_class: Any, vocab_size: int) -> Any:
    """The fake runner, sampling under a mask. rebels: requests for which it does not. raises: which raise, once."""

    class MaskedRunner(runner_class):  # type: ignore[misc]
        rebels: set[str]
        raises: set[str]

        def execute(self, scheduled: SchedulerOutput) -> None:
            for name in ("finished_request_ids", "preempted_request_ids"):  # a real runner ignores those that never entered
                setattr(scheduled, name, [i for i in getattr(scheduled, name) if i in self.rows])
            super().execute(scheduled)
            if found := self.raises & set(scheduled.num_scheduled_tokens):
                self.raises -= found
                raise RuntimeError("the device did not like this batch")

        def sample(self, grammar_mask: Any = None) -> ModelRunnerOutput:
            output: ModelRunnerOutput = super().sample()
            for at, (name, tokens) in enumerate(zip(output.request_ids, output.token_ids, strict=True)):
                if not tokens or name in self.rebels or grammar_mask is None or (grammar_mask[at] == -1).all():
                    continue
                assert grammar_mask.shape == (len(output.request_ids), -(-vocab_size // 32)) and not name.startswith("free")
                allowed = ids_of(grammar_mask[at])
                row = self.rows[name]
                tokens[:] = row.token_ids[-1:] = [allowed[row.digests[-2] % len(allowed)]]
                row.digests = self.digests_of(row.token_ids, None, row.digests[:-1])
            return output

    return MaskedRunner


class Engine:
    """An engine core over that runner, and what its requests' owners have heard."""

    def __init__(self, runner_class: Any, tokenizer: Tokenizer, **settings: Any) -> None:
        assert tokenizer.eos_token_id is not None
        self.eos = tokenizer.eos_token_id
        ahead, num_blocks = settings.pop("ahead", False), settings.pop("num_blocks", 200)
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
        config = SchedulerConfig(**(defaults | settings))
        layout = make_layout([KVCacheSpec(1, 4, 4, 4, None, "float32")], lambda spec: 64)
        self.manager = KVCacheManager(layout, num_blocks, enable_prefix_caching=True, max_num_batched_tokens=64)
        self.runner = masked(runner_class, tokenizer.vocab_size)(layout, self.manager.pool, config.max_num_seqs)
        self.runner.vocab_size = tokenizer.vocab_size
        self.runner.rebels, self.runner.raises = set(), set()
        self.gate = threading.Event()
        self.gate.set()
        preparation = Preparation(lambda: tokenizer if self.gate.wait(10) else None, tokenizer.vocab_size, [self.eos])  # type: ignore[arg-type, return-value]
        scheduler = Scheduler(config, self.manager, max_model_len=120)
        self.core = EngineCore(scheduler, self.runner, preparation, async_scheduling=ahead)
        self.heard: dict[str, list[EngineOutput]] = {}
        self.num_preemptions = 0

    def add(
        self,
        name: str,
        prompt: list[int],
        grammar: str | None = None,
        max_tokens: int = 40,
        thinking: Thinking | None = None,
        **sampling: Any,
    ) -> None:
        constraint = None if grammar is thinking is None else Constraint(grammar, thinking)
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        self.core.add([EngineRequest(name, prompt, params, [self.eos], 0.0, max_tokens, constraint=constraint)])

    def step(self) -> None:
        done = self.core.step()
        self.manager.check()
        self.num_preemptions += done.stats.num_preemptions
        for output in done.outputs:
            self.heard.setdefault(output.request_id, []).append(output)

    def run(self) -> None:
        for _ in range(2000):
            if not self.core.has_work():
                assert self.manager.usage == 0.0
                return
            self.step()
        raise AssertionError("the engine did not come to an end")

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.heard[name] for token in output.new_token_ids]

    def end(self, name: str) -> str | None:
        assert [bool(o.finish_reason) for o in self.heard[name]] == [False] * (len(self.heard[name]) - 1) + [True]
        return self.heard[name][-1].finish_reason


@pytest.fixture
def engine(fake_runner: Any, json_tokenizer: Tokenizer) -> Callable[..., Engine]:
    return lambda **settings: Engine(fake_runner, json_tokenizer, **settings)


@pytest.fixture
def alone(engine: Callable[..., Engine]) -> dict[str, list[int]]:
    """The tokens of each prompt's answer in an engine of its own."""
    answers = {}
    for name, prompt in PROMPTS.items():
        one = engine()
        one.add(name, prompt, LIST)
        one.run()
        answers[name] = one.tokens(name)
    return answers


def whole(tokenizer: Tokenizer, grammar: str, tokens: list[int]) -> bool:
    matcher = GrammarCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.vocab_size - 1]).matcher(grammar)
    return bool(matcher.consume_tokens(tokens)) and bool(matcher.is_accepting())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("shape", ["batched", "chunked", "preempted", "failing"])
def test_answers_are_those_of_requests_that_are_alone(
    engine: Callable[..., Engine], alone: dict[str, list[int]], json_tokenizer: Tokenizer, shape: str, ahead: bool
) -> None:
    settings = {"chunked": {"max_num_batched_tokens": 4}, "preempted": {"num_blocks": 12}}.get(shape, {})
    one = engine(ahead=ahead, **settings)
    for name, prompt in PROMPTS.items():
        one.add(name, prompt, LIST)
    one.add("free", [5, 6, 7], max_tokens=30)
    for _ in range(6):
        one.step()
    if shape == "failing":
        one.runner.raises = {"b"}
    one.run()
    for name, tokens in alone.items():
        assert one.tokens(name) == tokens and one.end(name) == "stop"
        assert one.heard[name][-1].ends_in_text and whole(json_tokenizer, LIST, tokens)
    assert one.tokens("free") == one.runner.expected_tokens([5, 6, 7], None, 30)
    assert (one.num_preemptions > 0) == (shape == "preempted")


def test_an_answer_after_a_prefix_from_the_cache_is_the_same(engine: Callable[..., Engine], alone: dict[str, list[int]]) -> None:
    one = engine()
    for _ in range(2):
        one.heard.clear()
        one.add("c", PROMPTS["c"], LIST)
        one.run()
        assert one.tokens("c") == alone["c"]
    assert one.heard["c"][0].num_cached_tokens > 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("sampling", [{"min_tokens": 20}, {"ignore_eos": True}])
def test_an_answer_that_is_whole_ends_whatever_else_is_asked(
    engine: Callable[..., Engine], json_tokenizer: Tokenizer, sampling: dict[str, Any], ahead: bool
) -> None:
    one = engine(ahead=ahead)
    one.add("a", [1, 2], 'start: "yes" | "no"', max_tokens=30, **sampling)
    one.run()
    assert one.end("a") == "stop" and json_tokenizer.decode(one.tokens("a")) in ("yes", "no")


@pytest.mark.parametrize("ahead", [False, True])
def test_a_thought_is_free_and_the_answer_after_it_is_not(
    engine: Callable[..., Engine], json_tokenizer: Tokenizer, ahead: bool
) -> None:
    one = engine(ahead=ahead)
    thinking = Thinking([300], [301, 302], [303, 301, 302], is_open=True, budget=6)
    one.runner.rebels = {"a"}
    one.add("a", [1, 2], thinking=thinking, grammar='start: "yes"')
    thought = one.runner.expected_tokens([1, 2], None, 6)
    for _ in range(100):
        if one.runner.rebels and len(one.runner.rows.get("a").token_ids if "a" in one.runner.rows else ()) == 8:
            one.runner.rebels = set()  # from now on it must be told what to say
        if not one.core.has_work():
            break
        one.step()
    assert one.tokens("a") == [*thought, 303, 301, 302, *json_tokenizer.encode("yes")] and one.end("a") == "stop"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_whose_token_is_not_allowed_fails_alone(
    engine: Callable[..., Engine], alone: dict[str, list[int]], caplog: pytest.LogCaptureFixture, ahead: bool
) -> None:
    one = engine(ahead=ahead)
    for name, prompt in PROMPTS.items():
        one.add(name, prompt, LIST)
    one.step()
    one.runner.rebels = {"b"}
    one.run()
    assert one.end("b") == "error" and "grammar" in (one.heard["b"][-1].error or "")
    assert len([record for record in caplog.records if "request b failed" in record.getMessage()]) == 1
    assert [one.tokens(name) for name in "ac"] == [alone[name] for name in "ac"]


def test_others_go_on_while_a_grammar_is_compiled(engine: Callable[..., Engine], alone: dict[str, list[int]]) -> None:
    one = engine()
    one.gate.clear()
    one.add("a", PROMPTS["a"], LIST)
    one.add("free", [5, 6], max_tokens=3)
    for _ in range(4):
        one.step()
    assert one.end("free") == "length" and "a" not in one.heard and one.core.has_work()
    assert one.core.step().stats.num_waiting == 1, "and nothing to do but to wait a while"
    one.gate.set()
    one.run()
    assert one.tokens("a") == alone["a"]


def test_equal_requests_are_served_in_the_order_of_their_arrival(engine: Callable[..., Engine]) -> None:
    one = engine(max_num_seqs=1)
    one.gate.clear()
    for name in ("first", "second", "third"):
        one.add(name, [1, 2], LIST)
    one.gate.set()
    one.run()
    assert list(one.heard) == ["first", "second", "third"]


def test_a_request_that_waits_for_its_grammar_can_be_aborted(engine: Callable[..., Engine]) -> None:
    one = engine()
    one.gate.clear()
    one.add("a", [1, 2], LIST)
    one.core.abort(["a", "unknown"])
    one.step()
    assert one.end("a") == "abort" and not one.core.has_work()
    one.gate.set()
    one.add("a", [1, 2], 'start: "yes"')
    one.run()
    assert one.heard["a"][-1].finish_reason == "stop", "an id is free again"


def test_a_grammar_that_cannot_be_compiled_ends_its_request(engine: Callable[..., Engine]) -> None:
    one = engine()
    one.add("bad", [1, 2], "start: /(/")
    one.add("good", [1, 2], LIST)
    one.run()
    assert one.end("bad") == "error" and "grammar" in (one.heard["bad"][-1].error or "") and one.end("good") == "stop"


def test_an_engine_without_constraints_loads_no_tokenizer(engine: Callable[..., Engine]) -> None:
    one = engine()
    one.gate.clear()
    one.add("free", [1, 2], max_tokens=3)
    one.add("thinks", [1, 2], thinking=Thinking([300], [301], [301], is_open=False, budget=3), max_tokens=3)
    one.runner.rebels = {"thinks"}
    one.run()
    assert one.end("free") == one.end("thinks") == "length"


def test_masks_are_rows_of_32_tokens_to_the_word() -> None:
    row = np.array([0b101, -(2**31)], np.int32)
    assert ids_of(row) == [0, 2, 63] and ids_of(row, 2) == [0, 2]
