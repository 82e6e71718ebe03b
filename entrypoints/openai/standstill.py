"""An operator stops the engine and lets it go on: what becomes of the calls that are open, then the order itself.

One order at a time. While calls are being waited for, whoever gave the order may leave, and nothing has happened; an order that
the engine has got is carried out. Knows calls and the engine; knows no routes. Called by the routes of operators.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Literal

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from halfbyte.engine.messages import EngineState, Pause, Resume, Sleep, WakeUp
from halfbyte.entrypoints.openai.errors import unavailable
from halfbyte.entrypoints.openai.frontend import ASLEEP, ASLEEP_RETRY_S, Frontend
from halfbyte.entrypoints.openai.streaming import ClientWatch
from halfbyte.types import MemoryPart

# What becomes of open calls: they end with an error, they are waited for, or they stand still and go on later.
Mode = Literal["abort", "wait", "keep"]

PAUSED = "an operator has paused the engine"
PAUSING = "the engine is about to be paused, and ends what it has begun; try again in a moment"


async def sleep(frontend: Frontend, level: int, mode: Mode, receive: Receive) -> EngineState:
    """New calls are refused from now on until the engine is awake."""
    async with frontend.order, _closed(frontend, ASLEEP):
        frontend.cuts_calls = mode == "abort"
        await _stand_still(frontend, mode, ASLEEP, receive)
        return await frontend.engine.control(Sleep(level))


async def wake_up(frontend: Frontend, tags: list[MemoryPart]) -> EngineState:
    async with frontend.order:
        return await frontend.engine.control(WakeUp(tags))


async def pause(frontend: Frontend, mode: Mode, clear_cache: bool, receive: Receive) -> EngineState:
    """New calls are refused while others are waited for; in the pause they queue up."""
    async with frontend.order, _closed(frontend, PAUSING) if mode == "wait" else nullcontext():
        await _stand_still(frontend, mode, PAUSED, receive)
        return await frontend.engine.control(Pause(clear_cache))


async def resume(frontend: Frontend) -> EngineState:
    async with frontend.order:
        return await frontend.engine.control(Resume())


@asynccontextmanager
async def _closed(frontend: Frontend, reason: str) -> AsyncIterator[None]:
    frontend.closing = reason
    try:
        yield
    finally:
        frontend.closing = None


async def _stand_still(frontend: Frontend, mode: Mode, reason: str, receive: Receive) -> None:
    """ClientDisconnect when the operator has left before all calls had ended."""
    if mode == "abort":
        frontend.engine.abort_all(unavailable(reason, ASLEEP_RETRY_S))
    elif mode == "wait":
        async with ClientWatch(receive) as operator:
            await frontend.wait_for_open_calls()
        if operator.gone:
            raise ClientDisconnect
