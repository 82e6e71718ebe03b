"""The routes of operators, which exist with --enable-admin only and have a key of their own (`middleware.ApiKeys`).

Parameters stand in the query, as vLLM's clients send them, and are checked strictly; a body is refused, so that none is
overlooked. Registered by `routes`. A new route is a line in ROUTES.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from halfbyte.engine.messages import ResetPrefixCache
from halfbyte.entrypoints.openai import standstill
from halfbyte.entrypoints.openai.errors import bad_request, unavailable
from halfbyte.entrypoints.openai.frontend import Frontend
from halfbyte.entrypoints.openai.openapi import Answers
from halfbyte.entrypoints.openai.query import Query, read_query
from halfbyte.entrypoints.openai.standstill import Mode
from halfbyte.entrypoints.openai.streaming import CLIENT_CLOSED
from halfbyte.entrypoints.openai.wire import to_json
from halfbyte.errors import EngineDeadError
from halfbyte.types import MemoryPart

log = logging.getLogger(__name__)


class SleepQuery(Query):
    level: Literal["0", "1", "2"] = "1"
    mode: Mode = "abort"


class WakeUpQuery(Query):
    tags: list[MemoryPart] = []


class PauseQuery(Query):
    mode: Mode = "abort"
    clear_cache: bool = True


class ResetPrefixCacheQuery(Query):
    reset_running_requests: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """handler: gets an instance of `query`, and the client's messages, and returns one of `whole`."""

    method: str
    path: str
    query: type[Query]
    handler: Callable[[Frontend, Any, Receive], Awaitable[msgspec.Struct]]
    summary: str
    whole: type[msgspec.Struct]

    @property
    def answers(self) -> Answers:
        return Answers(self.summary, self.whole, errors=(503,), parameters=self.query.parameters())


class Slept(msgspec.Struct):
    """level: of the sleep as it is now; one that was deeper stays so."""

    level: int | None
    status: Literal["sleeping"] = "sleeping"


class Woken(msgspec.Struct):
    """status: whether all is there again. tags: as they were asked for."""

    status: Literal["awake", "sleeping"]
    tags: list[MemoryPart] | None


class Sleeps(msgspec.Struct):
    is_sleeping: bool


class Paused(msgspec.Struct):
    status: Literal["paused"] = "paused"


class Resumed(msgspec.Struct):
    status: Literal["resumed"] = "resumed"


class Pauses(msgspec.Struct):
    is_paused: bool


class CacheReset(msgspec.Struct):
    """success: false while requests hold blocks; then nothing was forgotten."""

    success: bool


async def sleep(frontend: Frontend, query: SleepQuery, receive: Receive) -> Slept:
    state = await standstill.sleep(frontend, int(query.level), query.mode, receive)
    return Slept(state.sleep_level)


async def wake_up(frontend: Frontend, query: WakeUpQuery, receive: Receive) -> Woken:
    state = await standstill.wake_up(frontend, query.tags)
    return Woken("awake" if state.sleep_level is None else "sleeping", query.tags or None)


async def is_sleeping(frontend: Frontend, query: Query, receive: Receive) -> Sleeps:
    return Sleeps(frontend.engine.state.sleep_level is not None)


async def pause(frontend: Frontend, query: PauseQuery, receive: Receive) -> Paused:
    await standstill.pause(frontend, query.mode, query.clear_cache, receive)
    return Paused()


async def resume(frontend: Frontend, query: Query, receive: Receive) -> Resumed:
    await standstill.resume(frontend)
    return Resumed()


async def is_paused(frontend: Frontend, query: Query, receive: Receive) -> Pauses:
    return Pauses(frontend.engine.state.is_paused)


async def reset_prefix_cache(frontend: Frontend, query: ResetPrefixCacheQuery, receive: Receive) -> CacheReset:
    done = await frontend.engine.control(ResetPrefixCache(query.reset_running_requests))
    return CacheReset(done.success)


ROUTES = (
    Route("POST", "/sleep", SleepQuery, sleep, "Stop computing and give memory back", Slept),
    Route("POST", "/wake_up", WakeUpQuery, wake_up, "Fetch the memory back and compute", Woken),
    Route("GET", "/is_sleeping", Query, is_sleeping, "Whether the engine is asleep", Sleeps),
    Route("POST", "/pause", PauseQuery, pause, "Stop computing and keep all memory", Paused),
    Route("POST", "/resume", Query, resume, "Compute again", Resumed),
    Route("GET", "/is_paused", Query, is_paused, "Whether the engine is paused", Pauses),
    Route("POST", "/reset_prefix_cache", ResetPrefixCacheQuery, reset_prefix_cache, "Forget cached prefixes", CacheReset),
)
PATHS = frozenset(route.path for route in ROUTES)


async def answer(frontend: Frontend, request: Request, route: Route) -> Response:
    """Run one call; it goes on when its client leaves, unless it says otherwise. Raises what is wrong with it."""
    frontend.require_alive()
    query = read_query(request, route.query)
    try:
        if await request.body():
            raise bad_request(f"{route.path} takes its parameters in the query, and no body", "body")
        found = await route.handler(frontend, query, request.receive)
    except EngineDeadError as error:
        raise unavailable(f"the engine is gone: {error}", retry_after_s=5) from None
    except ClientDisconnect:
        log.info("%s %s: the client has left, nothing was done", route.path, query)
        return Response(status_code=CLIENT_CLOSED)
    if route.method != "GET":
        log.info("%s %s: %s", route.path, query, found)
    return to_json(found)
