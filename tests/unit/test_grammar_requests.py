"""From what a request asks to the constraint that travels to the engine, offline and in a server's event loop."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from halfbyte.engine import async_engine
from halfbyte.engine.async_engine import AsyncEngine
from halfbyte.engine.grammar.compile import GrammarOptions, lark_of
from halfbyte.engine.requests import RequestMaker
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.errors import UserError
from halfbyte.types import Constraint, EngineInfo, EngineRequest, SamplingParams, StepOutput, StructuredOutputsParams, Thinking

THINKING = Thinking([300], [301], [301], is_open=True)
CHOICE = StructuredOutputsParams(choice=["yes", "no"])


def make_info(tokenizer: Tokenizer) -> EngineInfo:
    numbers: dict[str, Any] = dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks"), 16)
    return EngineInfo(
        model="m",
        architecture="fake",
        dtype="float32",
        kv_cache_dtype="float32",
        vocab_size=tokenizer.vocab_size,
        max_model_len=64,
        eos_token_ids=[tokenizer.vocab_size - 1],
        max_logprobs=20,
        kv_cache_bytes=0,
        kv_cache_tokens=0,
        max_concurrency=1.0,
        enable_prefix_caching=True,
        **numbers,
    )


class SilentClient:
    """An engine that takes requests and never answers."""

    def __init__(self, info: EngineInfo) -> None:
        self.info, self.added = info, list[EngineRequest]()
        self._closed = threading.Event()

    def add(self, requests: list[EngineRequest]) -> None:
        self.added += requests

    def abort(self, request_ids: list[str]) -> None:
        pass

    def receive(self, timeout_s: float | None = None) -> StepOutput | None:
        self._closed.wait(0.01)
        return None

    def close(self) -> None:
        self._closed.set()


@pytest.fixture
def maker(json_tokenizer: Tokenizer) -> RequestMaker:
    return RequestMaker(make_info(json_tokenizer), json_tokenizer)


@pytest_asyncio.fixture
async def engine(json_tokenizer: Tokenizer) -> AsyncIterator[AsyncEngine]:
    one = AsyncEngine(SilentClient(make_info(json_tokenizer)), json_tokenizer)
    yield one
    await one.close()


def test_what_is_asked_travels_as_a_grammar(maker: RequestMaker) -> None:
    params = SamplingParams(n=2, structured_outputs=CHOICE)
    first, second = maker.make([1, 2], params)
    assert first.constraint == second.constraint and first.constraint is not None and "yes" in (first.constraint.grammar or "")
    assert first.sampling.structured_outputs is None and params.structured_outputs is CHOICE
    [given] = maker.make([1, 2], params.clone(n=1), grammar='start: "x"')
    assert given.constraint == Constraint('start: "x"', None)


def test_thoughts_travel_where_they_bound_anything(maker: RequestMaker) -> None:
    assert maker.make([1], SamplingParams(), thinking=THINKING)[0].constraint is None
    [limited] = maker.make([1], SamplingParams(thinking_token_budget=7), thinking=THINKING)
    assert limited.constraint is not None and limited.constraint.thinking is not None
    assert limited.constraint.thinking.budget == 7 and THINKING.budget is None
    [answer] = maker.make([1], SamplingParams(structured_outputs=CHOICE), thinking=THINKING)
    assert answer.constraint is not None and answer.constraint.thinking == THINKING


def test_a_budget_for_thoughts_that_nobody_sees_is_refused(maker: RequestMaker) -> None:
    with pytest.raises(UserError, match="--reasoning-parser") as refused:
        maker.make([1], SamplingParams(thinking_token_budget=7))
    assert refused.value.param == "thinking_token_budget"


async def test_a_server_compiles_off_its_loop_and_goes_on_after_a_refusal(engine: AsyncEngine) -> None:
    with pytest.raises(UserError) as refused:
        await engine.compile_grammar(lambda: "start: nowhere", "response_format")
    assert refused.value.param == "response_format"
    makers: list[threading.Thread] = []

    def make() -> str:
        makers.append(threading.current_thread())
        return lark_of(CHOICE, GrammarOptions())

    grammar = await engine.compile_grammar(make, "structured_outputs")
    assert makers and makers[0] is not threading.current_thread()
    generation = engine.generate([1, 2], SamplingParams(), grammar=grammar, thinking=THINKING)
    assert engine._client.added[0].constraint == Constraint(grammar, THINKING)  # type: ignore[attr-defined]
    assert len(generation.request_ids) == 1


async def test_a_grammar_that_takes_too_long_holds_nobody_up(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def slow() -> str:
        gate.wait(30)
        return lark_of(CHOICE, GrammarOptions())

    monkeypatch.setattr(async_engine, "GRAMMAR_LIMIT_S", 0.02)
    with pytest.raises(UserError, match="simplify it") as refused:
        await engine.compile_grammar(slow, "response_format")
    assert refused.value.param == "response_format"
    monkeypatch.setattr(async_engine, "GRAMMAR_LIMIT_S", 30.0)
    assert "yes" in await engine.compile_grammar(lambda: lark_of(CHOICE, GrammarOptions()), "response_format")
    assert not gate.is_set(), "the first is at it still"
    gate.set()
