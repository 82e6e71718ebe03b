"""Batches from a file: what a line must say, the order of the answers, how much is open at once, and what ends a run.

Lines are answered by hand, so that nothing depends on time. test_batch_command.py has the application and the command.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import threading
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from halfbyte.entrypoints.batch import LINES_PER_OPEN_LINE, URLS, Answer, Batch, FileLines, Line, LineReader, answered
from halfbyte.errors import HalfbyteError
from tests.unit.batch_files import LIMIT_S, Progress, line, written

# --- a line ------------------------------------------------------------------------------------------------------------


def test_a_good_line_is_handed_on_as_it_stands() -> None:
    body = b'{ "prompt" :"\xc3\xa9", "seed": 123456789012345678901234567890, "stream": false }'
    text = b'{"custom_id": "a", "extra": [1], "method": "POST", "url": "/v1/completions", "body": ' + body + b"}\r\n"
    read = LineReader().read(text)
    assert isinstance(read, Line) and (read.custom_id, read.url, read.body) == ("a", "/v1/completions", body)


@pytest.mark.parametrize(
    ("text", "custom_id", "param", "message"),
    [
        (b"hello\n", None, None, "line 7 is not a JSON object: JSON is malformed"),
        (b"[]\n", None, None, "line 7 is not a JSON object: Expected `object`, got `array`"),
        (line()[:-3], None, None, "line 7 is not a JSON object: Input data was truncated"),
        (b'{"custom_id": "\xff"}', None, None, "line 7 is not a JSON object: Invalid UTF-8"),
        (b'{"body": ' + b"[" * 100_000, None, None, "line 7 is not a JSON object: nested too deeply"),
        (line(None), None, "custom_id", "line 7 needs a custom_id, a text"),
        (line(""), None, "custom_id", "line 7 needs a custom_id, a text"),
        (line(5), None, "custom_id", "line 7 needs a custom_id, a text"),
        (line(method="GET"), "a", "method", "line 7: method must be POST, got 'GET'"),
        (line(method=None), "a", "method", "line 7: method must be POST, got None"),
        (line(url="/v1/images"), "a", "url", f"line 7: url must be one of {', '.join(URLS)}, got '/v1/images'"),
        (line(url="http://localhost/v1/completions"), "a", "url", "line 7: url must be one of"),
        (line(url="/v1/completions?x=1"), "a", "url", "line 7: url must be one of"),
        (line(url=["x" * 1000]), "a", "url", "line 7: url must be one of"),
        (line(body=None), "a", "body", "line 7 needs a body"),
        (line(body={"stream": True}), "a", "stream", "line 7: answers are not streamed here; leave out stream"),
        (line(body={"stream": "true"}), "a", "stream", "line 7: answers are not streamed here; leave out stream"),
    ],
)
def test_a_line_that_cannot_be_sent(text: bytes, custom_id: str | None, param: str | None, message: str) -> None:
    answer = LineReader(6).read(text)
    assert isinstance(answer, Answer)
    assert (answer.custom_id, answer.response) == (custom_id, None)
    assert re.fullmatch("halfbyte-[0-9a-f]{32}", answer.id)
    assert answer.error is not None and answer.error.message.startswith(message) and len(answer.error.message) < 500
    assert (answer.error.type, answer.error.param, answer.error.code) == ("BadRequestError", param, 400)


def test_a_custom_id_counts_once_also_of_a_bad_line() -> None:
    reader = LineReader()
    assert isinstance(reader.read(line("a", method="GET")), Answer)
    again = reader.read(line("a"))
    assert isinstance(again, Answer) and again.error is not None
    assert (again.custom_id, again.error.message) == ("a", "line 2 repeats the custom_id 'a'")
    assert isinstance(reader.read(line("b")), Line)


@pytest.mark.parametrize("body", [[1], "text", 3, {"stream": None}, {}])
def test_what_else_is_wrong_with_a_body_is_the_routes_to_say(body: Any) -> None:
    assert isinstance(LineReader().read(line(body=body)), Line)


@pytest.mark.parametrize(
    ("status", "body", "response_body", "error"),
    [
        (200, b'{"x": 1}', {"x": 1}, None),
        (200, b'{\n  "x": 1\n}', {"x": 1}, None),
        (
            200,
            b"<html>",
            None,
            {"message": "the route answered 200 and no JSON", "type": "InternalServerError", "param": None, "code": 200},
        ),
        (
            301,
            b"",
            None,
            {"message": "the route answered 301 and no error object", "type": "InternalServerError", "param": None, "code": 301},
        ),
        (
            404,
            b'{"error": {"message": "no", "type": "NotFoundError", "param": "model", "code": 404}}',
            {"error": {"message": "no", "type": "NotFoundError", "param": "model", "code": 404}},
            {"message": "no", "type": "NotFoundError", "param": "model", "code": 404},
        ),
        (
            500,
            b"Internal Server Error",
            None,
            {
                "message": "the route answered 500 and no error object",
                "type": "InternalServerError",
                "param": None,
                "code": 500,
            },
        ),
    ],
)
def test_an_http_error_is_a_response_and_an_error(status: int, body: bytes, response_body: Any, error: Any) -> None:
    batch_line = Line("0f", "a", URLS[0], b"{}")

    async def send(_: Line) -> Answer:
        return answered(batch_line, status, body)

    out = io.BytesIO()
    batch = Batch(send, out.write, 1)
    asyncio.run(batch.run(given([line()])))
    [found] = written(out.getvalue())
    response = {"status_code": status, "request_id": "0f", "body": response_body}
    assert found == {"id": "halfbyte-0f", "custom_id": "a", "response": response, "error": error}
    assert batch.num_failed == (error is not None)


def test_an_id_says_which_line_of_which_file_it_is() -> None:
    def ids(text: bytes) -> list[str]:
        reader = LineReader()
        read = [reader.read(part) for part in text.splitlines(keepends=True)]
        return [found.id for found in read if found is not None]

    text = line("a") + b"nothing\n" + line("b") + b"nothing\n"
    found = ids(text)
    assert len(set(found)) == 4
    assert found == ids(text) == ids(b"\xef\xbb\xbf" + text.replace(b"\n", b"  \r\n")) == ids(text.rstrip())
    assert [mine == other for mine, other in zip(found, ids(text.replace(b"prompt", b"Prompt", 1)), strict=True)] == [
        *(False, True, True, True)
    ]
    assert not set(found) & set(ids(b"\n" + text))


# --- the loop ----------------------------------------------------------------------------------------------------------


async def given(texts: Iterable[bytes]) -> AsyncIterator[bytes]:
    for text in texts:
        yield text


class ByHand:
    """Answers lines when the test says so, and notes what is open and what was written."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.open: dict[str, asyncio.Future[None]] = {}
        self.num_started = 0
        self.most_open = 0
        self.cancelled: list[str] = []
        self.written: list[str | None] = []
        self.full = False

    async def send(self, batch_line: Line) -> Answer:
        name = batch_line.custom_id
        self.open[name] = asyncio.get_running_loop().create_future()
        self.num_started += 1
        self.most_open = max(self.most_open, len(self.open))
        self.progress.happened()
        try:
            await self.open[name]
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        finally:
            del self.open[name]
            self.progress.happened()
        return answered(batch_line, 200, b"{}")

    def write(self, data: bytes) -> None:
        if self.full:
            raise HalfbyteError("no space")
        self.written += [answer["custom_id"] for answer in written(data)]
        self.progress.happened()

    def finish(self, *names: str) -> None:
        for name in names:
            self.open[name].set_result(None)


async def test_answers_keep_the_order_of_the_lines() -> None:
    hand = ByHand()
    texts = [line("a"), b"\n", line("b"), b"  \r\n", b"not JSON\n", line("a"), line("c")]
    run = asyncio.create_task(Batch(hand.send, hand.write, 8).run(given(texts)))
    await hand.progress.until(lambda: len(hand.open) == 3)
    hand.finish("c", "b")
    await hand.progress.until(lambda: len(hand.open) == 1)
    assert hand.written == []
    hand.finish("a")
    await run
    assert hand.written == ["a", "b", None, "a", "c"]


async def test_an_answer_is_written_while_the_reader_waits_for_lines() -> None:
    hand, more = ByHand(), asyncio.Event()

    async def texts() -> AsyncIterator[bytes]:
        yield line("a")
        await more.wait()
        yield line("b")

    run = asyncio.create_task(Batch(hand.send, hand.write, 8).run(texts()))
    await hand.progress.until(lambda: "a" in hand.open)
    hand.finish("a")
    await hand.progress.until(lambda: hand.written == ["a"])
    more.set()
    await hand.progress.until(lambda: "b" in hand.open)
    hand.finish("b")
    await run


async def test_at_most_so_many_lines_are_open() -> None:
    hand = ByHand()
    names = [str(number) for number in range(40)]
    run = asyncio.create_task(Batch(hand.send, hand.write, 3).run(given(map(line, names))))
    for number in range(len(names)):
        num_open = min(3, len(names) - number)
        await hand.progress.until(lambda: len(hand.open) == num_open and hand.num_started == number + num_open)  # noqa: B023
        hand.finish(max(hand.open, key=int) if number % 3 else min(hand.open, key=int))
    await run
    assert hand.most_open == 3 and hand.written == names


async def test_what_waits_behind_a_slow_line_is_bounded() -> None:
    hand = ByHand()
    read: list[str] = []

    async def texts() -> AsyncIterator[bytes]:
        for number in range(1000):
            read.append(str(number))
            yield line(read[-1])

    run = asyncio.create_task(Batch(hand.send, hand.write, 2).run(texts()))
    most = 2 * LINES_PER_OPEN_LINE
    for number in range(1, most):
        await hand.progress.until(lambda: str(number) in hand.open)  # noqa: B023
        hand.finish(str(number))
    await hand.progress.until(lambda: set(hand.open) == {"0"} and len(read) == most + 1)  # one is read and waits for room
    assert hand.num_started == most and hand.written == []
    hand.finish("0")
    await hand.progress.until(lambda: len(hand.written) == most and str(most) in hand.open)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert hand.open == {}


async def test_a_failed_write_ends_the_run_and_what_is_open() -> None:
    hand = ByHand()
    run = asyncio.create_task(Batch(hand.send, hand.write, 8).run(given([line("a"), line("b"), line("c")])))
    await hand.progress.until(lambda: len(hand.open) == 3)
    hand.full = True
    hand.finish("a")
    with pytest.raises(HalfbyteError, match="no space"):
        await run
    assert hand.open == {} and sorted(hand.cancelled) == ["b", "c"]


async def test_a_file_that_breaks_off_fails_after_the_lines_before_it() -> None:
    hand = ByHand()

    async def texts() -> AsyncIterator[bytes]:
        yield line("a")
        raise OSError(5, "Input/output error")

    run = asyncio.create_task(Batch(hand.send, hand.write, 8).run(texts()))
    await hand.progress.until(lambda: "a" in hand.open)
    hand.finish("a")
    with pytest.raises(OSError, match="Input/output error"):
        await run
    assert hand.written == ["a"]


# --- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"", b"\n", b"a\n\nb\n", b"a\nb", b"x" * 1_000_000 + b"\ny\n" + b"z\n" * 100])
async def test_file_lines(text: bytes) -> None:
    file = io.BytesIO(text)
    texts = FileLines(file)
    assert [item async for item in texts] == text.splitlines(keepends=True)
    assert texts.finished


async def test_file_lines_come_as_they_are_written_and_end_when_asked() -> None:
    read_end, write_end = os.pipe()
    texts = FileLines(os.fdopen(read_end, "rb"))
    os.write(write_end, b"a\nb")
    assert await anext(texts) == b"a\n"
    waiting = asyncio.ensure_future(anext(texts, None))
    texts.end()
    assert await waiting is None and not texts.finished
    assert await anext(texts, None) is None
    os.close(write_end)


async def test_a_file_is_not_read_ahead_of_its_reader() -> None:
    class Counted(io.BytesIO):
        count = 0
        closed_by_reader = threading.Event()

        def readline(self, size: int | None = -1) -> bytes:
            self.count += 1
            return super().readline(size)

        def close(self) -> None:
            super().close()
            self.closed_by_reader.set()

    file = Counted(b"x\n" * 10_000)
    texts = FileLines(file)
    assert await anext(texts) == b"x\n"
    texts.end()
    assert await asyncio.to_thread(file.closed_by_reader.wait, LIMIT_S)
    assert file.count < 100


async def test_an_error_of_the_file_is_raised() -> None:
    class Broken(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        await anext(FileLines(Broken()))
