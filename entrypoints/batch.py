"""Lines of a batch file: what a line must say, and the loop that answers lines in their order.

The format is that of OpenAI's Batch API, one JSON object per line. Knows how much may be open at once, and what is written
when. Must not know the server, the engine or the terminal: a line is answered by a function that is handed in. Called by the
run-batch command.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, BinaryIO

import msgspec

# The POST routes that answer one body with one body.
URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/systemone", "/v1/decisions"),
    *("/v1/embeddings", "/classify", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
)
METHOD = "POST"

# Lines that may be known and not yet written, for each that may be open: those behind a slow one go on, and memory is bounded.
LINES_PER_OPEN_LINE = 8
_LINES_READ_AHEAD = 16
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MAX_ECHOED_CHARS = 200


class LineError(msgspec.Struct, kw_only=True):
    """What went wrong, as in the body of an HTTP error."""

    message: str
    type: str
    param: str | None = None
    code: int | str | None = None


class LineResponse(msgspec.Struct, kw_only=True):
    """What the route answered. `body` is its JSON as it came."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Answer(msgspec.Struct, kw_only=True):
    """A line of the output. response: None when the line could not be sent; error: None when all is well."""

    id: str
    custom_id: str | None
    response: LineResponse | None = None
    error: LineError | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input that can be sent. `body` is its JSON as it stands in the file; `model` is what it says of that."""

    request_id: str
    custom_id: str
    url: str
    body: bytes
    model: Any = None

    @property
    def id(self) -> str:
        return _public_id(self.request_id)


class _Fields(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _Asked(msgspec.Struct):
    stream: Any = None
    model: Any = None


class _ErrorBody(msgspec.Struct):
    error: LineError


class LineReader:
    """Reads the lines of one file in turn. Of each it remembers the custom_id, which no other may have.

    number: of the line that was read last, from 1, blank ones counted.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._custom_ids: set[str] = set()

    def read(self, text: bytes) -> Line | Answer | None:
        """The line, the answer that says why it cannot be sent, or None where there is nothing."""
        self.number += 1
        if self.number == 1:
            text = text.removeprefix(_BYTE_ORDER_MARK)
        text = text.strip()
        return self._read(text, _request_id(self.number, text)) if text else None

    def _read(self, text: bytes, request_id: str) -> Line | Answer:
        def refused(message: str, param: str | None, custom_id: str | None = None) -> Answer:
            error = LineError(
                message=f"line {self.number}{message}", type="BadRequestError", param=param, code=int(HTTPStatus.BAD_REQUEST)
            )
            return Answer(id=_public_id(request_id), custom_id=custom_id, error=error)

        try:
            fields = msgspec.json.decode(text, type=_Fields)
        except (msgspec.DecodeError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            return refused(f" is not a JSON object: {reason}", None)
        custom_id = fields.custom_id
        if not isinstance(custom_id, str) or not custom_id:
            return refused(" needs a custom_id, a text", "custom_id")
        if custom_id in self._custom_ids:
            return refused(f" repeats the custom_id {_echo(custom_id)}", "custom_id", custom_id)
        self._custom_ids.add(custom_id)
        if fields.method != METHOD:
            return refused(f": method must be {METHOD}, got {_echo(fields.method)}", "method", custom_id)
        if fields.url not in URLS:
            return refused(f": url must be one of {', '.join(URLS)}, got {_echo(fields.url)}", "url", custom_id)
        body = bytes(fields.body)
        if not body:
            return refused(" needs a body", "body", custom_id)
        asked = _asked(body)
        if asked.stream is not None and asked.stream is not False:
            return refused(": answers are not streamed here; leave out stream", "stream", custom_id)
        return Line(request_id, custom_id, fields.url, body, asked.model)


def answered(line: Line, status: int, body: bytes) -> Answer:
    """What is written of a route's answer. An HTTP error is both: the response, and its error object."""
    error, succeeded = None, HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES
    try:
        if succeeded:
            msgspec.json.decode(body, type=msgspec.Raw)
        else:
            error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        body = b"null"
        missing = "no JSON" if succeeded else "no error object"
        error = LineError(message=f"the route answered {status} and {missing}", type="InternalServerError", code=status)
    if b"\n" in body:  # the answer is to be one line
        body = msgspec.json.encode(msgspec.json.decode(body))
    response = LineResponse(status_code=status, request_id=line.request_id, body=msgspec.Raw(body))
    return Answer(id=line.id, custom_id=line.custom_id, response=response, error=error)


def lines(number: int) -> str:
    """So many of them, in words."""
    return f"{number} line{'' if number == 1 else 's'}"


def _request_id(number: int, text: bytes) -> str:
    """The same in each run over the same file, so that an answer says which line of which file it answers."""
    return hashlib.blake2b(b"%d:%s" % (number, text), digest_size=16).hexdigest()


def _public_id(request_id: str) -> str:
    return f"halfbyte-{request_id}"


def _asked(body: bytes) -> _Asked:
    """Whether the body asks for a stream, in whatever spelling, and of whom. What is wrong with it is the route's to say."""
    try:
        return msgspec.json.decode(body, type=_Asked)
    except msgspec.DecodeError:
        return _Asked()


def _echo(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_ECHOED_CHARS else f"{text[:_MAX_ECHOED_CHARS]}..."


class FileLines:
    """The lines of a file as they come, read by a thread a few ahead, so that a pipe may keep its reader waiting.

    Make it inside the loop that reads. The thread closes the file; it ends with the process when the file never goes on.
    finished: whether the file's end was reached. OSError of the file is raised where the line would have been.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.finished = False
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[bytes | OSError | None] = asyncio.Queue()
        self._room = threading.Semaphore(_LINES_READ_AHEAD)
        self._ended = False
        threading.Thread(target=self._read, name="batch-lines", daemon=True).start()

    def __aiter__(self) -> FileLines:
        return self

    async def __anext__(self) -> bytes:
        item = None if self._ended else await self._arrived.get()
        self._room.release()
        if isinstance(item, OSError):
            raise item
        if item is None or self._ended:
            raise StopAsyncIteration
        if not item:
            self.finished = True
            raise StopAsyncIteration
        return item

    def end(self) -> None:
        """No further lines, whatever the file still holds."""
        self._ended = True
        self._arrived.put_nowait(None)
        self._room.release()

    def _read(self) -> None:
        with self._file:
            text: bytes | OSError = b"not read yet"
            while text and not isinstance(text, OSError):
                self._room.acquire()
                if self._ended:
                    return
                try:
                    text = self._file.readline()
                except OSError as error:
                    text = error
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the line
                    self._loop.call_soon_threadsafe(self._arrived.put_nowait, text)


class Batch:
    """One run: `send` answers lines, at most `max_open_lines` at once, and `write` gets each answer when it is its turn.

    reader: has read what is before the lines that come. num_written and num_failed say how far this run is. What `send` and
    `write` raise ends it; a line that merely failed does not.
    """

    def __init__(
        self,
        send: Callable[[Line], Awaitable[Answer]],
        write: Callable[[bytes], None],
        max_open_lines: int,
        reader: LineReader | None = None,
    ) -> None:
        self.num_written = 0
        self.num_failed = 0
        self._reader = reader or LineReader()
        self._send = send
        self._write = write
        self._open = asyncio.Semaphore(max_open_lines)
        self._unwritten = asyncio.Semaphore(max_open_lines * LINES_PER_OPEN_LINE)
        self._answers: asyncio.Queue[asyncio.Future[Answer] | None] = asyncio.Queue()  # in the order of the lines

    async def run(self, texts: AsyncIterator[bytes]) -> None:
        """Answer all lines. Whatever ends it, nothing stays open, and what is written are whole lines in their order."""
        reader = asyncio.create_task(self._read(texts))
        try:
            while (answer := await self._answers.get()) is not None:
                self._keep(await answer)
            await reader
        finally:
            reader.cancel()
            rest: list[asyncio.Future[Any]] = [reader]
            while not self._answers.empty():
                if (answer := self._answers.get_nowait()) is not None:
                    answer.cancel()
                    rest.append(answer)
            await asyncio.gather(*rest, return_exceptions=True)

    async def _read(self, texts: AsyncIterator[bytes]) -> None:
        try:
            async for text in texts:
                await self._unwritten.acquire()
                line = self._reader.read(text)
                if line is None:
                    self._unwritten.release()
                elif isinstance(line, Line):
                    await self._open.acquire()
                    self._answers.put_nowait(asyncio.create_task(self._answer(line)))
                else:
                    refused: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
                    refused.set_result(line)
                    self._answers.put_nowait(refused)
        finally:
            self._answers.put_nowait(None)

    async def _answer(self, line: Line) -> Answer:
        try:
            return await self._send(line)
        finally:
            self._open.release()

    def _keep(self, answer: Answer) -> None:
        self._write(msgspec.json.encode(answer) + b"\n")
        self.num_written += 1
        self.num_failed += answer.error is not None
        self._unwritten.release()
