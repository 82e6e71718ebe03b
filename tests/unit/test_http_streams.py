"""Event streams and merged generations against a scripted ASGI connection: what is sent, what is closed, in which order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from halfbyte.entrypoints.openai.errors import ApiError, HttpError
from halfbyte.entrypoints.openai.streaming import ClientWatch, EventStream, merge


class Connection:
    """An ASGI connection: what was sent, and a client that may leave."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class Ends:
    """Collects what a stream says at its end."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def __call__(self, error: Exception | None, gone: bool) -> ApiError | None:
        self.seen.append((type(error).__name__, gone))
        return None if error is None else ApiError(500, "InternalServerError", str(error))


class Closing:
    """Events that note when they are closed. After `count` events: an error, an end, or nothing more."""

    def __init__(self, count: int, then: Exception | str | None = None) -> None:
        self.closed = 0
        self.waiting = asyncio.Event()
        self._count = count
        self._then = then

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            for index in range(self._count):
                yield b"data: %d\n\n" % index
            if isinstance(self._then, Exception):
                raise self._then
            if self._then == "wait":
                self.waiting.set()
                await asyncio.Event().wait()
        finally:
            self.closed += 1


async def run(source: Closing, connection: Connection, ends: Ends, **options: Any) -> None:
    await EventStream(source.events(), ends, **options)({"type": "http"}, connection.receive, connection.send)


async def test_stream_ends_with_done() -> None:
    source, connection, ends = Closing(2), Connection(), Ends()
    await run(source, connection, ends)
    assert connection.body == b"data: 0\n\ndata: 1\n\ndata: [DONE]\n\n"
    assert connection.sent[0]["status"] == 200 and connection.sent[-1]["more_body"] is False
    assert [m["type"] for m in connection.sent].count("http.response.start") == 1
    assert source.closed == 1 and ends.seen == [("NoneType", False)]


async def test_late_error_is_an_event() -> None:
    source, connection, ends = Closing(1, RuntimeError("boom")), Connection(), Ends()
    await run(source, connection, ends)
    assert connection.body.startswith(b'data: 0\n\ndata: {"error":{"message":"boom"') and connection.body.endswith(b"[DONE]\n\n")
    assert source.closed == 1 and ends.seen == [("RuntimeError", False)]


async def test_early_error_is_raised_before_anything_is_sent() -> None:
    source, connection, ends = Closing(0, RuntimeError("boom")), Connection(), Ends()
    with pytest.raises(HttpError, match="boom"):
        await run(source, connection, ends)
    assert not connection.sent and source.closed == 1 and ends.seen == [("RuntimeError", False)]


async def test_empty_stream_still_answers() -> None:
    connection, ends = Connection(), Ends()
    await run(Closing(0), connection, ends)
    assert connection.body == b"data: [DONE]\n\n" and ends.seen == [("NoneType", False)]


async def test_client_leaves() -> None:
    source, connection, ends = Closing(1, "wait"), Connection(), Ends()
    stream = asyncio.create_task(run(source, connection, ends))
    await source.waiting.wait()
    connection.gone.set()
    await stream
    assert source.closed == 1 and ends.seen == [("NoneType", True)] and b"DONE" not in connection.body


async def test_client_leaves_while_an_event_is_sent() -> None:
    source, connection, ends = Closing(5), Connection(), Ends()

    async def stuck(message: Any) -> None:
        if message["type"] == "http.response.body":
            connection.gone.set()
            await asyncio.Event().wait()

    await EventStream(source.events(), ends)({"type": "http"}, connection.receive, stuck)
    assert source.closed == 1 and ends.seen == [("NoneType", True)]


async def test_server_cancels() -> None:
    source, connection, ends = Closing(1, "wait"), Connection(), Ends()
    stream = asyncio.create_task(run(source, connection, ends))
    await source.waiting.wait()
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream
    assert source.closed == 1 and ends.seen == [("NoneType", True)]


async def test_keep_alive_comes_before_headers_would() -> None:
    source, connection, ends = Closing(0, "wait"), Connection(), Ends()
    stream = asyncio.create_task(run(source, connection, ends, keep_alive_s=0.001))
    while connection.body.count(b": keep-alive\n\n") < 2:
        await asyncio.sleep(0)
    connection.gone.set()
    await stream
    assert connection.sent[0]["type"] == "http.response.start"


async def test_watch_leaves_errors_alone() -> None:
    connection = Connection()
    with pytest.raises(KeyError):
        async with ClientWatch(connection.receive) as client:
            raise KeyError
    assert not client.gone


async def test_watch_does_not_swallow_a_cancellation_from_elsewhere() -> None:
    connection = Connection()

    async def both() -> None:
        async with ClientWatch(connection.receive):
            connection.gone.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(both())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class Numbers:
    """A generation of numbers (in place of deltas) that counts how often it is closed."""

    def __init__(self, *numbers: int, error: Exception | None = None, endless: bool = False) -> None:
        self.numbers = list(numbers)
        self.error = error
        self.endless = endless
        self.closed = 0

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> int:
        await asyncio.sleep(0)
        if self.numbers:
            return self.numbers.pop(0)
        if self.error is not None:
            raise self.error
        if self.endless:
            await asyncio.Event().wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("count", [1, 3])
async def test_merge_yields_all_in_order_of_each(count: int) -> None:
    sources: list[Any] = [Numbers(*range(10 * i, 10 * i + 4)) for i in range(count)]
    seen: dict[int, list[Any]] = {}
    async for index, number in merge(sources):
        seen.setdefault(index, []).append(number)
    assert seen == {i: list(range(10 * i, 10 * i + 4)) for i in range(count)}
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_merge_closes_all_when_one_fails(count: int) -> None:
    sources: list[Any] = [Numbers(1, error=RuntimeError("boom")), *[Numbers(2, endless=True) for _ in range(count - 1)]]
    with pytest.raises(RuntimeError, match="boom"):
        async for _ in merge(sources):
            pass
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_merge_closes_all_when_it_is_closed(count: int) -> None:
    sources: list[Any] = [Numbers(1, endless=True) for _ in range(count)]
    merged = merge(sources)
    await anext(merged)
    await merged.aclose()
    assert all(source.closed for source in sources)
