"""Prefixes in common, which are computed once, and reads, which take no place: with a runner that needs no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.scheduled_engine import Engine


@pytest.fixture
def engine(fake_runner: Any) -> Callable[..., Engine]:
    return lambda **settings: Engine(fake_runner, **settings)


SHARED = list(range(1, 201))  # 50 units


def test_a_prefix_in_common_is_computed_once(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=400, max_num_batched_tokens=120)
    prompts = {name: [*SHARED, *([number] * 5)] for number, name in enumerate("abcd", start=500)}
    for name, prompt in prompts.items():
        one.add(name, prompt, max_tokens=3)
    one.add("other", 20, max_tokens=3)
    steps = one.run()
    scheduled = [step.num_scheduled_tokens for step in steps[:3]]
    assert scheduled == [{"a": 120}, {"a": 85, "other": 20}, {"a": 1, "other": 1, "b": 5, "c": 5, "d": 5}]
    prefilled = {row.request_id: len(row.token_ids) - row.num_computed_tokens for step in steps for row in step.new_rows}
    assert prefilled == {"a": 205, "other": 20, "b": 5, "c": 5, "d": 5}
    for name, prompt in prompts.items():
        assert one.tokens(name) == one.runner.expected_tokens(prompt, None, 3)
        assert one.last(name).num_cached_tokens == (0 if name == "a" else 200)


def test_who_waits_for_a_prefix_computes_it_when_the_other_is_gone(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=400)
    for name in "abc":
        one.add(name, [*SHARED, ord(name)])
    one.step()
    one.hear(one.scheduler.abort(["a"]))
    [row] = one.step().new_rows
    assert (row.request_id, row.num_computed_tokens) == ("b", 64), "what was computed is used"
    one.run()
    assert one.tokens("c") == one.runner.expected_tokens([*SHARED, ord("c")], None, 4)
    assert one.last("c").num_cached_tokens >= 64


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"prompt": [*SHARED[:60], 7]}, {"prompt": [*SHARED[:60], 8]}),
        ({"prompt": SHARED, "cache_salt": "a"}, {"prompt": SHARED}),
        ({"prompt": SHARED}, {"prompt": SHARED, "sampling": {"prompt_logprobs": 0}}),
        ({"prompt": SHARED, "sampling": {"prompt_logprobs": 0}}, {"prompt": SHARED}),
    ],
    ids=["short", "another salt", "wants each logit", "computes what may be cached"],
)
def test_nobody_waits_for_what_is_short_or_cannot_be_used(
    engine: Callable[..., Engine], first: dict[str, Any], second: dict[str, Any]
) -> None:
    one = engine(num_blocks=400, max_num_batched_tokens=512)
    one.add("a", **first)
    one.add("b", **second)
    assert list(one.step().num_scheduled_tokens) == ["a", "b"]


def test_f07_a_read_may_fill_the_context(engine: Callable[..., Engine]) -> None:
    one = engine(max_model_len=32)
    assert one.add("full", 32, max_tokens=0, sampling={"max_tokens": 1}) is None
    refusal = one.add("too long", 33, max_tokens=0, sampling={"max_tokens": 1})
    assert (
        refusal is not None
        and refusal.error == "the prompt has 33 tokens, and it must fit into max_model_len=32; shorten the prompt"
    )
    generation = one.add("no place", 32, max_tokens=1)
    assert generation is not None and "at least one output token must fit" in str(generation.error)
    one.run()
    assert len(one.tokens("full")) == 1 and one.last("full").finish_reason == "length"


def test_a_read_must_fit_into_the_cache_as_any_prompt(engine: Callable[..., Engine]) -> None:
    one = engine(num_blocks=9)  # 32 tokens
    assert one.add("fits", 32, max_tokens=0, sampling={"max_tokens": 1}) is None
    refusal = one.add("does not", 33, max_tokens=0, sampling={"max_tokens": 1})
    assert refusal is not None and "KV blocks" in str(refusal.error)
    one.run()
    assert len(one.tokens("fits")) == 1


def test_f07_a_read_without_numbers_fails_alone(engine: Callable[..., Engine]) -> None:
    one = engine(max_model_len=32)
    one.runner.bad = {"bad"}
    for name in ("bad", "good"):
        one.add(name, 32, max_tokens=0, sampling={"max_tokens": 1})
    one.run()
    assert one.last("bad").finish_reason == "error" and "non-finite" in str(one.last("bad").error)
    assert len(one.tokens("good")) == 1
