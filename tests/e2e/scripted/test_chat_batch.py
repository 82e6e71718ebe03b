"""POST /v1/chat/completions/batch: choice i is conversation i's answer, as if it had been sent alone; all are taken, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Server = Any
BATCH, CHAT = "/v1/chat/completions/batch", "/v1/chat/completions"
QUESTIONS = ("one", "two", "one", "a longer three")


def asks(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


CONVERSATIONS = [asks(text) for text in QUESTIONS]


@pytest.fixture(scope="module")
def server(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(enable_prompt_tokens_details=True)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 7},
        {"temperature": 0, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {"temperature": 0, "n": 1, "stream": False, "tool_choice": "none", "priority": 1},
        {"messages": [asks("one")]},
    ],
)
def test_each_choice_is_what_its_conversation_alone_gets(server: Server, options: dict[str, Any]) -> None:
    body = {"messages": CONVERSATIONS, "max_tokens": 3, "temperature": 0} | options
    server.say_chat("two", "ab")
    answer = server.post(BATCH, body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    alone = [server.post(CHAT, body | {"messages": one}).json() for one in body["messages"]]
    assert [choice["index"] for choice in found["choices"]] == list(range(len(alone)))
    assert [choice | {"index": 0} for choice in found["choices"]] == [one["choices"][0] for one in alone]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][count] == sum(one["usage"][count] for one in alone)
    assert found.keys() == alone[0].keys() and found["object"] == "chat.completion"
    assert found["prompt_token_ids"] is None


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"messages": [asks("a"), [{"role": "user", "content": 5}]]}, "messages", "messages[1]: "),
        ({"messages": [asks("a"), asks("b"), asks("x" * 60)]}, "input_tokens", "messages[2]: the prompt has"),
        ({"messages": [asks("a"), asks("x" * 5000)]}, "input_text", "messages[1]: the input has"),
        ({"messages": [asks("a"), []]}, "messages", "messages.1: "),
        ({"messages": asks("a")}, "messages", "messages.0: "),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [asks("a")] * 1025}, "messages", "messages holds 1025 conversations, at most 1024 are allowed"),
        ({"messages": [[*asks("a"), "b"]]}, "messages", "messages.0.1: "),
        ({"temperature": 9}, "temperature", "temperature must be in [0.0, 2.0]"),
        ({"stream": True}, "stream", "stream goes not with several conversations"),
        ({"n": 2}, "n", "n goes not with several conversations"),
        ({"use_beam_search": True}, "use_beam_search", "goes not with several"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools goes not with several"),
        ({"tool_choice": "auto"}, "tool_choice", "goes not with several"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "goes not with several"),
        ({"return_prompt_text": True}, "return_prompt_text", "goes not with several"),
        ({"best_of": 2}, "best_of", "not supported"),
    ],
)
def test_one_wrong_conversation_is_named_and_nothing_is_generated(
    server: Server, changes: dict[str, Any], param: str, message: str
) -> None:
    num_before = len(server.model.requests)
    answer = server.post(BATCH, {"messages": CONVERSATIONS, "max_tokens": 3, "temperature": 0} | changes)
    error = answer.json()["error"]
    assert answer.status_code == 400 and message in error["message"], error
    assert param in error["param"].split("."), error
    assert len(server.model.requests) == num_before


def test_a_batch_is_admitted_as_one(start_scripted: Callable[..., Server]) -> None:
    server = start_scripted(info={"max_num_seqs": 1, "max_num_queued_reqs": 2})
    assert server.post(BATCH, {"messages": CONVERSATIONS, "max_tokens": 1}).status_code == 503
    assert not server.model.requests
    assert server.post(BATCH, {"messages": CONVERSATIONS[:3], "max_tokens": 1}).status_code == 200


def test_one_failure_ends_the_batch(start_scripted: Callable[..., Server]) -> None:
    server = start_scripted()
    server.model.fails[1] = "no numbers"
    answer = server.post(BATCH, {"messages": CONVERSATIONS, "max_tokens": 3})
    assert answer.status_code == 500 and "no numbers" in answer.json()["error"]["message"]
    server.model.wait(lambda model: model.num_live == 0)
