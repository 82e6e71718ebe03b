"""What answers the lines of a batch: an application in this process, called without a socket, or a server that runs already.

Knows when to ask again, and when to give the whole run up. Must not know files and flags. Called by the run-batch command.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, BinaryIO, Protocol

import httpx

from halfbyte.entrypoints.batch import Answer, Batch, FileLines, Line, LineReader, answered, lines
from halfbyte.entrypoints.batch_output import Kept
from halfbyte.entrypoints.http_client import CONNECT_TIMEOUT_S, PASSING_STATUSES, failure, reason_of, wait_s
from halfbyte.errors import EngineDeadError, HalfbyteError
from halfbyte.log import note

if TYPE_CHECKING:
    from fastapi import FastAPI

    from halfbyte.engine.async_engine import AsyncEngine

# With the waits between them, about two minutes.
MAX_TRIES = 10
_ANSWER_TIMEOUT_S = 6 * 3600
_NO_KEY = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class Routes(Protocol):
    """dead: why there will be no further answers, None while there may be; `died` is set with it."""

    died: asyncio.Event

    @property
    def dead(self) -> str | None: ...

    async def answer(self, line: Line) -> Answer: ...


class OwnRoutes:
    """The routes of an application around an engine of our own. Open them inside the loop that serves."""

    def __init__(self, engine: AsyncEngine, http: httpx.AsyncClient) -> None:
        self.died = engine.died
        self._engine = engine
        self._http = http

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, engine: AsyncEngine, app: FastAPI) -> AsyncIterator[OwnRoutes]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None, trust_env=False) as http:
            yield cls(engine, http)

    @property
    def dead(self) -> str | None:
        return self._engine.dead

    async def answer(self, line: Line) -> Answer:
        """The route's answer, or its error. EngineDeadError when there is no answer because the engine is gone."""
        response = await self._http.post(line.url, content=line.body, headers=_headers(line))
        if response.is_server_error and self._engine.dead is not None:
            raise EngineDeadError(self._engine.dead)
        return answered(line, response.status_code, response.content)


class ServerRoutes:
    """The routes of a server elsewhere. A passing failure is waited out; one of the whole server ends the run."""

    dead: str | None = None

    def __init__(self, http: httpx.AsyncClient, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self.died = asyncio.Event()
        self._http = http
        self._sleep = sleep

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, url: str, headers: Mapping[str, str], max_open_lines: int) -> AsyncIterator[ServerRoutes]:
        """url: with or without /v1, which the lines name themselves."""
        async with httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers=dict(headers),
            timeout=httpx.Timeout(_ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=max_open_lines),
        ) as http:
            yield cls(http)

    async def answer(self, line: Line) -> Answer:
        """The server's answer. HalfbyteError when it wants another key, or is not there for MAX_TRIES tries."""
        for num_tries in range(1, MAX_TRIES + 1):
            retry_after = None
            try:
                response = await self._http.post(line.url, content=line.body, headers=_headers(line))
            except httpx.TransportError as error:
                reason = failure(error)
            else:
                if response.status_code in _NO_KEY:
                    raise HalfbyteError(f"{self._http.base_url} answers {_said(response)}; name its key with --api-key")
                if response.status_code not in PASSING_STATUSES:
                    return answered(line, response.status_code, response.content)
                reason, retry_after = f"{_said(response)}", response.headers.get("retry-after")
            if num_tries < MAX_TRIES:
                await self._sleep(wait_s(num_tries, retry_after))
        raise HalfbyteError(f"no answer from {self._http.base_url} in {MAX_TRIES} tries ({reason})")


async def answer_file(
    routes: Routes,
    file: BinaryIO,
    write: Callable[[bytes], None],
    max_open_lines: int,
    *,
    reader: LineReader | None = None,
    kept: Kept = Kept(),  # noqa: B008 - a tuple
    hint: str = "",
) -> None:
    """Answer the lines of `file` that `reader` has not read; `write` gets the answers. Says at the end how many there were.

    HalfbyteError when the routes end before the file does: what was written until then are whole lines. kept: what was there
    before. hint: what to do about a run that ends early.
    """
    started_s = time.monotonic()
    texts = FileLines(file)
    watch = asyncio.create_task(_end_with(routes, texts))
    batch = Batch(routes.answer, write, max_open_lines, reader)

    def so_far() -> str:
        return f"written until then: {lines(kept.num_lines + batch.num_written)}{hint}"

    try:
        await batch.run(texts)
        if routes.dead is not None and not texts.finished:
            raise EngineDeadError(routes.dead)
    except HalfbyteError as error:
        raise HalfbyteError(f"{error}; {so_far()}") from None
    except asyncio.CancelledError:
        note(f"interrupted; {so_far()}")
        raise
    finally:
        watch.cancel()
        texts.end()
    summary = f"{lines(batch.num_written)} in {time.monotonic() - started_s:.1f} s, {batch.num_failed} failed"
    if kept.num_lines:
        total, failed = kept.num_lines + batch.num_written, kept.num_failed + batch.num_failed
        summary += f"; with those from before {lines(total)}, {failed} failed"
    note(summary)


async def _end_with(routes: Routes, texts: FileLines) -> None:
    """Read no further when the engine is gone, also while a pipe keeps the reader waiting."""
    await routes.died.wait()
    texts.end()


def _headers(line: Line) -> dict[str, str]:
    return {"content-type": "application/json", "x-request-id": line.request_id}


def _said(response: httpx.Response) -> str:
    return f"{response.status_code}: {reason_of(response.content)}"
