"""/v1/responses over HTTP, around a scripted model: items and streams, fields and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.e2e.responses_told import both, check_response, plain, streamed
from tests.e2e.scripted.test_field_reports_scripted_tools import CASES, PARSERS, is_complete, wanted_tokens

Server = Any
PATH = "/v1/responses"
LONG = {"max_model_len": 4096}
THOUGHT = "<think>\nA call is due.\n</think>\n\n"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CLOCK: dict[str, Any] = {"type": "function", "name": "clock", "description": "Tells the time.", "parameters": None}
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(info=LONG, tool_call_parser="hermes", enable_auto_tool_choice=True, reasoning_parser="qwen3")


@pytest.fixture
def own(server: Server) -> Iterator[Server]:
    """The same server; when a test is over, its engine neither fails nor waits."""
    yield server
    server.model.fails = {}
    server.model.allow(None)


def ask(server: Server, answer: str | list[int], **fields: Any) -> dict[str, Any]:
    """The response when the model answers so, whole and streamed alike."""
    server.say_chat("?", answer)
    return both(partial(server.post, PATH), {"input": "?"} | fields)


def error_of(server: Server, status: int = 400, **fields: Any) -> tuple[str, str]:
    """(param, message) of a refusal, which is the same for a stream."""
    told = []
    for stream in (False, True):
        answer = server.post(PATH, {"input": "?", "stream": stream} | fields)
        assert answer.status_code == status, answer.text
        told.append((answer.json()["error"]["param"], answer.json()["error"]["message"]))
    assert told[0] == told[1]
    return told[0]


# --- what is told of an answer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "output"),
    [
        ("Hello.", [("message", "Hello.")]),
        ("", [("message", "")]),
        ("\n", [("message", "\n")]),
        (THOUGHT + "Hello.", [("reasoning", "A call is due."), ("message", "Hello.")]),
        (THOUGHT + OSLO, [("reasoning", "A call is due."), ("call", "weather", '{"city": "Oslo"}')]),
        (OSLO + "\n" + TIME, [("call", "weather", '{"city": "Oslo"}'), ("call", "clock", "{}")]),
        (f"Look. {TIME}", [("message", "Look. "), ("call", "clock", "{}")]),
        (f"{TIME}\n Done.", [("call", "clock", "{}"), ("message", "Done.")]),
        (f"{THOUGHT} \n{OSLO}", [("reasoning", "A call is due."), ("call", "weather", '{"city": "Oslo"}')]),
    ],
)
def test_items_of_an_answer(server: Server, answer: str, output: list[tuple[str, ...]]) -> None:
    told = ask(server, answer, tools=[WEATHER, CLOCK])
    found = [(kind, *(text.strip(" ") for text in texts)) for kind, *texts in plain(told["output"])]
    assert found == [(kind, *(text.strip(" ") for text in texts)) for kind, *texts in output]
    assert told["status"] == "completed" and told["error"] is None and told["incomplete_details"] is None
    usage = told["usage"]
    assert usage["output_tokens"] == len(answer) + 1 and usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert (usage["output_tokens_details"]["reasoning_tokens"] > 0) == ("<think>" in answer)


def test_the_events_of_a_stream_in_their_order(server: Server) -> None:
    server.say_chat("?", THOUGHT + "Hi" + OSLO)
    types = streamed(server.post(PATH, {"input": "?", "tools": [WEATHER], "stream": True})).types
    runs = [kind for index, kind in enumerate(types) if types[index - 1] != kind or index == 0]
    assert runs == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]


def test_b01_what_max_output_tokens_cuts_is_incomplete(server: Server) -> None:
    """At every token of a thought, a text and a call; whole and streamed alike."""
    answer = f"<think>\nHm.\n</think>\n\nLook. {OSLO}"
    for limit in range(1, len(answer) + 1, 3):
        told = ask(server, answer, tools=[WEATHER], max_output_tokens=limit)
        assert told["status"] == "incomplete" and told["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in told["output"][:-1]] == ["completed"] * (len(told["output"]) - 1)
        assert told["usage"]["output_tokens"] == limit == told["max_output_tokens"]
        assert told["output"][-1]["status"] == "incomplete"
    assert ask(server, answer, tools=[WEATHER], max_output_tokens=len(answer) + 1)["status"] == "completed"


@pytest.mark.parametrize("parser", PARSERS)
def test_b09_calls_of_every_parser(start_scripted: Callable[..., Server], parser: str) -> None:
    server = start_scripted(info=LONG, marks=wanted_tokens(parser), tool_call_parser=parser, enable_auto_tool_choice=True)
    for case in [case for name, case in CASES if name == parser and is_complete(case)]:
        tools = [{"type": "function", "name": t.name, "parameters": dict(t.parameters), "strict": t.strict} for t in case.tools]
        told = ask(server, case.text, tools=tools or [CLOCK])
        calls = [item for item in told["output"] if item["type"] == "function_call"]
        assert [(call["name"], call["arguments"]) for call in calls] == list(case.calls), case.name
        assert len({call["call_id"] for call in calls}) == len(calls)
    server.stop()


def test_log_probabilities_are_those_of_the_text(server: Server) -> None:
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    for answer in ("Hey!", f"{THOUGHT}Hey!", f"Hey! {OSLO}", f"<think>Hey</think>Hey!{OSLO}"):
        told = ask(server, answer, tools=[WEATHER], **wanted)
        (message,) = [item for item in told["output"] if item["type"] == "message"]
        logprobs = message["content"][0]["logprobs"]
        assert "".join(token["token"] for token in logprobs) == message["content"][0]["text"]
        assert all(token["logprob"] == -0.5 and len(token["top_logprobs"]) == 2 for token in logprobs)
    assert ask(server, "Hey!")["output"][0]["content"][0]["logprobs"] == []
    assert error_of(server, top_logprobs=2)[0] == "top_logprobs"


def test_hidden_thoughts_are_only_hidden(server: Server) -> None:
    wanted = {"include": ["message.output_text.logprobs"], "include_reasoning": False}
    told = ask(server, THOUGHT + "Hello.", **wanted)
    assert plain(told["output"]) == [("message", "Hello.")] and told["output"][0]["content"][0]["logprobs"] == []
    assert told["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_fields_are_said_again(server: Server) -> None:
    said = {
        "instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 5, "parallel_tool_calls": False, "user": "me",
        "tools": [WEATHER], "tool_choice": "none", "temperature": 0.5, "top_p": 0.9, "truncation": "auto", "max_tool_calls": 3,
        "prompt_cache_key": "k", "safety_identifier": "s", "text": {"format": {"type": "text"}, "verbosity": "high"},
    }  # fmt: skip
    without_effect = {
        "reasoning": {"effort": "low", "summary": "auto"}, "service_tier": "auto", "include": ["reasoning.encrypted_content"],
        "session_id": "s", "prompt_cache_retention": "in_memory", "stream_options": {"include_obfuscation": False}, "unknown": 1,
    }  # fmt: skip
    told = check_response(server.post(PATH, {"input": "?"} | said | without_effect).json())
    assert {name: told[name] for name in said} == said
    assert told["reasoning"] == {"effort": "low", "summary": None} and told["service_tier"] == "default"
    plainly = check_response(server.post(PATH, {"input": "?", "max_output_tokens": 1}).json())
    assert (plainly["tool_choice"], plainly["tools"], plainly["truncation"]) == ("auto", [], "disabled")
    assert plainly["id"].startswith("resp_") and plainly["background"] is False and plainly["temperature"] == 1.0


def test_sampling_fields_reach_the_engine(server: Server) -> None:
    fields = {
        "temperature": 0.7, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "repetition_penalty": 1.2, "seed": 7, "min_tokens": 2, "ignore_eos": True, "logit_bias": {"5": 1.0},
        "stop": ["zz"], "stop_token_ids": [9], "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    assert server.post(PATH, {"input": "?", "max_output_tokens": 2, "priority": 3, "cache_salt": "s"} | fields).status_code == 200
    request = server.model.requests[-1]
    assert (request.max_tokens, request.priority, request.cache_salt) == (2, 3, "s")
    for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"):
        assert getattr(request.sampling, name) == fields[name], name


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text": {"format": {"type": "json_object"}}}, "%json"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"properties": {"qz": {}}}, "strict": True}}}, "qz"),
        ({"structured_outputs": {"choice": ["qza", "qzb"]}}, "qza"),
        ({"tools": [WEATHER, CLOCK], "tool_choice": "required"}, "clock"),
        ({"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "name": "weather"}}, "weather"),
        (
            {
                "tools": [WEATHER, CLOCK],
                "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]},
            },
            "clock",
        ),
    ],
)
def test_structure_and_choices_become_grammars(server: Server, fields: dict[str, Any], words: str) -> None:
    assert server.post(PATH, {"input": "?", "max_output_tokens": 3} | fields).status_code == 200
    grammar = server.model.requests[-1].constraint.grammar
    assert words in grammar
    if "tool_choice" in fields:
        assert ("clock" in grammar) == (fields["tool_choice"] != {"type": "function", "name": "weather"})
        assert ("weather" in grammar) == (words != "clock" or fields["tool_choice"] == "required")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": kind}]}, "tools", kind)
    for kind in (
        "web_search",
        "file_search",
        "code_interpreter",
        "mcp",
        "computer_use_preview",
        "local_shell",
        "functions",
    )
]
REFUSED += [
    ({"tools": [{"type": "custom"}]}, "tools", "tools[0].function.name"),
    ({"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]}, "tools", "grammar"),
    ({"tools": [{"type": "custom", "name": "x", "format": {"type": "xml"}}]}, "tools", "'xml'"),
    ({"tools": [{"type": []}]}, "tools", "tools[0].type"),
    (
        {"tools": [{"type": "namespace", "name": "x", "description": 5, "tools": [WEATHER]}]},
        "tools",
        "description must be a text",
    ),
    (
        {"tools": [{"type": "namespace", "name": "x", "description": "y", "tools": [WEATHER | {"description": [5]}]}]},
        "tools",
        "description must be a text",
    ),
    ({"tools": [{"type": "namespace"}]}, "tools", "tools[0].name"),
    ({"tools": [{"type": "namespace", "name": "x", "tools": {}}]}, "tools", "tools[0].tools"),
    ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "mcp"}]}]}, "tools", "tools[0].tools[0].type"),
    ({"tools": [{"type": "namespace", "name": "x", "tools": [WEATHER]}, WEATHER | {"name": "x__weather"}]}, "tools", "two tools"),
    ({"tools": [WEATHER, {"type": "mcp"}], "tool_choice": {"type": "mcp"}}, "tool_choice", "allowed_tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "in the tool itself"),
    ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice", "allowed_tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice", "weather"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"max_output_tokens": 5000}, "max_output_tokens", "max_output_tokens=5000"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must"),
    ({"max_tokens": 5}, "max_tokens", "called max_output_tokens here"),
    ({"messages": []}, "messages", "called input here"),
    ({"response_format": {"type": "text"}}, "response_format", "text.format"),
    ({"n": 2}, "n", "no field of responses"),
    ({"text": {"format": {"type": "structural_tag"}}}, "text.format", "json_schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "str"}}}}, "text.format", "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema"),
    ({"text": {"verbosity": "terse"}}, "body.text", "verbosity"),
    ({"verbosity": "low"}, "verbosity", "called text.verbosity here"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "auto"),
    ({"reasoning": {"effort": "huge"}}, "body.reasoning", "effort"),
    ({"conversation": "conv_1"}, "conversation", "not supported"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "not supported"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", "in_memory"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options", "not supported"),
    ({"previous_input_messages": [{"role": "user"}]}, "previous_input_messages", "not supported"),
    ({"service_tier": "flex"}, "body.service_tier", "default"),
    ({"metadata": {str(i): "" for i in range(17)}}, "body.metadata", "16"),
    ({"metadata": {"k" * 65: ""}}, "body.metadata", "64"),
    ({"metadata": {"k": "v" * 513}}, "body.metadata", "512"),
    ({"metadata": {"k": 1}}, "body.metadata", "string"),
    ({"safety_identifier": "x" * 65}, "body.safety_identifier", "64"),
    ({"include": ["everything"]}, "body.include", "input"),
    ({"chat_template": "{{ messages }}"}, "chat_template", "--trust-request-chat-template"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", "chat_template"),
    ({"background": True, "store": False}, "background", "store"),
    ({"input": []}, "body.input", "1"),
    ({"input": ""}, "body.input", "1"),
    ({"input": "x" * 100_000}, "input_text", "characters"),
]
IMAGE = {"type": "input_image", "image_url": "http://127.0.0.1:9/a.png"}
REFUSED += [
    ({"input": [item]}, "input", words)
    for item, words in [
        ({"type": "computer_call"}, "computer_call"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f", "arguments": ""}, "input[0].input"),
        ({"type": "custom_tool_call_output", "call_id": "c", "output": "x"}, "no custom_tool_call"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "", "namespace": 5}, "namespace"),
        ({"type": 5}, "int"),
        ({"role": "user", "content": [IMAGE]}, "input_image"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "input_file"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input_audio"),
        ({"role": "user", "content": 5}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "needs a text"),
        ({"role": "tool", "content": "x"}, "role"),
        ({"role": "user", "content": "x", "id": "a b"}, "id"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "arguments"),
        ({"type": "function_call", "call_id": "c", "name": "", "arguments": ""}, "name"),
        ({"type": "function_call_output", "call_id": "c", "output": "x"}, "no function_call"),
        ({"type": "function_call_output", "call_id": "c", "output": [IMAGE]}, "input_image"),
        ({"type": "function_call_output", "call_id": "c", "output": {"a": 1}}, "output"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}, "encrypted_content"),
        ({"type": "reasoning", "summary": "x", "content": [{"type": "text", "text": "x"}]}, "reasoning_text"),
        ({}, "input[0].id"),
    ]
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[f"{i}-{param}" for i, (_, param, _) in enumerate(REFUSED)])
def test_refused_by_name(server: Server, fields: dict[str, Any], param: str, words: str) -> None:
    found, message = error_of(server, **fields)
    assert found == param and words in message


# --- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_b06_a_failure_before_the_first_token_is_a_status(own: Server, stream: bool) -> None:
    own.model.fails = {0: "no first token"}
    answer = own.post(PATH, {"input": "b06", "stream": stream})
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "no first token"
    own.model.fails = {}
    assert own.post(PATH, {"input": "b06", "stream": stream, "max_output_tokens": 1}).status_code == 200


def test_b05_a_failure_in_mid_stream_is_an_event(own: Server, caplog: pytest.LogCaptureFixture) -> None:
    """First `error`, then `response.failed` with what there was; the official client raises neither, and sees both."""
    own.model.fails = {3: "the grammar broke at /tmp/x"}
    answer = own.post(PATH, {"input": "b05", "stream": True}, headers={"x-request-id": "unlucky"})
    told = streamed(answer)
    assert told.types[-4:] == ["content_part.done", "output_item.done", "error", "failed"]
    assert "the grammar broke" in told.events[-2]["message"] and "/tmp" not in answer.text
    assert told.response["status"] == "failed" and told.response["error"]["code"] == "server_error"
    assert plain(told.response["output"])[0][-1] == "incomplete"
    lines = [r.getMessage() for r in caplog.records if "unlucky" in r.getMessage()]
    assert len(lines) == 1 and "the grammar broke" in lines[0]
    events = list(own.client().responses.create(model="scripted", input="b05", stream=True))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert own.get(f"{PATH}/{told.response['id']}").json()["status"] == "failed"


def test_the_official_client_puts_a_stream_together(server: Server) -> None:
    server.say_chat("?", THOUGHT + f"Look. {OSLO}")
    client = server.client()
    fields: dict[str, Any] = {"model": "scripted", "input": "?", "tools": [WEATHER]}
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_response()
    whole = client.responses.create(**fields)
    assert kinds[-1] == "response.completed" and last.output_text == whole.output_text == "Look."
    assert [item.type for item in last.output] == ["reasoning", "message", "function_call"]
    assert client.responses.retrieve(last.id).output[2].call_id == last.output[2].call_id
