"""Conversations over HTTP: what /v1/chat/completions and /tokenize make of them is the same, and nobody waits for a long one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

Server = Any

BOS = 256
WITH_BOS = (
    "{{ bos_token }}{% for t in tools or [] %}[tool {{ t | tojson }}]{% endfor %}"
    "{% for d in documents or [] %}[doc {{ d.text }}]{% endfor %}"
    "{% if enable_thinking is defined %}[think {{ enable_thinking }} {{ reasoning_effort }}]{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[call {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"function": {"name": "f", "arguments": '{"a": 1}'}}
SAID = {"role": "assistant", "content": "It"}

CONVERSATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a question": ({"messages": [USER]}, "<|start|>user\nHi<|end|>\n<|start|>assistant\n"),
    "instructions everywhere": (
        {"messages": [{"role": "developer", "content": "D"}, USER, {"role": "system", "content": "S"}]},
        "<|start|>system\nD\n\nS<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n",
    ),
    "a call and its result": (
        {"messages": [USER, {"role": "assistant", "content": [], "tool_calls": [CALL]}, {"role": "tool", "content": {"b": 2}}]},
        '<|start|>user\nHi<|end|>\n<|start|>assistant\n[call f {"a": 1}]<|end|>\n<|start|>tool\n{"b": 2}<|end|>\n'
        "<|start|>assistant\n",
    ),
    "continued": (
        {"messages": [USER, SAID], "continue_final_message": True},
        "<|start|>user\nHi<|end|>\n<|start|>assistant\nIt",
    ),
    "no answer begun": ({"messages": [USER], "add_generation_prompt": False}, "<|start|>user\nHi<|end|>\n"),
    "effort": (
        {"messages": [USER], "reasoning_effort": "none"},
        "[think False none]<|start|>user\nHi<|end|>\n<|start|>assistant\n",
    ),
    "documents": (
        {"messages": [USER], "documents": [{"text": "d"}]},
        "[doc d]<|start|>user\nHi<|end|>\n<|start|>assistant\n",
    ),
}


@pytest.fixture(scope="module")
def server(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(info={"max_model_len": 1024}, chat_template=WITH_BOS)


def prompt_ids(server: Server, **body: Any) -> list[int]:
    answer = server.post("/v1/chat/completions", {"max_tokens": 1, "return_token_ids": True} | body)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["prompt_token_ids"]
    return ids


@pytest.mark.parametrize(("body", "text"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_b47_chat_and_tokenize_see_the_same_ids_with_one_bos(server: Server, body: dict[str, Any], text: str) -> None:
    expected = [BOS, *server.tokens(text, special=False)]
    for special in (None, False, True):
        asked = body | {"add_special_tokens": special}
        assert prompt_ids(server, **asked) == server.post("/tokenize", asked).json()["tokens"] == expected


def test_a_completion_of_a_rendered_prompt_has_one_bos(server: Server) -> None:
    expected = prompt_ids(server, messages=[USER])
    text = "<bos><|start|>user\nHi<|end|>\n<|start|>assistant\n"
    answer = server.post("/v1/completions", {"prompt": text, "max_tokens": 1, "return_token_ids": True})
    assert answer.json()["choices"][0]["prompt_token_ids"] == expected
    assert server.post("/tokenize", {"prompt": text}).json()["tokens"] == expected


def test_tools_are_shown_by_both_even_when_none_may_be_called(server: Server) -> None:
    plain = server.post("/tokenize", {"messages": [USER]}).json()["tokens"]
    shown = server.post("/tokenize", {"messages": [USER], "tools": [TOOL]}).json()["tokens"]
    assert shown == prompt_ids(server, messages=[USER], tools=[TOOL], tool_choice="none")
    assert shown == [BOS, *server.tokens(f"[tool {json.dumps(TOOL)}]", special=False), *plain[1:]]
    answer = server.post("/tokenize", {"messages": [USER], "tools": [{"type": "web_search"}]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"


def test_control_tokens_come_from_the_template_only(server: Server) -> None:
    spelled = "<|end|><bos>"
    body = {
        "messages": [{"role": "user", "content": spelled}],
        "documents": [{"text": spelled}],
        "tools": [{"type": "function", "function": {"name": "f", "description": spelled}}],
    }
    ids = server.post("/tokenize", body).json()["tokens"]
    end = server.tokens("<|end|>", special=False)
    assert ids.count(BOS) == 1 and ids.count(end[0]) == 1


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "exclude each other"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "--trust-request-chat-template"),
        ({"messages": []}, "messages", ""),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0]"),
    ],
)
def test_what_is_refused_is_refused_by_both(server: Server, fields: dict[str, Any], param: str, part: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = server.post(path, {"messages": [USER]} | fields)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"].endswith(param) and part in error["message"]


def test_the_templates_words_are_the_answer(start_scripted: Callable[..., Server]) -> None:
    server = start_scripted(chat_template="{{ raise_exception('roles must alternate') }}")
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = server.post(path, {"messages": [USER]})
        assert answer.status_code == 400 and "roles must alternate" in answer.json()["error"]["message"]


# --- long conversations

MAX_GAP_S = 0.1
WORDS = "the quick brown fox <|end|> jumps over "


def long_bodies() -> Iterator[tuple[str, bytes]]:
    """Conversations of a megabyte: one message, 2000 messages, and nothing but spelled control tokens."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": WORDS * 13} for i in range(2000)]
    contents = (
        [{"role": "user", "content": "the quick brown fox " * 50_000}],
        turns,
        [{"role": "user", "content": "<|end|>" * 140_000}],
    )
    for messages in contents:
        yield "/tokenize", json.dumps({"messages": messages}).encode()
        # Refused as too long, once its prompt has been rendered and tokenised.
        yield "/v1/chat/completions", json.dumps({"messages": messages}).encode()


def largest_gap_s(server: Server, bodies: list[tuple[str, bytes]]) -> float:
    """The longest time between two pieces of a running stream, whose steps wait for its reader, while `bodies` are posted."""
    statuses: list[int] = []

    def post() -> None:
        headers = {"content-type": "application/json"}
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for path, body in bodies:
                with client.stream("POST", path, content=body, headers=headers) as answer:
                    statuses.append(answer.status_code)

    poster = threading.Thread(target=post)
    gap_s, last_s = 0.0, time.monotonic()
    server.model.hold()
    server.model.allow(1)
    with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 800_000, "stream": True}) as stream:
        for index, _ in enumerate(stream.iter_raw()):
            now_s = time.monotonic()
            gap_s = max(gap_s, now_s - last_s) if index else 0.0
            last_s = now_s
            if index == 0:
                poster.start()
            elif not poster.is_alive():
                break
            server.model.allow(1)
    poster.join()
    server.model.wait(lambda model: model.num_live == 0)
    assert statuses == [200, 400] * (len(bodies) // 2)
    return gap_s


def test_a_stream_runs_on_while_long_conversations_arrive(start_scripted: Callable[..., Server]) -> None:
    server = start_scripted(info={"max_model_len": 900_000}, chat_template=WITH_BOS)
    bodies = list(long_bodies())
    # What holds the loop does so every time; a busy machine does not.
    gaps_s = []
    while len(gaps_s) < 4 and (not gaps_s or min(gaps_s) > MAX_GAP_S):
        gaps_s.append(largest_gap_s(server, bodies))
    assert min(gaps_s) <= MAX_GAP_S, gaps_s
