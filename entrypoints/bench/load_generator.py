"""Sends requests at set times to an OpenAI-compatible server over HTTP, and notes when each piece of each answer arrives.

It shares the machine with the server, so it does little: bodies are encoded before the run, and of an event only the fields that
are counted are decoded. It must not know flags or files. Needs aiohttp (extra `bench`). Called by `bench serve`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any, Literal

import aiohttp
import msgspec

from halfbyte.entrypoints.bench.serve_metrics import Record
from halfbyte.entrypoints.http_client import EventData, failure, reason_of
from halfbyte.log import one_line

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]

# Servers close idle connections after some seconds. Ours are given up earlier, so that none is closed just as it is reused.
_KEEP_ALIVE_S = 2.0


@dataclass(frozen=True, slots=True)
class RampUp:
    """A request rate that grows (or falls) over the run, from its first request to its last."""

    strategy: Literal["linear", "exponential"]
    start_rps: float
    end_rps: float

    def rate(self, progress: float) -> float:
        """Requests per second at `progress`, 0 for the first request and 1 for the last."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return float(self.start_rps * (self.end_rps / self.start_rps) ** progress)


def start_offsets(num_requests: int, rate: float | RampUp, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds from the start of a run to each of its requests; the first is sent at once.

    Gaps are drawn from a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is burstier, more is more even,
    infinity is a fixed gap. At a constant rate they are scaled so that the run offers exactly that rate.
    """
    if rate == inf:
        return [0.0] * num_requests
    gaps = []
    for index in range(num_requests - 1):
        mean_s = 1 / (rate.rate(index / max(num_requests - 2, 1)) if isinstance(rate, RampUp) else rate)
        gaps.append(mean_s if burstiness == inf else rng.gammavariate(burstiness, mean_s / burstiness))
    offsets = list(accumulate(gaps, initial=0.0))
    if isinstance(rate, RampUp) or not offsets[-1]:
        return offsets
    scale = (num_requests - 1) / rate / offsets[-1]
    return [offset * scale for offset in offsets]


async def pace(
    send: Callable[[int], Awaitable[Record]],
    offsets_s: Sequence[float],
    max_concurrency: int | None = None,
    clock: Clock = time.perf_counter,
    sleep: Sleep = asyncio.sleep,
) -> list[Record]:
    """Send request i at offsets_s[i], or later where `max_concurrency` others are in flight. The records, in that order."""
    slots: AbstractAsyncContextManager[Any] = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()

    async def send_in_slot(index: int) -> Record:
        async with slots:
            return await send(index)

    began_s = clock()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, offset_s in enumerate(offsets_s):
            if (wait_s := began_s + offset_s - clock()) > 0:
                await sleep(wait_s)
            tasks.append(group.create_task(send_in_slot(index)))
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class Call:
    """One request, ready to be sent. num_prompt_tokens: counted here, for servers that report no usage."""

    body: bytes
    request_id: str
    num_prompt_tokens: int


class Client:
    """The connections to one server: `async with Client(url, headers, timeout_s) as client`."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float, clock: Clock = time.perf_counter) -> None:
        self._url = url
        # what is compressed arrives late and costs time to unpack
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **headers}
        self._timeout_s = timeout_s
        self._clock = clock

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            headers=self._headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, call: Call) -> Record:
        """Whatever goes wrong with a request is its record's `error`."""
        clock = self._clock
        record = Record(started_s=clock(), num_prompt_tokens=call.num_prompt_tokens)
        reader = StreamReader(record)
        try:
            async with self._session.post(self._url, data=call.body, headers={"X-Request-Id": call.request_id}) as response:
                if response.status == 200:
                    async for data in response.content.iter_any():
                        reader.feed(data, clock())
                    reader.end(clock())
                else:
                    record.error = f"HTTP {response.status}: {reason_of(await response.read())}"
        except TimeoutError:
            record.error = f"no complete answer within {self._timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            record.error = failure(error)
        except msgspec.MsgspecError as error:
            record.error = one_line(f"an event of the stream cannot be read: {error}")
        record.ended_s = clock()
        return record


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptTokensDetails | None = None


class _Event(msgspec.Struct):
    """The fields of an event that count; the decoder skips the others."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class StreamReader:
    """Server-sent events, in whatever pieces the network delivers them, written into a record.

    A chunk counts as output when it carries text, and also when its text is empty (a token may be half a character), unless it
    only opens the answer (a role) or only closes it (a finish reason).
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._events = EventData()
        self._is_complete = False
        self._num_reported_tokens: int | None = None

    def feed(self, data: bytes, now_s: float) -> None:
        """`data` arrived at `now_s`. An event has arrived when its last byte has."""
        for payload in self._events.feed(data):
            self._read(payload, now_s)

    def end(self, now_s: float) -> None:
        """The server closed the stream: count what came, or say what is missing."""
        self.feed(b"\n", now_s)  # the last line may lack its end
        record = self._record
        record.num_output_tokens = len(record.arrivals_s) if self._num_reported_tokens is None else self._num_reported_tokens
        if not record.error and not self._is_complete:
            record.error = "the stream ended before the answer did" if record.last_s else "the server sent no events"
        if not record.error and not record.arrivals_s:
            record.error = "the answer holds no output"

    def _read(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self._is_complete = True
            return
        event, record = _decode(payload), self._record
        if event.error is not None:
            record.error = record.error or f"the server ended the stream: {reason_of(payload)}"
        if (usage := event.usage) is not None:
            if usage.prompt_tokens is not None:
                record.num_prompt_tokens = usage.prompt_tokens
            self._num_reported_tokens = usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                record.num_cached_tokens = usage.prompt_tokens_details.cached_tokens
        for choice in event.choices[:1]:
            record.last_s = now_s
            delta = choice.delta
            text = choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)) or ""
            opens = delta is not None and delta.role is not None
            closes = choice.finish_reason is not None
            self._is_complete = self._is_complete or closes
            # an answer without any text still has its first token, at the latest when it ends
            if text or not (opens or closes) or (closes and not record.arrivals_s):
                record.arrivals_s.append(now_s)
                record.texts.append(text)
