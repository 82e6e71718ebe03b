"""`halfbyte chat`: a conversation with a running server over its public API, streamed to the terminal.

Knows only HTTP: any OpenAI-compatible server will do. The server's error messages are shown as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from halfbyte.entrypoints.flag_table import API_KEY_VARIABLES, LOG_LEVEL
from halfbyte.entrypoints.flags import Flag, parse
from halfbyte.entrypoints.http_client import Server, key_headers, reason_of
from halfbyte.errors import HalfbyteError

DEFAULT_URL = "http://127.0.0.1:8000/v1"
# A first token may be long in coming.
_TIMEOUT_S = 600.0

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
    settings = {name: given[name] for name in ("max_tokens", "temperature") if name in given}
    messages: list[dict[str, str]] = []
    if "system_prompt" in given:
        messages.append({"role": "system", "content": given["system_prompt"]})
    url, hint = given.get("url", DEFAULT_URL), "start a server with `halfbyte serve`, or set --url"
    with Server(url, key_headers(given.get("api_key")), _TIMEOUT_S, hint) as server:
        conversation = Conversation(server, settings, messages)
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

    def __init__(self, server: Server, settings: dict[str, Any], messages: list[dict[str, str]]) -> None:
        self._server = server
        self._settings = settings
        self._messages = messages
        self._model = ""

    def choose_model(self, name: str | None) -> None:
        """Take `name`, or the first model that the server lists."""
        if name is not None:
            self._model = name
            return
        try:
            self._model = self._server.call("GET", "/models")["data"][0]["id"]
        except (LookupError, TypeError):
            raise HalfbyteError(f"{self._server.url}/models lists no model; is --url right? It usually ends in /v1") from None

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
        for data in self._server.events("/chat/completions", body):
            yield from _delta_of(data)


def _delta_of(data: bytes) -> Iterator[str]:
    """The text of one event of the stream, if it carries any."""
    if data == b"[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        raise HalfbyteError(f"the server ended the answer: {reason_of(data)}")
    for choice in event.get("choices") or ():
        if text := (choice.get("delta") or {}).get("content"):
            yield text


def _read_line() -> str | None:
    """The next message, None at the end of input. A pipe gets no prompt sign."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None
