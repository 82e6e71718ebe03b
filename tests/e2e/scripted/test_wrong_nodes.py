"""Right requests with one thing in them replaced, at any depth, by JSON of another kind: each is answered or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Server = Any
WRONG: tuple[Any, ...] = (None, True, 5, -1.5, "x", "", [], ["x"], [[]], {}, {"x": {}}, {"type": "text"})
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": False}
CALLS = [
    {"type": "function_call", "call_id": "a", "name": "look", "namespace": "far", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "rain"}]},
    {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "b", "output": "done"},
]
RESPONSES = {
    "input": [
        {"type": "message", "id": "m", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "t"}],
        },
        *CALLS,
    ],
    "tools": [
        FUNCTION,
        {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}},
        {"type": "namespace", "name": "far", "description": "Far away.", "tools": [FUNCTION]},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look", "namespace": "far"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, "verbosity": "medium"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "metadata": {"k": "v"},
    "stream_options": {"include_obfuscation": False},
}
MESSAGES = {
    "model": "scripted",
    "max_tokens": 2,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "a", "name": "look", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "is_error": False, "content": [{"type": "text", "text": "rain"}]}
            ],
        },
    ],
    "tools": [{"name": "look", "description": "Looks.", "input_schema": SCHEMA, "input_examples": [{"city": "Oslo"}]}],
    "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "low"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "u"},
}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "t",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "name": "look", "content": "rain"},
    ],
    "tools": [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": False}}],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]},
    },
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
    "logit_bias": {"1": 1.0},
    "stop": ["x"],
    "chat_template_kwargs": {"enable_thinking": True},
    "documents": [{"title": "t", "text": "d"}],
}
BODIES = {
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/chat/completions": CHAT,
}
LIMIT = {"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens", "/v1/chat/completions": "max_tokens"}


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a body, and where a field might stand that nobody knows."""
    if path:
        yield path
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from places(value, (*path, key))
    if isinstance(node, dict):
        yield (*path, "unknown")


def replaced(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    body = json.loads(json.dumps(body))
    node = body
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return body


@pytest.fixture(scope="module")
def server(start_scripted: Callable[..., Server]) -> Server:
    flags = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "reasoning_parser": "qwen3"}
    return start_scripted(info={"max_model_len": 8192}, **flags)


@pytest.mark.parametrize("path", BODIES)
def test_anything_may_stand_anywhere(server: Server, path: str) -> None:
    limit = {LIMIT[path]: 2} if path in LIMIT else {}
    right = server.post(path, limit | BODIES[path])
    assert right.status_code == 200, right.text
    refused = 0
    for place in places(BODIES[path]):
        for value in WRONG:
            answer = server.post(path, limit | replaced(BODIES[path], place, value))
            assert answer.status_code in (200, 400, 404), f"{place} = {value!r}: {answer.status_code} {answer.text}"
            refused += answer.status_code != 200
    assert refused > 100
