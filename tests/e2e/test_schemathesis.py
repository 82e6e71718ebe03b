"""Thousands of requests that nobody thought of: whatever the server's OpenAPI document leads to, right and wrong.

A real server answers all of them, eight at a time, in one session that all tests look at. `schema_requests` makes them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import ServerProcess
from tests.e2e.message_answers import told_stream
from tests.e2e.responses_told import parse_events
from tests.e2e.schema_session import Session, check_answers, check_refusals, check_server, talk_to, told

FLAGS = (
    *("--max-model-len", "64", "--max-num-seqs", "16"),
    # however much is asked for, answers are short
    *("--override-generation-config", '{"max_new_tokens": 4}'),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "think"),
)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": {"messages": [CHAT["messages"]]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"model": "", "max_tokens": 4, **CHAT},
    "/v1/messages/count_tokens": {"model": "", **CHAT},
    "/v1/systemone": {"state": "Hi", "questions": {"q": {"type": "noul"}}},
    "/v1/decisions": {"model": "", "input": "Hi", "questions": [{"type": "predicate", "instructions": "It is."}]},
    "/tokenize": CHAT,
    "/detokenize": {"tokens": [1, 2]},
}
TOOLS = [{"type": "function", "function": {"name": "look"}}]
ANTHROPICS_TOOLS = {"tools": [{"name": "look", "input_schema": {"type": "object"}}]}
COMMON: dict[str, dict[str, Any]] = {
    "prompt": {"messages": None},  # a conversation or a text, not both
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": TOOLS},
    "parallel_tool_calls": {"tools": TOOLS},
}
FLAT_TOOLS = {"tools": [{"type": "function", "name": "look"}]}
BESIDE = dict.fromkeys(RIGHT, COMMON) | {
    "/v1/responses": {
        "top_logprobs": {"include": ["message.output_text.logprobs"]},
        "tool_choice": FLAT_TOOLS,
        "parallel_tool_calls": FLAT_TOOLS,
    },
    **dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), {"tool_choice": ANTHROPICS_TOOLS}),
    "/v1/chat/completions/batch": {"top_logprobs": {"logprobs": True}},
}
# A field that is right whatever JSON it is, and fields which chance makes right too rarely: those of `RIGHT` were taken.
EXCUSED = {
    ("refused", "/v1/systemone", "state"),
    ("taken", "/v1/decisions", "questions"),
    ("taken", "/v1/chat/completions/batch", "messages"),
    ("taken", "/v1/responses/{response_id}/input_items", "after"),
}
AT_LEAST = 2000


@pytest.fixture(scope="module")
def session(start_server: Callable[..., ServerProcess]) -> Session:
    return talk_to(start_server(*FLAGS).ready(), RIGHT, BESIDE, name=kept_response)


def kept_response(client: httpx.Client) -> dict[str, str]:
    """A response that can be read, cancelled and deleted."""
    answer = client.post("/v1/responses", json={"input": "Hi", "background": True, "max_output_tokens": 1})
    return {"response_id": answer.json()["id"]}


def test_thousands_of_different_requests_reach_every_route_and_field(session: Session) -> None:
    print(f"{len(session.talks)} requests, {dict(Counter(answer.status_code for _, answer in session.talks))}")
    assert len({sent for sent, _ in session.talks}) >= AT_LEAST
    assert session.missed_routes() == set()
    assert session.missed_fields(RIGHT) - EXCUSED == set()


def test_no_request_is_the_servers_failure(session: Session) -> None:
    """Answers are a success, a wrong request, or an unknown model."""
    for sent, answer in session.talks:
        assert answer.status_code in (200, 400, 404), told(sent, answer)


def test_each_answer_is_as_the_document_says(session: Session) -> None:
    """Its status, its media type, and its body: what is listed as required is there, and nothing that is not listed."""
    check_answers(session)


def test_each_refusal_has_the_standard_form_and_tells_nothing_of_the_machine(session: Session) -> None:
    check_refusals(session)


def test_each_stream_ends_as_it_should_and_holds_no_error(session: Session) -> None:
    streams = [(sent, answer) for sent, answer in session.talks if sent.streams and answer.status_code == 200]
    assert streams
    for sent, answer in streams:
        assert answer.headers["content-type"].startswith("text/event-stream"), told(sent, answer)
        if sent.path == "/v1/responses":
            last = list(parse_events(answer.text))[-1]["type"]
            assert last in ("response.completed", "response.incomplete"), told(sent, answer)
            continue
        if sent.path == "/v1/messages":
            told_stream(answer)
            continue
        events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
        assert events.pop() == "[DONE]", told(sent, answer)
        assert events and all("error" not in json.loads(event) for event in events), told(sent, answer)


def test_each_answer_of_a_route_that_takes_a_body_is_json(session: Session) -> None:
    for sent, answer in session.talks:
        if sent.path in RIGHT and not sent.streams:
            assert isinstance(answer.json(), dict), told(sent, answer)


def test_the_server_lives_and_serves_the_next_request(session: Session, wait_until: Callable[..., None]) -> None:
    check_server(session)
    answer = httpx.post(f"{session.server.url}/v1/chat/completions", json=CHAT | {"temperature": 0}, timeout=60)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"], answer.text
    for kind in ("running", "waiting"):
        wait_until(lambda kind=kind: session.server.metric(f"vllm:num_requests_{kind}") == 0)
