"""Thousands of requests that nobody thought of: whatever the server's OpenAPI document leads to, right and wrong.

A real server answers all of them, eight at a time, in one session that all tests look at. `schema_requests` makes them.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import ROOT, ServerProcess
from tests.e2e.error_shapes import standard_error
from tests.e2e.message_answers import told_stream
from tests.e2e.responses_told import parse_events
from tests.e2e.schema_requests import JSON_TYPE, Answers, Schema, Sent, requests_of

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
}
ANYTHING = {("/v1/systemone", "state")}  # is right whatever JSON it is
AT_LEAST = 2000
LEAKS = re.compile(rf"0x[0-9a-f]{{4,}}|Traceback|site-packages|{re.escape(str(ROOT))}|{re.escape(sys.prefix)}", re.I)

Talk = tuple[Sent, httpx.Response]


@dataclass(frozen=True)
class Session:
    """All that was said to one server. pids: of the server and the engine, before and after."""

    server: ServerProcess
    document: Schema
    talks: Sequence[Talk]
    pids: tuple[tuple[int, int], tuple[int, int]]

    def refused(self) -> list[Talk]:
        return [(sent, answer) for sent, answer in self.talks if 400 <= answer.status_code < 500]


@pytest.fixture(scope="module")
def session(start_server: Callable[..., ServerProcess]) -> Session:
    server = start_server(*FLAGS).ready()
    before = (server.process.pid, server.engine_pid())
    with httpx.Client(base_url=server.url, timeout=120) as client:
        document = client.get("/openapi.json").json()
        requests = requests_of(document, RIGHT, BESIDE)

        def send(sent: Sent) -> Talk:
            headers = {} if sent.body is None else {"content-type": JSON_TYPE}
            return sent, client.request(sent.method, sent.path, content=sent.body, headers=headers)

        with ThreadPoolExecutor(8) as pool:
            talks = list(pool.map(send, requests))
    return Session(server, document, talks, (before, (server.process.pid, server.engine_pid())))


def told(sent: Sent, answer: httpx.Response) -> str:
    body = (sent.body or b"").decode(errors="replace")
    return f"{sent.method} {sent.path} {sent.field} {body}\n{answer.status_code} {answer.text}"


def test_thousands_of_different_requests_reach_every_route_and_field(session: Session) -> None:
    print(f"{len(session.talks)} requests, {dict(Counter(answer.status_code for _, answer in session.talks))}")
    assert len({sent for sent, _ in session.talks}) >= AT_LEAST
    document = session.document
    routes = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert {(sent.method, sent.path) for sent, _ in session.talks} == routes
    taken = {(sent.path, sent.field) for sent, answer in session.talks if answer.status_code == 200}
    refused = {(sent.path, sent.field) for sent, _ in session.refused()}
    for path in RIGHT:
        schema = document["paths"][path]["post"]["requestBody"]["content"][JSON_TYPE]["schema"]
        fields = {(path, field) for field in schema["properties"]}
        assert fields <= taken and fields <= refused | ANYTHING, (fields - taken, fields - refused)


def test_no_request_is_the_servers_failure(session: Session) -> None:
    """Answers are a success, a wrong request, or an unknown model."""
    for sent, answer in session.talks:
        assert answer.status_code in (200, 400, 404), told(sent, answer)


def test_each_answer_is_as_the_document_says(session: Session) -> None:
    """Its status, its media type, and its body: what is listed as required is there, and nothing that is not listed."""
    answers = Answers(session.document)
    wrong = [f"{told(sent, answer)}\n{fault}" for sent, answer in session.talks if (fault := answers.fault(sent, answer))]
    assert not wrong, "\n\n".join(wrong[:5])
    assert {(sent.path, answer.status_code) for sent, answer in session.talks} >= {
        (path, 200)
        for path in session.document["paths"]
        if "{" not in path  # nobody knows an id
    }


def test_each_refusal_has_the_standard_form_and_tells_nothing_of_the_machine(session: Session) -> None:
    assert session.refused()
    for sent, answer in session.refused():
        error = standard_error(answer)
        assert error is not None and isinstance(error["message"], str) and isinstance(error["type"], str), told(sent, answer)
        assert error["param"] is None or isinstance(error["param"], str), told(sent, answer)
        assert not LEAKS.search(answer.text), told(sent, answer)


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


def test_the_processes_are_those_that_began_and_serve_the_next_request(session: Session, wait_until: Callable[..., None]) -> None:
    before, after = session.pids
    assert before == after
    assert httpx.get(f"{session.server.url}/health").status_code == 200
    answer = httpx.post(f"{session.server.url}/v1/chat/completions", json=CHAT | {"temperature": 0}, timeout=60)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"], answer.text
    for kind in ("running", "waiting"):
        wait_until(lambda kind=kind: session.server.metric(f"vllm:num_requests_{kind}") == 0)


def test_the_log_holds_no_traceback_and_no_error(session: Session) -> None:
    assert not [line for line in session.server.lines if "Traceback" in line or " ERROR " in line]
