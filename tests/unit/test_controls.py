"""Control calls: from a front end to the engine between two steps, and back; an action that fails, fails alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, get_args

import msgspec
import pytest

from halfbyte import errors
from halfbyte.engine import controls
from halfbyte.engine.async_engine import AsyncEngine
from halfbyte.engine.client import InProcessClient
from halfbyte.engine.core import EngineCore
from halfbyte.engine.messages import (
    CacheWasReset,
    Control,
    EngineState,
    Failed,
    FromEngine,
    LoadAdapter,
    Pause,
    Reply,
    ResetPrefixCache,
    Resume,
    Sleep,
    ToEngine,
    UnloadAdapter,
    WakeUp,
)
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.types import EngineInfo, EngineRequest, SamplingParams
from tests.unit.scheduled_engine import Engine

NUMBERS: dict[str, Any] = dict.fromkeys(
    ("vocab_size", "max_model_len", "max_logprobs", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks"), 16
)
INFO = EngineInfo(
    model="m",
    architecture="fake",
    dtype="float32",
    kv_cache_dtype="float32",
    eos_token_ids=[],
    kv_cache_bytes=0,
    kv_cache_tokens=0,
    max_concurrency=1.0,
    enable_prefix_caching=True,
    **NUMBERS,
)


def request(name: str, prompt: list[int], max_tokens: int = 8) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(temperature=0.0), [], 0.0, max_tokens)


@pytest.fixture(params=[False, True], ids=["in turn", "a step ahead"])
def core(fake_runner: Any, request: pytest.FixtureRequest) -> EngineCore:
    engine = Engine(fake_runner)
    return EngineCore(engine.scheduler, engine.runner, async_scheduling=request.param)


def tokens_of(core: EngineCore) -> dict[str, list[int]]:
    """Step until there is nothing to do: the tokens of each request."""
    found: dict[str, list[int]] = {}
    while core.has_work():
        for output in core.step().outputs:
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
        core.scheduler.manager.check()
    return found


# --- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [errors.UserError("wrong", param="level"), errors.NotFoundError("no such", param="name"), errors.CapacityError("too big"),
     errors.UnsupportedError(errors.Refusal("no", "do that")), errors.OverloadedError("full"), errors.HalfbyteError("x")],
)  # fmt: skip
def test_errors_cross_as_what_they_are(error: errors.HalfbyteError) -> None:
    wire = msgspec.msgpack.encode(Reply(1, failure=Failed.of(error)))
    reply = msgspec.msgpack.decode(wire, type=FromEngine)
    assert isinstance(reply, Reply) and reply.failure is not None
    back = reply.failure.exception()
    assert type(back) is type(error) and str(back) == str(error)
    assert getattr(back, "param", None) == getattr(error, "param", None)


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError(), OSError("x"), type("Refusal", (Exception,), {})("x")])
def test_errors_that_are_not_ours_cross_as_the_common_one(error: Exception) -> None:
    back = Failed.of(error).exception()
    assert type(back) is errors.HalfbyteError and str(back)


def test_every_action_crosses_and_is_carried_out() -> None:
    assert set(controls._ACTIONS) == set(get_args(controls.Action))
    with_fields: dict[type, Any] = {LoadAdapter: LoadAdapter("/x", 3), UnloadAdapter: UnloadAdapter(3)}
    for kind in controls._ACTIONS:
        call = Control(7, with_fields.get(kind) or kind())
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=ToEngine) == call


# --- in the engine -----------------------------------------------------------------------------------------------------


def test_reset_of_the_prefix_cache(core: EngineCore) -> None:
    """False while a request holds blocks, unless they may be taken; then it goes on with the same tokens."""
    prompts = {"a": list(range(1, 20)), "b": list(range(50, 60))}
    core.add([request(name, prompt) for name, prompt in prompts.items()])
    for _ in range(3):
        core.step()
    assert controls.perform(core, Control(1, ResetPrefixCache())).result == CacheWasReset(False)
    assert core.scheduler.manager.pool.num_cached > 0
    assert controls.perform(core, Control(2, ResetPrefixCache(True))).result == CacheWasReset(True)
    assert core.scheduler.manager.pool.num_cached == 0 and not core.scheduler.running
    assert set(tokens_of(core)) == {"a", "b"}


def test_an_interrupted_request_has_the_tokens_of_one_that_was_not(core: EngineCore) -> None:
    found: list[int] = []
    core.add([request("a", list(range(1, 20)), 12)])
    while core.has_work():
        found += [token for output in core.step().outputs for token in output.new_token_ids]
        controls.perform(core, Control(1, ResetPrefixCache(True)))
        core.scheduler.manager.check()
    runner: Any = core.runner
    assert found == runner.expected_tokens(list(range(1, 20)), None, 12)


def test_an_action_that_raises_is_its_callers_matter(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Exception] = [errors.UserError("no", param="p"), RuntimeError("bug")]

    def fail(core: EngineCore, action: ResetPrefixCache) -> None:
        raise raised.pop()

    monkeypatch.setitem(controls._ACTIONS, ResetPrefixCache, fail)
    core.add([request("a", [1, 2, 3])])
    core.step()
    for kind in (errors.HalfbyteError, errors.UserError):
        reply = controls.perform(core, Control(1, ResetPrefixCache()))
        assert reply.failure is not None and type(reply.failure.exception()) is kind
    assert len(tokens_of(core)["a"]) == 7, "the request that ran has lost nothing"


# --- in the front end --------------------------------------------------------------------------------------------------


def test_in_process_client_answers_in_receive(core: EngineCore) -> None:
    client = InProcessClient(core, info=None)  # type: ignore[arg-type]
    client.add([request("a", [1, 2, 3])])
    held = client.control(ResetPrefixCache())
    free = client.control(ResetPrefixCache(True))
    assert not held.done()
    step = client.receive()
    assert step is not None and held.result(0) == CacheWasReset(True) == free.result(0), "nothing was scheduled before it"
    later = client.control(ResetPrefixCache())
    client.receive()
    assert later.result(0) == CacheWasReset(False)
    unwanted = client.control(ResetPrefixCache())
    assert unwanted.cancel()
    client.receive()


class MortalClient:
    """An engine client that answers what `reply` says, and dies when it is told to."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.dies = threading.Event()
        self.reply: Callable[[], Any] | None = None

    def control(self, action: Any) -> Any:
        future: Future[Any] = Future()
        if self.reply is not None:
            try:
                future.set_result(self.reply())
            except errors.HalfbyteError as error:
                future.set_exception(error)
        return future

    def receive(self, timeout_s: float | None = None) -> None:
        if self.dies.is_set():
            raise errors.EngineDeadError("it died")

    def close(self) -> None: ...


def test_async_engine_awaits_the_reply_or_the_engines_death(json_tokenizer: Tokenizer) -> None:
    async def run() -> None:
        client = MortalClient(INFO)
        engine = AsyncEngine(client, json_tokenizer)  # type: ignore[arg-type]
        client.reply = lambda: CacheWasReset(True)
        assert await engine.control(ResetPrefixCache()) == CacheWasReset(True)

        def refuse() -> None:
            raise errors.UserError("no", param="p")

        client.reply = refuse
        with pytest.raises(errors.UserError) as caught:
            await engine.control(ResetPrefixCache())
        assert caught.value.param == "p"
        client.reply = None
        waiting = [asyncio.create_task(engine.control(ResetPrefixCache())) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        client.dies.set()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(ended[0], asyncio.CancelledError)
        assert [str(error) for error in ended[1:]] == ["it died"] * 2
        assert all(isinstance(error, errors.EngineDeadError) for error in ended[1:])
        with pytest.raises(errors.EngineDeadError):
            await engine.control(ResetPrefixCache())
        await engine.close()

    asyncio.run(run())


# --- rest --------------------------------------------------------------------------------------------------------------


class Sleeper:
    """The fake runner with memory to give back. It computes nothing while some is missing."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.missing: tuple[str, ...] = ()

    def execute(self, scheduled: Any) -> None:
        assert not self.missing
        self.inner.execute(scheduled)

    def sample(self, grammar_mask: Any = None) -> Any:
        return self.inner.sample(grammar_mask)

    def sleep(self, level: int) -> None:
        assert not self.inner.rows, "rows are released before the memory goes"
        self.inner.memory.slots.clear()
        self.missing = ("weights", "kv_cache") if level == 2 else ("kv_cache",)

    def wake_up(self, part: str) -> None:
        self.missing = tuple(one for one in self.missing if one != part)


def do(core: EngineCore, action: Any) -> Any:
    reply = controls.perform(core, Control(1, action))
    assert reply.failure is None, reply.failure
    return reply.result


@pytest.mark.parametrize(
    ("down", "up", "state"),
    [
        (Pause(clear_cache=False), Resume(), EngineState(is_paused=True)),
        (Pause(), Resume(), EngineState(is_paused=True)),
        (Sleep(0), WakeUp(), EngineState(sleep_level=0)),
        (Sleep(1), WakeUp(), EngineState(sleep_level=1, missing=["kv_cache"])),
        (Sleep(2), WakeUp(), EngineState(sleep_level=2, missing=["weights", "kv_cache"])),
    ],
    ids=["pause", "pause and clear", "level 0", "level 1", "level 2"],
)
def test_requests_rest_and_go_on(core: EngineCore, down: Any, up: Any, state: EngineState) -> None:
    """Running, waiting, new and aborted ones: nothing is computed, nothing is lost, and the tokens are the same."""
    core.runner = Sleeper(core.runner)  # type: ignore[assignment]
    prompts = {name: list(range(start, start + 9)) for name, start in (("a", 1), ("gone", 20), ("late", 40))}
    core.add([request("a", prompts["a"]), request("gone", prompts["gone"])])
    found: dict[str, list[int]] = {}

    def step() -> None:
        for output in core.step().outputs:
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
        core.scheduler.manager.check()

    step()
    step()
    assert do(core, down) == do(core, down) == state
    while core.has_work():
        step()  # what was in flight
    told = dict(found)
    core.add([request("late", prompts["late"])])
    assert not core.has_work(), "a process sleeps in its socket meanwhile"
    core.abort(["gone"])
    step()
    assert found == told and not core.has_work()
    assert do(core, up) == do(core, up) == EngineState()
    while core.has_work():
        step()
    inner: Any = core.runner.inner  # type: ignore[attr-defined]
    assert {name: inner.expected_tokens(prompts[name], None, 8) for name in ("a", "late")} == {
        name: found[name] for name in ("a", "late")
    }
    assert len(found["gone"]) < 8


def test_a_pause_and_a_sleep_are_two_things(core: EngineCore) -> None:
    core.runner = Sleeper(core.runner)  # type: ignore[assignment]
    core.add([request("a", [1, 2, 3])])
    do(core, Pause())
    assert do(core, Sleep(2)) == EngineState(True, 2, ["weights", "kv_cache"])
    assert do(core, Sleep(1)).sleep_level == 2, "a deeper sleep stays as deep"
    assert do(core, WakeUp(["weights"])) == EngineState(True, 2, ["kv_cache"])
    assert do(core, WakeUp(["kv_cache"])) == EngineState(True, None, []) and not core.has_work()
    assert do(core, Resume()) == EngineState() and len(tokens_of(core)["a"]) == 8
