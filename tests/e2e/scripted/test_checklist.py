"""The conformance checklist of the served routes, item by item, in a context of 64 tokens. Numbers are the checklist's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.chat_answers import stream_events

Server = Any
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROUTES = (COMPLETIONS, CHAT)
HI = {"messages": [{"role": "user", "content": "Hi"}]}


def prompt_of(server: Server, route: str, count: int) -> dict[str, Any]:
    """A request whose prompt has this many tokens."""
    if route == COMPLETIONS:
        return {"prompt": [5] * count}
    around = len(server.tokens("<|start|>user\n<|end|>\n<|start|>assistant\n", special=False))
    return {"messages": [{"role": "user", "content": "a" * (count - around)}]}


def refusal(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == 400
    return error


@pytest.mark.parametrize("route", ROUTES)
def test_checklist_01_what_is_left_of_the_context_bounds_the_answer(shared: Server, route: str) -> None:
    answer = shared.post(route, prompt_of(shared, route, 60) | {"max_tokens": 30}).json()
    assert answer["usage"]["completion_tokens"] == 4 and answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("route", "field"), [(COMPLETIONS, "max_tokens"), (CHAT, "max_tokens"), (CHAT, "max_completion_tokens")])
def test_checklist_02_more_than_the_context_is_refused(shared: Server, route: str, field: str) -> None:
    error = refusal(shared.post(route, prompt_of(shared, route, 40) | {field: 65}))
    assert error["param"] == field and "64" in error["message"]
    assert shared.post(route, prompt_of(shared, route, 40) | {field: 64}).status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_checklist_03_a_prompt_that_fills_the_context_leaves_no_token(shared: Server, route: str) -> None:
    for fields in ({}, {"max_tokens": 1}):
        assert "64" in refusal(shared.post(route, prompt_of(shared, route, 64) | fields))["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_checklist_04_a_longer_prompt_is_named(shared: Server, route: str) -> None:
    error = refusal(shared.post(route, prompt_of(shared, route, 65)))
    assert error["param"] == "input_tokens" and "65" in error["message"] and "64" in error["message"]


def test_checklist_05_completions_have_sixteen_tokens_by_default(shared: Server) -> None:
    for fields in ({}, {"max_tokens": None}):
        assert shared.post(COMPLETIONS, {"prompt": "x"} | fields).json()["usage"]["completion_tokens"] == 16


def test_checklist_06_echo_alone_returns_the_prompt(shared: Server) -> None:
    """One token is made, and counted, that is not shown."""
    body = {"prompt": "Carol has", "echo": True, "max_tokens": 0}
    answer = shared.post(COMPLETIONS, body).json()
    assert answer["choices"][0]["text"] == "Carol has" and answer["usage"]["completion_tokens"] == 1
    events = stream_events(shared.post(COMPLETIONS, body | {"stream": True}))
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "Carol has"


PREFLIGHT = {"access-control-request-method": "POST"}


def test_checklist_07_other_origins_are_shut_out_unless_they_are_listed(
    shared: Server, start_scripted: Callable[..., Server]
) -> None:
    origin = {"origin": "http://x"}
    assert "access-control-allow-origin" not in shared.get("/v1/models", headers=origin).headers
    refused = shared.http.options(COMPLETIONS, headers=origin | PREFLIGHT)
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
    listing = start_scripted(allowed_origins=("http://x",))
    for answer in (listing.get("/v1/models", headers=origin), listing.http.options(COMPLETIONS, headers=origin | PREFLIGHT)):
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "http://x"
    listing.stop()


def test_checklist_08_a_key_locks_every_route_but_those_of_operators(start_scripted: Callable[..., Server]) -> None:
    """Here /tokenize is locked too, and the answer is the standard error."""
    locked = start_scripted(api_keys=("k",))
    key = {"authorization": "Bearer k"}
    assert locked.get("/v1/models").status_code == 401 and locked.get("/v1/models", headers=key).status_code == 200
    for path, body in ((CHAT, HI), (COMPLETIONS, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        refused = locked.post(path, body)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == 401
        assert locked.post(path, body, headers=key).status_code == 200
    assert locked.get("/metrics").status_code == locked.get("/health").status_code == 200
    locked.stop()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("param", "fields"),
    [("stop", {"stop": ["a"] * 5}), ("n", {"n": 2, "temperature": 0}), ("temperature", {"temperature": 2.1})],
)
def test_checklist_09_values_out_of_range_are_refused(shared: Server, route: str, param: str, fields: dict[str, Any]) -> None:
    assert refusal(shared.post(route, prompt_of(shared, route, 40) | fields))["param"] == param


@pytest.mark.parametrize("route", [*ROUTES, "/tokenize", "/detokenize"])
def test_checklist_09_other_media_types_are_refused(shared: Server, route: str) -> None:
    refusal(shared.http.post(route, content=b'{"prompt": "x"}', headers={"content-type": "text/plain"}))


def test_checklist_09_top_logprobs_need_logprobs(shared: Server) -> None:
    assert refusal(shared.post(CHAT, HI | {"top_logprobs": 2}))["param"] == "top_logprobs"


@pytest.mark.parametrize("route", ROUTES)
def test_checklist_10_unknown_fields_pass_and_earlier_names_count(
    shared: Server, caplog: pytest.LogCaptureFixture, route: str
) -> None:
    """guided_json is what structured_outputs.json is, with one line of warning: a schema is never dropped in silence."""
    body = prompt_of(shared, route, 40)
    assert shared.post(route, body | {"foo": 1}).status_code == 200
    assert shared.model.requests[-1].constraint is None
    caplog.clear()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert shared.post(route, body | {"guided_json": schema}).status_code == 200
    earlier = shared.model.requests[-1].constraint.grammar
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "guided_json" in warnings[0] and "structured_outputs" in warnings[0]
    assert shared.post(route, body | {"structured_outputs": {"json": schema}}).status_code == 200
    assert shared.model.requests[-1].constraint.grammar == earlier
    assert refusal(shared.post(route, body | {"guided_json": {"type": "str"}}))["param"] == "guided_json"


def test_checklist_11_the_order_of_a_stream(shared: Server) -> None:
    chunks = [json.loads(event) for event in stream_events(shared.post(CHAT, HI | {"stream": True, "max_tokens": 3}))]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
    body = HI | {"stream": True, "max_tokens": 3, "stream_options": {"include_usage": True}}
    *chunks, last = [json.loads(event) for event in stream_events(shared.post(CHAT, body))]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 3
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
