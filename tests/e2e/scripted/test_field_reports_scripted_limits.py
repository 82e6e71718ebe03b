"""What operators report of lengths, of messages in their many forms, and of usage (rows B26, B43 to B45, B53), over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.chat_answers import stream_events

Server = Any
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROUTES = (COMPLETIONS, CHAT)
SHOWS_CALLS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[call {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def server(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(
        info={"max_model_len": 256}, chat_template=SHOWS_CALLS, enable_prompt_tokens_details=True, tool_call_parser="hermes"
    )


def of_length(server: Server, route: str, count: int) -> dict[str, Any]:
    """A request whose prompt has this many tokens."""
    if route == COMPLETIONS:
        return {"prompt": [5] * count}
    around = len(server.tokens("<|start|>user\n<|end|>\n<|start|>assistant\n", special=False))
    return {"messages": [{"role": "user", "content": "a" * (count - around)}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_b26_max_tokens_is_a_cap_and_no_reservation(server: Server, route: str, stream: bool) -> None:
    """What does not fit beside the prompt is clamped; a prompt that leaves no room is refused with its length and the limit."""
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    for num_prompt, max_tokens, expected in ((200, 250, 56), (200, 256, 56), (255, 256, 1), (255, 1, 1), (200, 7, 7)):
        body = of_length(server, route, num_prompt) | {"max_tokens": max_tokens, "stream": stream} | usage
        answer = server.post(route, body)
        chunks = [json.loads(event) for event in stream_events(answer)] if stream else [answer.json()]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
        assert reasons == ["length"] and chunks[-1]["usage"]["completion_tokens"] == expected
    for num_prompt in (256, 257):
        refused = server.post(route, of_length(server, route, num_prompt) | {"max_tokens": 10, "stream": stream})
        assert refused.status_code == 400
        assert str(num_prompt) in refused.json()["error"]["message"] and "256" in refused.json()["error"]["message"]


def prompt_of(server: Server, *messages: dict[str, Any]) -> str:
    body = {"messages": [*messages, {"role": "user", "content": "?"}], "max_tokens": 1, "return_prompt_text": True}
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["prompt_text"]
    return text


USER = {"role": "user", "content": "u"}
CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
SHOWN_CALL = '[call f {"a": 1}]'


@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant", "tool"])
def test_b43_content_in_parts_is_the_text_of_its_parts(server: Server, role: str) -> None:
    around: list[dict[str, Any]] = []
    rest: dict[str, Any] = {}
    if role == "tool":
        around, rest = [USER, {"role": "assistant", "content": "", "tool_calls": CALLS}], {"tool_call_id": "c1"}
    elif role == "assistant":
        around = [USER]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    in_parts = prompt_of(server, *around, {"role": role, "content": parts, **rest})
    assert in_parts == prompt_of(server, *around, {"role": role, "content": "one\ntwo", **rest})
    assert "one\ntwo<|end|>" in in_parts


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("content", ["", None, [], "absent"], ids=repr)
def test_b44_an_assistant_without_content_keeps_its_place_and_its_calls(server: Server, content: Any, calls: bool) -> None:
    said: dict[str, Any] = {"role": "assistant"}
    said |= {} if content == "absent" else {"content": content}
    said |= {"tool_calls": CALLS} if calls else {}
    result = [{"role": "tool", "content": "r", "tool_call_id": "c1"}] if calls else []
    shown = f"<|start|>assistant\n{SHOWN_CALL if calls else ''}<|end|>\n"
    assert shown in prompt_of(server, USER, said, *result)


@pytest.mark.parametrize("result", ["42", [{"type": "text", "text": "42"}], {"value": 42}, None], ids=repr)
def test_b45_the_second_turn_of_an_agent(server: Server, result: Any) -> None:
    """An assistant's turn with content [] and calls, then the tool's result in any form."""
    said = {"role": "assistant", "content": [], "tool_calls": CALLS}
    prompt = prompt_of(server, USER, said, {"role": "tool", "tool_call_id": "c1", "content": result})
    shown = {"42": "42", "None": ""}.get(str(result), '{"value": 42}' if isinstance(result, dict) else "42")
    assert f"<|start|>assistant\n{SHOWN_CALL}<|end|>\n<|start|>tool\n{shown}<|end|>\n" in prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_b53_cached_tokens_are_told_also_when_there_are_none(server: Server, route: str, stream: bool) -> None:
    body = of_length(server, route, 64) | {"max_tokens": 1, "cache_salt": f"{route.count('/')} {stream}", "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    counts = []
    for _ in range(2):
        answer = server.post(route, body)
        last = json.loads(stream_events(answer)[-1]) if stream else answer.json()
        counts.append(last["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert counts == [0, 48]
