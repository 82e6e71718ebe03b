"""Answers of /v1/messages as clients take them in: whole ones and streams have one shape here, and a stream's order is checked.

As `chat_answers`, for Anthropic's wire format. Starts no server and sends nothing by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

Post = Callable[[dict[str, Any]], httpx.Response]
TEXT_OF = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
CACHED = ("cache_creation_input_tokens", "cache_read_input_tokens")


@dataclass
class ToldMessage:
    """blocks: ("text" or "thinking", text) or ("tool_use", name, text of the input), in order."""

    blocks: list[tuple[str, ...]] = field(default_factory=list)
    stop_reason: str | None = None
    stop_sequence: str | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0

    def texts(self, kind: str) -> str:
        return "".join(block[1] for block in self.blocks if block[0] == kind)

    @property
    def calls(self) -> list[tuple[str, str]]:
        return [(block[1], block[2]) for block in self.blocks if block[0] == "tool_use"]


def told_whole(answer: httpx.Response) -> ToldMessage:
    """A whole answer. The text of inputs is that of the body, to the letter."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    check_frame(body)
    inputs = iter(re.findall(r'"input":(\{.*?\})(?=\}[,\]])', answer.text))
    told = ToldMessage([_block(block, inputs) for block in body["content"]], body["stop_reason"], body["stop_sequence"])
    assert body["content"], "an answer has at least one block"
    assert len(ids := [b["id"] for b in body["content"] if b["type"] == "tool_use"]) == len(set(ids))
    told.num_input_tokens, told.num_output_tokens = used(body["usage"])
    return told


def _block(block: dict[str, Any], inputs: Any) -> tuple[str, ...]:
    match block:
        case {"type": "text", "text": text} if len(block) == 2:
            return "text", text
        case {"type": "thinking", "thinking": text, "signature": str(signature)} if len(block) == 3 and signature:
            return "thinking", text
        case {"type": "tool_use", "id": str(call_id), "name": name, "input": dict(given)} if len(block) == 4 and call_id:
            text = next(inputs)
            assert json.loads(text) == given
            return "tool_use", name, text
    raise AssertionError(f"no block of an answer: {block}")


def check_frame(message: dict[str, Any]) -> None:
    keys = {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    assert set(message) == keys and message["type"] == "message" and message["role"] == "assistant"
    assert message["id"].startswith("msg_")


def used(usage: dict[str, Any]) -> tuple[int, int]:
    """(tokens of the prompt, tokens of the answer)."""
    assert set(usage) - {"output_tokens_details"} == {"input_tokens", "output_tokens", *CACHED}
    return usage["input_tokens"] + sum(usage[name] for name in CACHED), usage["output_tokens"]


def named_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream's events, each named after its type; comments are passed over."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, rest = answer.text.split("\n\n")
    assert rest == ""
    events = []
    for part in parts:
        if not part.startswith(":"):
            name, data = part.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def told_stream(answer: httpx.Response) -> ToldMessage:
    """A stream, put together as its client does, its order checked."""
    start, *events, delta, stop = named_events(answer)
    assert start["type"] == "message_start" and stop == {"type": "message_stop"}
    check_frame(start["message"])
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    told = ToldMessage()
    is_open = signed = False
    for event in events:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert not is_open and event["index"] == len(told.blocks)
            told.blocks.append(_begun(event["content_block"]))
            is_open, signed = True, False
            continue
        assert is_open and event["index"] == len(told.blocks) - 1 and not (kind == "delta" and signed)
        block = told.blocks[-1]
        if kind == "delta" and event["delta"]["type"] == "signature_delta":
            signed = bool(event["delta"]["signature"])
        elif kind == "delta":
            name, text = TEXT_OF[block[0]]
            assert event["delta"].keys() == {"type", text} and event["delta"]["type"] == name and event["delta"][text]
            told.blocks[-1] = (*block[:-1], block[-1] + event["delta"][text])
        else:
            assert kind == "stop" and signed == (block[0] == "thinking")
            is_open = False
    assert not is_open and delta["type"] == "message_delta" and set(delta) == {"type", "delta", "usage"}
    told.stop_reason, told.stop_sequence = delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]
    told.num_input_tokens, told.num_output_tokens = used(delta["usage"])
    assert used(start["message"]["usage"])[0] == told.num_input_tokens
    return told


def _begun(block: dict[str, Any]) -> tuple[str, ...]:
    if block["type"] == "tool_use":
        assert block["input"] == {} and block["id"]
        return "tool_use", block["name"], ""
    assert block in ({"type": "text", "text": ""}, {"type": "thinking", "thinking": "", "signature": ""})
    return block["type"], ""


def told_both(post: Post, body: dict[str, Any]) -> ToldMessage:
    """An answer, whole and streamed: they are the same. The input of a call that was cut is JSON in the whole answer only."""
    whole, streamed = told_whole(post(body)), told_stream(post(body | {"stream": True}))
    told = streamed
    if streamed.calls and not is_object(streamed.calls[-1][1]):
        assert streamed.stop_reason in ("max_tokens", "stop_sequence")
        assert is_object(whole.calls[-1][1]) and whole.blocks[:-1] == streamed.blocks[:-1]
        whole.blocks[-1] = streamed.blocks[-1]
    assert streamed == whole
    return told


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
