"""The two things HTTP adds to a generation: a client that may leave, and an answer that is sent piece by piece.

`ClientWatch` cancels the work when the client has gone; `EventStream` sends events, turns a failure into a real status while
the headers are unsent and into an error event afterwards, and says when it is done. `merge` runs several generations as
one. Knows no route.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from halfbyte.engine.output_processor import SequenceDelta
from halfbyte.entrypoints.openai.errors import ApiError, HttpError
from halfbyte.entrypoints.openai.wire import DONE_EVENT, to_event

# Headers wait for the first event, so that an early failure is a real 5xx; a client does not wait longer than this for them.
HOLD_HEADERS_S = 10.0
CLIENT_CLOSED = 499  # never delivered: the client has gone
KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientWatch:
    """`async with ClientWatch(receive) as client:` cancels the block when the client disconnects, then `client.gone` is True.

    The request's body must have been read: whatever else arrives is ignored.
    """

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._receive = receive

    async def __aenter__(self) -> ClientWatch:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._watcher.cancel()
        if not self.gone:
            return False
        cancelled_by_others = self._task.uncancel() > 0
        return kind is asyncio.CancelledError and not cancelled_by_others

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._task.cancel()


def chat_end(problem: ApiError | None) -> bytes:
    """How streams of chunks end: with [DONE], after an error event if there is a problem."""
    return DONE_EVENT if problem is None else to_event(problem.body()) + DONE_EVENT


class EventStream(Response):
    """Sends what `events` yields, then `last`. `end(error, gone)` is called exactly once, with what ended the stream.

    An error before the first event is raised (nothing was sent); a later one is told by `last`, as `end` describes it.
    keep_alive_s: how often a comment is sent, 0 for never.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        end: Callable[[Exception | None, bool], ApiError | None],
        keep_alive_s: float = 0.0,
        last: Callable[[ApiError | None], bytes] = chat_end,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = list(_HEADERS)
        self._events = events
        self._end = end
        self._keep_alive_s = keep_alive_s
        self._last = last
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: Exception | None = None
        finished = False
        client = ClientWatch(receive)
        try:
            async with client:
                pulse = asyncio.create_task(self._pulse(send))
                try:
                    async for event in self._events:
                        await self._send(send, event)
                except Exception as error:
                    failure = error
                finally:
                    pulse.cancel()
                    await self._events.aclose()
            finished = not client.gone
        finally:
            problem = self._end(failure, not finished)
        if not finished:
            return
        if problem is not None and not self._started:
            raise HttpError(problem)
        if last := self._last(problem):
            await self._send(send, last)
        await self._start(send)  # there may have been nothing to tell
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        await self._start(send)
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _start(self, send: Send) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _pulse(self, send: Send) -> None:
        """Send the headers when the first event takes long, and a comment at each interval."""
        if not self._keep_alive_s:
            await asyncio.sleep(HOLD_HEADERS_S)
            return await self._start(send)
        while True:
            await asyncio.sleep(self._keep_alive_s)
            await self._send(send, KEEP_ALIVE)


class Closeable(Protocol):
    """A generation: an asynchronous iterator that is aborted by closing it."""

    def __aiter__(self) -> AsyncIterator[SequenceDelta]: ...

    async def aclose(self) -> Any: ...


async def merge(generations: Sequence[Closeable]) -> AsyncGenerator[tuple[int, SequenceDelta], None]:
    """(index of the generation, delta) as they come. Closing, or the first failure, closes every generation."""
    if len(generations) == 1:
        try:
            async for delta in generations[0]:
                yield 0, delta
        finally:
            await generations[0].aclose()
        return
    arrived: asyncio.Queue[tuple[int, SequenceDelta] | Exception | None] = asyncio.Queue()

    async def pump(index: int, generation: Closeable) -> None:
        try:
            async for delta in generation:
                arrived.put_nowait((index, delta))
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    pumps = [asyncio.create_task(pump(index, generation)) for index, generation in enumerate(generations)]
    try:
        num_open = len(pumps)
        while num_open:
            item = await arrived.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for generation in generations:
            await generation.aclose()
