"""A batch that a running server answers, and what all clients of servers share: waiting, giving up, reading errors and events."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from halfbyte.entrypoints.batch import LineReader
from halfbyte.entrypoints.batch_routes import MAX_TRIES, ServerRoutes, answer_file
from halfbyte.entrypoints.http_client import EventData, failure, reason_of, wait_s
from halfbyte.errors import HalfbyteError
from tests.unit.batch_files import line, written

Handler = Callable[[httpx.Request], httpx.Response]


class Elsewhere:
    """A server that answers as the test says, and what was asked of it."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.asked: list[httpx.Request] = []
        self.waits_s: list[float] = []
        self.out = b""
        self._answers = list(answers)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    async def _wait(self, seconds: float) -> None:
        self.waits_s.append(seconds)

    def _write(self, data: bytes) -> None:
        self.out += data

    async def run(self, text: bytes) -> list[dict[str, Any]]:
        transport = httpx.MockTransport(self._answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://far") as http:
            await answer_file(ServerRoutes(http, self._wait), io.BytesIO(text), self._write, 1)
        return written(self.out)


def error(status: int, message: str = "no", **headers: str) -> httpx.Response:
    return httpx.Response(
        status, headers=headers, json={"error": {"message": message, "type": "T", "param": None, "code": status}}
    )


GOOD = httpx.Response(200, json={"id": "x"})


async def test_lines_go_to_their_routes_as_they_stand() -> None:
    server = Elsewhere(GOOD)
    [answer] = await server.run(line("a", url="/v1/chat/completions", body={"messages": [], "seed": 2}))
    [asked] = server.asked
    assert (asked.method, str(asked.url), json.loads(asked.content)) == (
        *("POST", "http://far/v1/chat/completions"),
        {"messages": [], "seed": 2},
    )
    read = LineReader().read(line("a", url="/v1/chat/completions", body={"messages": [], "seed": 2}))
    assert read is not None and answer["id"] == read.id == f"halfbyte-{asked.headers['x-request-id']}"
    assert answer["response"]["body"] == {"id": "x"} and answer["error"] is None


@pytest.mark.parametrize(
    "passing",
    [error(503), error(429), error(502), error(504), httpx.ConnectError("refused"), httpx.ReadError("broken off")],
)
async def test_what_passes_is_waited_for(passing: httpx.Response | Exception) -> None:
    server = Elsewhere(passing, passing, passing, GOOD)
    [answer] = await server.run(line("a"))
    assert answer["error"] is None and answer["response"]["status_code"] == 200
    assert server.waits_s == [0.5, 1.0, 2.0] and len({asked.headers["x-request-id"] for asked in server.asked}) == 1


async def test_a_server_says_when_to_come_again() -> None:
    server = Elsewhere(error(503, **{"retry-after": "7"}), error(503, **{"retry-after": "900"}), GOOD)
    await server.run(line("a"))
    assert server.waits_s == [7.0, 30.0]


@pytest.mark.parametrize("status", [400, 404, 413, 500])
async def test_other_errors_are_answers(status: int) -> None:
    server = Elsewhere(error(status))
    [answer] = await server.run(line("a"))
    assert answer["response"]["status_code"] == answer["error"]["code"] == status and len(server.asked) == 1


@pytest.mark.parametrize(
    ("answer", "num_asked", "message"),
    [
        (
            error(401, "wrong key"),
            1,
            "http://far answers 401: wrong key; name its key with --api-key; written until then: 1 line",
        ),
        (error(403, "no"), 1, "http://far answers 403: no; name its key with --api-key"),
        (
            error(503, "full"),
            MAX_TRIES,
            f"no answer from http://far in {MAX_TRIES} tries (503: full); written until then: 1 line",
        ),
        (httpx.ConnectError("refused"), MAX_TRIES, f"no answer from http://far in {MAX_TRIES} tries (ConnectError: refused)"),
    ],
)
async def test_a_server_that_is_gone_ends_the_run(answer: httpx.Response | Exception, num_asked: int, message: str) -> None:
    """Thousands of lines must not become thousands of equal errors."""
    server = Elsewhere(GOOD, answer)
    with pytest.raises(HalfbyteError) as raised:
        await server.run(line("a") + line("b") + line("c"))
    assert str(raised.value).startswith(message) and len(server.asked) <= 1 + 2 * num_asked
    assert [found["custom_id"] for found in written(server.out)] == ["a"]


def test_waits_grow_to_half_a_minute() -> None:
    waits_s = [wait_s(num_tries, None) for num_tries in range(1, MAX_TRIES)]
    assert waits_s == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert wait_s(1, "Wed, 21 Oct 2026 07:28:00 GMT") == wait_s(1, "-5") == wait_s(1, "nan") == 0.5


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": {"message": "no\\nroom", "code": 503}}', "no\\nroom"),
        (b'{"error": "no room"}', "no room"),
        (b'{"message": "no room"}', "no room"),
        (b'{"detail": [{"loc": "x"}]}', "[{'loc': 'x'}]"),
        (b" <html>\x1b[0m</html>", "<html>\\x1b[0m</html>"),
        (b"", ""),
        (b'"' + b"x" * 10_000 + b'"', "x" * 300),
    ],
)
def test_the_reason_is_one_short_line(body: bytes, reason: str) -> None:
    assert reason_of(body) == reason


def test_a_failure_has_a_name_even_without_words() -> None:
    assert failure(TimeoutError()) == "TimeoutError" and failure(OSError(5, "a\nb")) == "OSError: [Errno 5] a\\nb"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_event_data_in_any_pieces(size: int) -> None:
    stream = b': hello\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{}\n\ndata: [DONE]'
    data = EventData()
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [found for piece in (*pieces, b"\n") for found in data.feed(piece)] == [b'{"a": 1}', b"{}", b"[DONE]"]
