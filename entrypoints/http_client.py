"""What every client of a running server does the same way: keys, waiting, events of a stream, and what to say of a failure.

Knows HTTP as OpenAI-compatible servers speak it, and none of their fields but `error` and `data`. `chat` and `bench` ask through
`Server`; `run-batch` and the load generator, which have connections of their own, use the functions. Called by those commands.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Self

import httpx
import msgspec

from halfbyte.entrypoints.flag_table import API_KEY_VARIABLES
from halfbyte.entrypoints.flags import UsageError
from halfbyte.errors import HalfbyteError
from halfbyte.log import one_line

CONNECT_TIMEOUT_S = 5.0
# statuses of a server, or of what stands before it, that has no room or is not there now: the same request may succeed later
PASSING_STATUSES = frozenset((429, 502, 503, 504))
_LONGEST_WAIT_S = 30.0
_MAX_REASON_CHARS = 300


def key_headers(
    given: str | None, environ: Mapping[str, str] = os.environ, variable: str = API_KEY_VARIABLES[0]
) -> dict[str, str]:
    """What a server with a key wants to see: the key that was given, else the environment's. UsageError if it cannot be one."""
    key = given or environ.get(variable) or ""
    if not (key.isascii() and key.isprintable()):
        raise UsageError("a server's key must be printable ASCII")
    return {"Authorization": f"Bearer {key}"} if key else {}


def reason_of(body: bytes) -> str:
    """The message of an error's body, whatever its shape, in one short line."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        found = body.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(found, dict):
            found = found.get(key, found)
    return one_line(str(found).strip())[:_MAX_REASON_CHARS]


def failure(error: Exception) -> str:
    """Why there is no answer, in one short line."""
    return one_line(f"{type(error).__name__}: {error}".removesuffix(": "))[:_MAX_REASON_CHARS]


def wait_s(num_tries: int, retry_after: str | None) -> float:
    """Seconds before the next try: what the server said (Retry-After), at least 0.5, doubled with each try, at most 30."""
    said = retry_after or ""
    said_s = float(said) if said.isascii() and said.isdecimal() else 0.0  # it may also be a date
    return min(_LONGEST_WAIT_S, max(said_s, 0.25 * 2**num_tries))


class EventData:
    """The `data` of server-sent events, in whatever pieces the network delivers them."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data that `piece` completes; [DONE] is one of them. A newline completes a last line that lacks its own."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class Server:
    """`with Server(url, headers, timeout_s, hint) as server`: asks one question at a time.

    Everything that fails is a HalfbyteError of one line. hint: what to do when nobody answers.
    """

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float, hint: str) -> None:
        self.url = url.rstrip("/")
        self._hint = hint
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        try:
            self.http = httpx.Client(base_url=self.url, headers=dict(headers), timeout=timeout)
        except httpx.InvalidURL as error:
            raise HalfbyteError(f"{url!r} is not a URL: {error}; {hint}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def send(self, method: str, path: str, **request: Any) -> bytes:
        """The body of a whole answer that is no error."""
        try:
            response = self.http.request(method, path, **request)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self.unreachable(error) from None
        self.check(path, response.status_code, response.content)
        return response.content

    def call(self, method: str, path: str, **request: Any) -> Any:
        """As `send`, decoded."""
        try:
            return msgspec.json.decode(self.send(method, path, **request))
        except msgspec.DecodeError:
            raise HalfbyteError(f"{self.url}{path} does not answer with JSON") from None

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[bytes]:
        """The data of the events that answer one request, as they arrive."""
        data = EventData()
        try:
            with self.http.stream("POST", path, json=body) as response:
                if response.is_error:
                    self.check(path, response.status_code, response.read())
                for piece in response.iter_bytes():
                    yield from data.feed(piece)
                yield from data.feed(b"\n")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self.unreachable(error) from None

    def check(self, path: str, status: int, body: bytes) -> None:
        """HalfbyteError for an answer that is an error."""
        if status >= 400:
            raise HalfbyteError(f"{self.url}{path} answers {status}: {reason_of(body)}")

    def unreachable(self, error: Exception) -> HalfbyteError:
        """What to raise when there was no answer."""
        return HalfbyteError(f"no answer from {self.url} ({failure(error)}); {self._hint}")
