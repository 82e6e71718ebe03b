"""Responses as clients take them in: each object and each event held to the official client's types, streams put together again.

Knows the wire format alone. Used by the tests of /v1/responses; it starts no server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pydantic
from openai.types.responses import Response, ResponseStreamEvent

Post = Callable[[dict[str, Any]], httpx.Response]
_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
KINDS = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
ENDS = ("response.completed", "response.incomplete", "response.failed")


def without_extras(model: Any, place: str = "$") -> Any:
    """The model; an assertion if it, or one within it, was given what it does not declare."""
    if isinstance(model, pydantic.BaseModel):
        assert not model.model_extra, f"{place}: {sorted(model.model_extra)}"
        for name in type(model).model_fields:
            without_extras(getattr(model, name), f"{place}.{name}")
    elif isinstance(model, list):
        for index, item in enumerate(model):
            without_extras(item, f"{place}[{index}]")
    return model


def check_response(body: dict[str, Any]) -> dict[str, Any]:
    """A response object that the client's types take, strictly."""
    without_extras(Response.model_validate(body))
    return body


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return list(parse_events(answer.text))


def parse_events(text: str) -> Iterator[dict[str, Any]]:
    """Each event, checked: its name is its type, and it is one of the client's."""
    parts = text.split("\n\n")
    assert parts.pop() == ""
    for part in parts:
        if part.startswith(":"):
            continue
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        without_extras(_EVENT.validate_python(event))
        yield event


@dataclass
class Streamed:
    """A stream put together: the items as the deltas tell them, and the response that the last event holds."""

    events: list[dict[str, Any]]
    response: dict[str, Any]

    @property
    def types(self) -> list[str]:
        return [event["type"].removeprefix("response.") for event in self.events]


def streamed(answer: httpx.Response) -> Streamed:
    """A stream that ended well. Its deltas join to the texts that are told as done, and these are the items of its response."""
    events = events_of(answer)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    first, last = events[0], events[-1]
    assert first["type"] == "response.created" and last["type"] in ENDS
    assert all(event["type"] not in ENDS for event in events[:-1])
    response = check_response(last["response"])
    assert first["response"]["id"] == response["id"] and first["response"]["output"] == []
    items = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in items] == response["output"]
    assert [event["output_index"] for event in items] == list(range(len(items)))
    for index, item in enumerate(response["output"]):
        _check_item(item, [event for event in events if event.get("output_index") == index])
    return Streamed(events, response)


def _check_item(item: dict[str, Any], events: list[dict[str, Any]]) -> None:
    """In the order of the official API, under one id, with deltas that join."""
    kind = KINDS[item["type"]]
    has_parts = item["type"] in ("message", "reasoning")
    types = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"].endswith(".delta")]
    begin = ["output_item.added", *["content_part.added"] * has_parts]
    end = [f"{kind}.done", *["content_part.done"] * has_parts, "output_item.done"]
    assert types == [*begin, *[f"{kind}.delta"] * len(deltas), *end]
    assert (
        {event.get("item_id", item["id"]) for event in events}
        == {item["id"]}
        == {events[0]["item"]["id"], events[-1]["item"]["id"]}
    )
    assert events[0]["item"].get("status", "in_progress") == "in_progress"
    text = "".join(event["delta"] for event in deltas)
    assert all(event["delta"] for event in deltas)
    if has_parts:
        assert events[0]["item"]["content"] == [] and [text] == [part["text"] for part in item["content"]]
        assert events[-3]["text"] == text and events[-2]["part"] == item["content"][0]
        logprobs = [token for event in deltas for token in event.get("logprobs", ())]
        assert [(token["token"], token["logprob"]) for token in logprobs] == [
            (token["token"], token["logprob"]) for token in item["content"][0].get("logprobs", ())
        ]
    elif item["type"] == "custom_tool_call":
        assert events[0]["item"]["input"] == "" and item["input"] == events[-2]["input"] == text
    else:
        assert events[0]["item"]["arguments"] == "" and item["arguments"] == events[-2]["arguments"] == text
        assert events[-2]["name"] == item["name"]


def plain(output: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Items without ids: (kind, text) or (kind, name, arguments or input), marked where they are not complete."""
    told = []
    for item in output:
        if item["type"] == "function_call":
            found: tuple[str, ...] = ("call", item["name"], item["arguments"])
        elif item["type"] == "custom_tool_call":
            found = ("custom", item["name"], item["input"])
        else:
            found = (item["type"], "".join(part["text"] for part in item["content"]))
        told.append(found if item.get("status", "completed") == "completed" else (*found, item["status"]))
    return told


def both(post: Post, body: dict[str, Any]) -> dict[str, Any]:
    """The response to a request, whole and streamed: they say the same. The whole one is returned."""
    answer = post(body)
    assert answer.status_code == 200, answer.text
    whole = check_response(answer.json())
    told = streamed(post(body | {"stream": True})).response
    assert plain(told["output"]) == plain(whole["output"])
    for key in ("status", "incomplete_details", "tools", "tool_choice", "text", "temperature", "metadata"):
        assert told[key] == whole[key], key
    assert told["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    ids = [item["id"] for response in (whole, told) for item in response["output"]]
    assert len(set(ids)) == len(ids)
    return whole
