"""`halfbyte chat`: a conversation with a running server over its public API, streamed to the terminal.

Knows only HTTP: any OpenAI-compatible server will do. The server's error messages are shown as they are.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from halfbyte.entrypoints.flag_table import API_KEY_VARIABLES, LOG_LEVEL
from halfbyte.entrypoints.flags import Flag, parse
from halfbyte.errors import HalfbyteError
from halfbyte.log import one_line

DEFAULT_URL = "http://127.0.0.1:8000/v1"
# A first token may be long in coming; a connection is not.
_TIMEOUT = httpx.Timeout(600.0, connect=5.0)

FLAGS = (
    Flag(name="url", help=f"where the server is (default: {DEFAULT_URL})"),
    Flag(name="model-name", help="which of its models (default: the first)"),
    Flag(name="api-key", help=f"the server's key (default: {API_KEY_VARIABLES[0]})"),
    Flag(name="system-prompt", help="instructions in front of the conversation"),
    Flag(name="quick", short="-q", help="send this one message, print the answer and leave"),
    Flag(name="max-tokens", help="longest answer in tokens (default: the server's)", kind="size"),
    Flag(name="temperature", help="0 takes the most likely token each time (default: the server's)", kind="number"),
    LOG_LEVEL,
)


def run(argv: Sequence[str]) -> int:
    given = parse("chat", "Talk to a running server. Ctrl-D ends.", FLAGS, argv).command
    key = given.get("api_key") or os.environ.get(API_KEY_VARIABLES[0]) or ""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    settings = {name: given[name] for name in ("max_tokens", "temperature") if name in given}
    messages: list[dict[str, str]] = []
    if "system_prompt" in given:
        messages.append({"role": "system", "content": given["system_prompt"]})
    with Conversation(given.get("url", DEFAULT_URL), headers, settings, messages) as conversation:
        conversation.choose_model(given.get("model_name"))
        if "quick" in given:
            conversation.say(given["quick"])
            return 0
        while (text := _read_line()) is not None:
            if text.strip():
                conversation.say(text)
    return 0


class Conversation:
    """The messages so far and the connection that continues them."""

    def __init__(self, url: str, headers: dict[str, str], settings: dict[str, Any], messages: list[dict[str, str]]) -> None:
        self._url = url.rstrip("/")
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT)
        self._settings = settings
        self._messages = messages
        self._model = ""

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def choose_model(self, name: str | None) -> None:
        """Take `name`, or the first model that the server lists."""
        if name is not None:
            self._model = name
            return
        try:
            response = self._client.get(f"{self._url}/models")
            _raise_for_status(response)
            self._model = response.json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        except (ValueError, LookupError, TypeError):
            raise HalfbyteError(f"{self._url}/models lists no model; is --url right? It usually ends in /v1") from None

    def say(self, text: str) -> None:
        """Send one message, print the answer as it arrives, and remember both."""
        self._messages.append({"role": "user", "content": text})
        answer = ""
        for delta in self._stream():
            print(delta, end="", flush=True)
            answer += delta
        print(flush=True)
        self._messages.append({"role": "assistant", "content": answer})

    def _stream(self) -> Iterator[str]:
        body = {"model": self._model, "messages": self._messages, "stream": True} | self._settings
        try:
            with self._client.stream("POST", f"{self._url}/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                _raise_for_status(response)
                for line in response.iter_lines():
                    yield from _delta_of(line)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> HalfbyteError:
        reason = one_line(str(error)) or type(error).__name__
        return HalfbyteError(f"no answer from {self._url} ({reason}); start a server with `halfbyte serve`, or set --url")


def _delta_of(line: str) -> Iterator[str]:
    """The text of one line of the event stream, if it carries any."""
    if not line.startswith("data:") or (data := line.removeprefix("data:").strip()) == "[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        raise HalfbyteError(f"the server ended the answer: {_message(event)}")
    for choice in event.get("choices") or ():
        if text := (choice.get("delta") or {}).get("content"):
            yield text


def _raise_for_status(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        reason = _message(response.json())
    except ValueError:
        reason = response.text[:200]
    raise HalfbyteError(f"the server answered {response.status_code}: {reason}")


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _read_line() -> str | None:
    """The next message, None at the end of input. A pipe gets no prompt sign."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None
