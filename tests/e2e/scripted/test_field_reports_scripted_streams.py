"""What operators report of streams, stop strings, characters and log probabilities (rows B03 to B07, B16 to B23), over HTTP."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import openai
import pytest

from tests.e2e.chat_answers import Told, stream_events, told_both, told_stream

Server = Any
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROUTES = (COMPLETIONS, CHAT)
LONG = {"max_model_len": 4096}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(start_scripted: Callable[..., Server]) -> Server:
    """With parsers: what streams do must not depend on them."""
    return start_scripted(info=LONG, tool_call_parser="hermes", enable_auto_tool_choice=True, reasoning_parser="qwen3")


@pytest.fixture
def own(server: Server) -> Iterator[Server]:
    """The same server; when a test is over, its engine neither fails nor waits."""
    yield server
    server.model.fails = {}
    server.model.allow(None)


def answering(server: Server, route: str, answer: str | list[int]) -> dict[str, Any]:
    """A request that is answered so."""
    if route == CHAT:
        return {"messages": server.say_chat("answering", answer)}
    assert isinstance(answer, str)
    return {"prompt": server.say("answering", answer), "max_tokens": 200}


def texts(route: str, events: list[str]) -> list[str]:
    """The text of each chunk that has any."""
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    found = [choice["delta"].get("content", "") if route == CHAT else choice["text"] for choice in choices]
    return [text for text in found if text]


def whole_text(route: str, answer: Any) -> str:
    choice = answer.json()["choices"][0]
    text: str = choice["message"]["content"] if route == CHAT else choice["text"]
    return text


# --- how streams end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}, {"logprobs": True}, {"n": 3}, {"stop": ["b"]}], ids=str)
def test_b03_the_chunk_that_finishes_holds_no_text(server: Server, fields: dict[str, Any]) -> None:
    """`told_both` looks at the order of chat streams; here are the texts, and the other route."""
    body = {"messages": [{"role": "user", "content": "b03"}], "max_tokens": 10, "seed": 1} | fields
    assert all(told.finish_reason in ("length", "stop") for told in told_both(partial(server.post, CHAT), body))
    fields = {name: 1 if name == "logprobs" else value for name, value in fields.items() if name != "tools"}
    body = {"prompt": "b03", "max_tokens": 10, "seed": 1} | fields
    whole = server.post(COMPLETIONS, body).json()["choices"]
    choices = [
        c for event in stream_events(server.post(COMPLETIONS, body | {"stream": True})) for c in json.loads(event)["choices"]
    ]
    for choice in whole:
        *pieces, last = [c for c in choices if c["index"] == choice["index"]]
        assert last["text"] == "" and last["logprobs"] is None and last["finish_reason"] == choice["finish_reason"]
        assert all(c["finish_reason"] is None for c in pieces) and "".join(c["text"] for c in pieces) == choice["text"]


def test_b04_two_hundred_streams_have_one_finish_reason_each(server: Server) -> None:
    """Ended by the model, a stop string, a stop token, the limit or a call, with tools and without; `told_stream` counts."""
    causes: dict[str, tuple[str, dict[str, Any]]] = {
        "end": ("some words", {}),
        "string": ("some words", {"stop": ["wor"]}),
        "token": ("some words", {"stop_token_ids": server.tokens("w", special=False)}),
        "limit": ("some words", {"max_tokens": 4}),
        "call": (f"Now. {CALL}", {"tools": TOOLS}),
        "cut call": (f"Now. {CALL}", {"tools": TOOLS, "max_tokens": 30}),
        "thought": ("<think>\nHm.\n</think>\nWell.", {}),
        "only a thought": ("<think>\nHm.", {"tools": TOOLS}),
    }
    reasons = {}
    for cause, (text, fields) in causes.items():
        for n in (1, 2, 9, 13):
            body = {"messages": server.say_chat(cause, text), "n": n, "stream": True} | fields
            told = told_stream(server.post(CHAT, body))
            assert len(told) == n and all(one == told[0] for one in told)
            reasons[cause] = told[0].finish_reason
    assert reasons == {
        **dict.fromkeys(("end", "string", "token", "thought", "only a thought"), "stop"),
        **dict.fromkeys(("limit", "cut call"), "length"),
        "call": "tool_calls",
    }


ASKING: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, {"prompt": "b05", "max_tokens": 40}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "b05"}], "max_tokens": 40}),
    "tools": (CHAT, {"messages": [{"role": "user", "content": "b05"}], "max_tokens": 40, "tools": TOOLS}),
    "several": (CHAT, {"messages": [{"role": "user", "content": "b05"}], "max_tokens": 40, "n": 3}),
    "json": (COMPLETIONS, {"prompt": "b05", "max_tokens": 40, "structured_outputs": {"json_object": True}}),
}
asking = pytest.mark.parametrize(("route", "body"), ASKING.values(), ids=ASKING)


@asking
def test_b05_a_failure_in_mid_stream_is_an_event(
    own: Server, caplog: pytest.LogCaptureFixture, route: str, body: dict[str, Any]
) -> None:
    """Then comes [DONE], and the log has one line with the request's id and the cause."""
    own.model.fails = {3: "the grammar broke"}
    answer = own.post(route, body | {"stream": True}, headers={"x-request-id": "unlucky"})
    events = [part.removeprefix("data: ") for part in answer.text.strip().split("\n\n")]
    assert answer.status_code == 200 and events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["message"] == "the grammar broke"
    assert not any(choice["finish_reason"] for event in events[:-2] for choice in json.loads(event)["choices"])
    lines = [r.getMessage() for r in caplog.records if "unlucky" in r.getMessage() and r.levelno == logging.ERROR]
    assert len(lines) == 1 and "the grammar broke" in lines[0]


@asking
@pytest.mark.parametrize("stream", [False, True])
def test_b06_a_failure_before_the_first_token_is_a_status(own: Server, route: str, body: dict[str, Any], stream: bool) -> None:
    own.model.fails = {0: "no first token"}
    answer = own.post(route, body | {"stream": stream})
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "no first token"
    own.model.fails = {}
    assert own.post(route, body | {"stream": stream}).status_code == 200


WRONG: list[tuple[str, Any]] = [
    ("temperature", 9), ("n", 0), ("max_tokens", 0), ("stop", ["a"] * 5), ("logit_bias", {"x": 1}),
    ("response_format", {"type": "no"}), ("structured_outputs", {"regex": "("}), ("truncate_prompt_tokens", -2),
    ("structured_outputs", {"json": {"type": "str"}}),
]  # fmt: skip
WRONG_IN_CHAT: list[tuple[str, Any]] = [
    ("tools", []), ("tool_choice", "required"), ("messages", [{"role": "user", "content": 5}]), ("chat_template", "{{ 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("route", "field", "value"),
    [(route, *wrong) for route in ROUTES for wrong in WRONG] + [(CHAT, *wrong) for wrong in WRONG_IN_CHAT],
)
def test_b07_wrong_requests_for_streams_are_refused_with_a_status(server: Server, route: str, field: str, value: Any) -> None:
    body = answering(server, route, "x") | {field: value}
    refused = [server.post(route, body | {"stream": stream}) for stream in (True, False)]
    assert [answer.status_code for answer in refused] == [400, 400] and refused[0].json() == refused[1].json()
    assert field in refused[0].json()["error"]["param"]


def test_b07_the_client_of_openai_raises_before_it_iterates(server: Server) -> None:
    create: Any = server.client().chat.completions.create
    with pytest.raises(openai.BadRequestError):
        create(model="scripted", messages=[{"role": "user", "content": "x"}], temperature=9, stream=True)


# --- stop strings and characters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}], ids=["plain", "tools"])
def test_b16_a_stop_string_delays_no_text_that_cannot_begin_it(own: Server, route: str, fields: dict[str, Any]) -> None:
    """The engine is let go one token at a time: each must be told before the next exists."""
    text = "Hello,world"
    body = answering(own, route, text) | {"stop": ["zzzzzzzzzzzz", "dzz"], "stream": True} | (fields if route == CHAT else {})
    own.model.hold()
    own.model.allow(1)
    with own.http.stream("POST", route, json=body) as stream:
        lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {"))
        for letter in text[:-1]:  # "d" may begin a stop string
            assert next(found for line in lines if (found := texts(route, [line]))) == [letter]
            own.model.allow(1)
        own.model.allow(None)
        assert [found for line in lines for found in texts(route, [line])] == ["d"]


@pytest.mark.parametrize("tokens", [(), ("<think>", "</think>", "<tool_call>", "</tool_call>")], ids=["spelled", "tokens"])
def test_b17_marks_are_not_split_by_stop_strings(start_scripted: Callable[..., Server], tokens: tuple[str, ...]) -> None:
    server = start_scripted(
        info=LONG, marks=tokens, tool_call_parser="hermes", enable_auto_tool_choice=True, reasoning_parser="qwen3"
    )
    messages = server.say_chat("b17", f"<think>x</think>ab,d {CALL}")
    for stop in ("b,c", "ink>!", "</think>!", "</tool_call>?", "call>\n\n\n", "a</"):
        (told,) = told_both(partial(server.post, CHAT), {"messages": messages, "tools": TOOLS, "stop": [stop]})
        assert told == Told("ab,d", "x", [("f", '{"a": 1}')], "tool_calls"), stop
    server.stop()


EMOJI = "👋🏽 ďábel 漢"


@pytest.mark.parametrize("route", ROUTES)
def test_b18_characters_come_whole(server: Server, route: str) -> None:
    """Eight streams at once of one byte per token; only an answer that is cut inside a character ends with a replacement."""
    body = answering(server, route, EMOJI)
    events = stream_events(server.post(route, body | {"n": 8, "stream": True}))
    assert not any("\ufffd" in text for text in texts(route, events))
    for index in range(8):
        own = [e for e in events if json.loads(e)["choices"][0]["index"] == index]
        assert "".join(texts(route, own)) == EMOJI
    size = len(EMOJI.encode())
    for limit in range(1, size):
        cut = body | {"max_tokens": limit}
        text = whole_text(route, server.post(route, cut))
        assert "".join(texts(route, stream_events(server.post(route, cut | {"stream": True})))) == text
        complete = EMOJI.encode()[:limit].decode(errors="ignore")
        is_cut = len(complete.encode()) < limit
        assert text.rstrip("\ufffd") == complete and text.endswith("\ufffd") == is_cut


# --- log probabilities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_b19_pieces_of_characters_have_their_bytes_or_their_ids(server: Server, route: str, as_ids: bool) -> None:
    """Completions have no place for bytes: there, ids tell pieces apart whose texts are alike."""
    asked = {"logprobs": True, "top_logprobs": 5} if route == CHAT else {"logprobs": 5}
    body = answering(server, route, "é漢") | asked | {"return_tokens_as_token_ids": as_ids}
    logprobs = server.post(route, body).json()["choices"][0]["logprobs"]
    ids = server.tokens("é漢", special=False)
    if route == CHAT:
        entries = logprobs["content"][: len(ids)]
        assert bytes(b for entry in entries for b in entry["bytes"]).decode() == "é漢"
        assert all(len(entry["top_logprobs"]) == 5 and all(top["bytes"] for top in entry["top_logprobs"]) for entry in entries)
        names = [entry["token"] for entry in entries]
    else:
        names = logprobs["tokens"][: len(ids)]
        assert all(top[name] == -0.5 for name, top in zip(names, logprobs["top_logprobs"], strict=False))
    if as_ids:
        assert names == [f"token_id:{token}" for token in ids]
        assert route == CHAT or all(len(top) == 5 for top in logprobs["top_logprobs"])


@pytest.mark.parametrize("route", ROUTES)
def test_b20_minus_infinity_is_a_number_of_json(server: Server, route: str) -> None:
    """-9999.0, whole and streamed. The script's last candidate has no chance at all."""
    asked = {"logprobs": True, "top_logprobs": 3} if route == CHAT else {"logprobs": 3}
    body = answering(server, route, "ab") | asked
    for answer in (server.post(route, body), server.post(route, body | {"stream": True})):
        assert answer.status_code == 200 and "-9999.0" in answer.text
        assert "Infinity" not in answer.text and "NaN" not in answer.text


def echoed(server: Server, prompt: str, max_tokens: int, stream: bool) -> dict[str, Any]:
    """The one choice of an echoing completion; pieces of a stream put together."""
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    if not stream:
        choice: dict[str, Any] = server.post(COMPLETIONS, body).json()["choices"][0]
        return choice
    chunks = [json.loads(event)["choices"][0] for event in stream_events(server.post(COMPLETIONS, body | {"stream": True}))]
    fields = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    logprobs = {name: [x for chunk in chunks if chunk["logprobs"] for x in chunk["logprobs"][name]] for name in fields}
    return {"text": "".join(chunk["text"] for chunk in chunks), "logprobs": logprobs}


PROMPTS = ["\n1. Carol has 20", "Grüße", "two <|end|> marks", "\n\n\n"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_b21_offsets_are_those_of_the_text(server: Server, prompt: str) -> None:
    whole, streamed = (echoed(server, prompt, 5, stream) for stream in (False, True))
    assert whole["logprobs"] == streamed["logprobs"] and whole["text"] == streamed["text"]
    for offset, token in zip(whole["logprobs"]["text_offset"], whole["logprobs"]["tokens"], strict=True):
        assert whole["text"][offset:].startswith(token)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("stream", [False, True])
def test_b22_tokens_join_to_the_text(server: Server, prompt: str, stream: bool) -> None:
    choice = echoed(server, prompt, 3, stream)
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] and choice["text"].startswith(prompt)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_b23_an_echoed_prompt_has_its_log_probabilities(server: Server, max_tokens: int, stream: bool) -> None:
    for prompt in PROMPTS:
        logprobs = echoed(server, prompt, max_tokens, stream)["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(server.tokens(prompt)) + max_tokens
        assert logprobs["token_logprobs"][0] is None and all(value is not None for value in logprobs["token_logprobs"][1:])
