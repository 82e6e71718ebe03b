"""The load generator against a stub server on a real socket: its times are the schedule's, its failures have reasons.

Stub and client take turns: a chunk is written when the one before has been seen, so no test depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from halfbyte.entrypoints.bench.load_generator import Call, Client, pace
from halfbyte.entrypoints.bench.serve_metrics import Record, measure
from halfbyte.entrypoints.bench.served_model import MeasuredServer
from halfbyte.errors import HalfbyteError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader


Script = Callable[[Request], Awaitable[None]]


def event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def text_event(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage_event(prompt: int, completion: int, **details: int) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details or None}
    return event({"choices": [], "usage": usage})


def frame(data: bytes) -> bytes:
    """One piece of a chunked HTTP body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def json_answer(document: Any, status: str = "200 OK") -> bytes:
    body = json.dumps(document).encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def serve_connection(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """HTTP/1.1, just enough: one request after the other, each answered by the script."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await script(Request(head[0].split()[1], headers, json.loads(body or b"{}"), writer, reader))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def stub(script: Script) -> AsyncIterator[str]:
    """A server in this loop; yields its URL."""
    connections: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        await serve_connection(script, reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*connections)


@dataclass
class Stamps:
    """The client's clock, which tells the stub when it was read. now_s: the time to show; None shows the machine's."""

    now_s: float | None = None
    num_read: int = 0
    read: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self) -> float:
        self.num_read += 1
        self.read.set()
        return time.perf_counter() if self.now_s is None else self.now_s

    async def wait_for(self, num_read: int) -> None:
        while self.num_read < num_read:
            self.read.clear()
            await self.read.wait()


async def send_all(
    url: str, num_calls: int = 1, clock: Callable[[], float] = time.perf_counter, timeout_s: float = 60
) -> list[Record]:
    async with Client(f"{url}/v1/completions", {}, timeout_s, clock) as client:
        return await pace(lambda index: client.send(Call(b"{}", f"id-{index}", 5)), [0.0] * num_calls, clock=clock)


@pytest.mark.parametrize("form", ["completions", "chat"])
async def test_times_are_exactly_the_schedule(form: str) -> None:
    stamps = Stamps(now_s=100.0)

    def chunk(text: str, finish: str | None = None) -> bytes:
        if form == "completions":
            return text_event(text, finish)
        return event({"choices": [{"delta": {"content": text} if text else {}, "finish_reason": finish}]})

    opening = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}) if form == "chat" else b": hello\n\n"
    schedule = [
        (100.25, opening),
        (100.5, chunk("one")),
        (100.75, chunk("two three")),  # several tokens in a chunk
        (101.25, chunk("four five six") + chunk("", "length")),
        (103.0, usage_event(12, 7, cached_tokens=4) + DONE),  # what comes after the answer is no part of its time
    ]

    async def script(request: Request) -> None:
        request.writer.write(HEAD)
        for at_s, data in schedule:
            stamps.now_s = at_s
            seen = stamps.num_read
            request.writer.write(frame(data))
            await stamps.wait_for(seen + 1)
        request.writer.write(frame(b""))

    async with stub(script) as url:
        [record] = await send_all(url, clock=stamps)
    assert record.error == ""
    assert (record.ttft_s, record.itls_s, record.e2el_s) == (0.5, [0.25, 0.5], 1.25)
    assert record.tpot_s == 0.75 / 6
    assert (record.num_prompt_tokens, record.num_output_tokens, record.num_cached_tokens) == (12, 7, 4)
    result = measure([record], ("ttft", "tpot", "itl", "e2el"), [99], {})
    times = {name: result[f"{name}_ms"] for name in ("mean_ttft", "mean_tpot", "mean_itl", "median_e2el")}
    assert times == pytest.approx({"mean_ttft": 500.0, "mean_tpot": 125.0, "mean_itl": 375.0, "median_e2el": 1250.0})


async def test_stamps_of_many_streams_lie_between_the_writes() -> None:
    """With the machine's clock: eight streams, written to in rounds; a stamp lies after its write and before the next round."""
    num_streams, num_rounds = 8, 4
    stamps, rounds_s = Stamps(), []
    arrived: list[Request] = []
    all_arrived, all_written = asyncio.Event(), asyncio.Event()

    async def write_rounds() -> None:
        await all_arrived.wait()
        for _ in range(num_rounds):
            seen = stamps.num_read
            rounds_s.append(time.perf_counter())
            for request in arrived:
                request.writer.write(frame(text_event("x")))
            await stamps.wait_for(seen + num_streams)
        rounds_s.append(time.perf_counter())
        for request in arrived:
            request.writer.write(frame(DONE) + frame(b""))
        all_written.set()

    async def script(request: Request) -> None:
        request.writer.write(HEAD)
        arrived.append(request)
        if len(arrived) == num_streams:
            all_arrived.set()
        await all_written.wait()

    async with stub(script) as url, asyncio.TaskGroup() as group:
        group.create_task(write_rounds())
        records = await send_all(url, num_streams, clock=stamps)
    for record in records:
        assert (record.error, len(record.arrivals_s)) == ("", num_rounds)
        for index, arrival_s in enumerate(record.arrivals_s):
            assert rounds_s[index] <= arrival_s <= rounds_s[index + 1]
        assert record.started_s <= rounds_s[0]


async def break_off(request: Request) -> None:
    request.writer.write(HEAD + frame(text_event("a")))
    await request.writer.drain()
    request.writer.close()


async def never_answer(request: Request) -> None:
    await request.reader.read()


async def refuse(request: Request) -> None:
    request.writer.write(json_answer({"error": {"message": "the queue\nis full", "code": 503}}, "503 Service Unavailable"))


async def answer_whole(request: Request) -> None:
    request.writer.write(json_answer({"choices": [{"text": "a", "finish_reason": "stop"}]}))


async def answer_nonsense(request: Request) -> None:
    request.writer.write(HEAD + frame(b"data: {nonsense\n\n") + frame(b""))


async def die(request: Request) -> None:
    request.writer.write(HEAD + frame(text_event("a")) + frame(event({"error": {"message": "engine died"}}) + DONE) + frame(b""))


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (break_off, "ClientPayloadError: "),
        (never_answer, "no complete answer within 0.05 s"),
        (refuse, "HTTP 503: the queue\\nis full"),
        (answer_whole, "the server sent no events"),
        (answer_nonsense, "an event of the stream cannot be read: JSON is malformed"),
        (die, "the server ended the stream: engine died"),
    ],
)
async def test_a_failure_is_a_reason(script: Script, error: str) -> None:
    async with stub(script) as url:
        records = await send_all(url, 2, timeout_s=0.05 if script is never_answer else 60)
    for record in records:
        assert record.error.startswith(error) and "\n" not in record.error
    assert measure(records, ("ttft",), [99], {})["failed"] == 2


async def test_no_server_is_a_failure_too() -> None:
    async with stub(refuse) as url:
        pass
    [record] = await send_all(url)
    assert "Cannot connect" in record.error


async def test_cancelling_closes_every_connection() -> None:
    open_requests = 0
    all_open = asyncio.Event()

    async def script(request: Request) -> None:
        nonlocal open_requests
        open_requests += 1
        if open_requests == 3:
            all_open.set()
        await request.reader.read()  # until the client has gone
        open_requests -= 1

    async with stub(script) as url:
        run = asyncio.create_task(send_all(url, 3))
        await all_open.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert open_requests == 0


def test_waiting_for_a_server() -> None:
    sleeps: list[float] = []

    def probe() -> None:
        if len(sleeps) < 3:
            raise HalfbyteError("not yet")

    with MeasuredServer("http://127.0.0.1:9", {}) as server:
        server.wait_until_ready(probe, 5.0, clock=lambda: sum(sleeps), sleep=sleeps.append)
        assert len(sleeps) == 3
        with pytest.raises(
            HalfbyteError, match="not ready within --ready-check-timeout-sec 1: no answer from http://127.0.0.1:9"
        ):
            server.wait_until_ready(lambda: server.model(None), 1.0, clock=lambda: sum(sleeps), sleep=sleeps.append)
