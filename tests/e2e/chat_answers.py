"""Chat answers as clients take them in: whole ones and streams have one shape here, and the order of a stream is checked.

Knows the wire format alone. Used by the end-to-end tests; it starts no server and sends nothing by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

Post = Callable[[dict[str, Any]], httpx.Response]


@dataclass
class Told:
    """One choice as a client has it in the end. calls: (name, text of the arguments) in order."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def told_whole(answer: httpx.Response) -> list[Told]:
    """The choices of a whole answer."""
    assert answer.status_code == 200, answer.text
    return [_told(choice) for choice in answer.json()["choices"]]


def _told(choice: dict[str, Any]) -> Told:
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert calls or "tool_calls" not in message, "an empty list of calls is left out"
    assert all(call["type"] == "function" and call["id"] for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    if calls:
        assert message["content"] != "", "no text beside calls is null"
    pairs = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return Told(message["content"] or "", message["reasoning"] or "", pairs, choice["finish_reason"], choice["stop_reason"])


def told_stream(answer: httpx.Response) -> list[Told]:
    """The choices of a stream. Each begins with its role, has one finish reason, and ends with it in an empty delta."""
    chunks = [json.loads(event) for event in stream_events(answer)]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    count = len({choice["index"] for choice in choices})
    return [_joined([choice for choice in choices if choice["index"] == index]) for index in range(count)]


def stream_events(answer: httpx.Response) -> list[str]:
    """The data of a stream's events before [DONE], none of which is an error."""
    assert answer.status_code == 200, answer.text
    events = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert not any("error" in json.loads(event) for event in events), events[-1]
    return events


def _joined(choices: Sequence[dict[str, Any]]) -> Told:
    first, *middle, last = choices
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert last["delta"] == {} and last["finish_reason"] is not None
    told = Told(finish_reason=last["finish_reason"], stop_reason=last["stop_reason"])
    for choice in middle:
        assert choice["finish_reason"] is None
        delta = choice["delta"]
        assert delta or choice["logprobs"], "an empty chunk tells nothing"
        assert set(delta) <= {"content", "reasoning", "tool_calls"}
        told.content += delta.get("content", "")
        told.reasoning += delta.get("reasoning", "")
        for call in delta.get("tool_calls", []):
            _grow(told, call)
    return told


def _grow(told: Told, call: dict[str, Any]) -> None:
    """A call's name, id and type come once, with its first piece."""
    function = call["function"]
    if call["index"] == len(told.calls):
        assert call["id"] and call["type"] == "function" and function["name"]
        told.calls.append((function["name"], function.get("arguments", "")))
    else:
        assert call["index"] == len(told.calls) - 1, "only the last call grows"
        assert set(call) == {"index", "function"} and set(function) == {"arguments"}
        name, arguments = told.calls[-1]
        told.calls[-1] = (name, arguments + function["arguments"])


def told_both(post: Post, body: dict[str, Any]) -> list[Told]:
    """The choices of a request, whole and streamed: they are the same."""
    whole = told_whole(post(body))
    streamed = told_stream(post(body | {"stream": True}))
    assert streamed == whole
    return whole
