"""/v1/messages over HTTP, with answers that are known to the letter: blocks, reasons, usage, errors, the official client.

Rows of the field reports that concern tools and streams hold here as they do for chat: their tests are named after them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.lib.streaming._messages import accumulate_event

from tests.e2e import coding_agent
from tests.e2e.error_shapes import standard_error
from tests.e2e.message_answers import ToldMessage, named_events, told_both, told_stream, told_whole

Server = Any
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
LONG = {"max_model_len": 4096}
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
WEATHER: dict[str, Any] = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CLOCK: dict[str, Any] = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
NAMED = {"type": "tool", "name": "weather"}
# Shows all that a template is given, so that prompts can be compared with what was asked.
SHOWS_ALL = (
    "{% for m in messages %}{{ m | tojson }}\n{% endfor %}{{ tools | tojson }}"
    "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}{% if add_generation_prompt %}\n{% endif %}"
)


def call(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


OSLO, NOW = call("weather", {"city": "Oslo"}), call("clock", {})
OSLOS = ("tool_use", "weather", '{"city": "Oslo"}')


def body(server: Server, answer: str | list[int], **fields: Any) -> dict[str, Any]:
    messages = server.say_chat("?", answer)
    return {"model": "scripted", "max_tokens": 500, "messages": messages, "tools": [WEATHER, CLOCK]} | fields


def ask(server: Server, answer: str | list[int], **fields: Any) -> ToldMessage:
    """What is told of an answer, whole and streamed alike."""
    return told_both(partial(server.post, MESSAGES), body(server, answer, **fields))


@pytest.fixture(scope="module")
def hermes(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(info=LONG, tool_call_parser="hermes", enable_auto_tool_choice=True)


@pytest.fixture(scope="module")
def thinker(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(info=LONG, tool_call_parser="hermes", enable_auto_tool_choice=True, reasoning_parser="qwen3")


@pytest.fixture(scope="module")
def showing(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(info=LONG, tool_call_parser="hermes", enable_auto_tool_choice=True, chat_template=SHOWS_ALL)


@pytest.fixture(scope="module")
def client(thinker: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0) as made:
        yield made


# --- answers -----------------------------------------------------------------------------------------------------------


def test_blocks_in_order(thinker: Server) -> None:
    told = ask(thinker, f"<think>hm</think>\n\nI look.\n{OSLO}\n{NOW}\nThen:{OSLO}")
    assert [block[:2] for block in told.blocks] == [
        ("thinking", "hm"),
        ("text", "I look."),
        ("tool_use", "weather"),
        ("tool_use", "clock"),
        ("text", "\nThen:"),
        ("tool_use", "weather"),
    ]
    assert told.stop_reason == "tool_use"


def test_g09_partial_json_concatenates_to_the_input_with_its_first_brace(hermes: Server) -> None:
    arguments = {"city": 'Oslo "{}" \n ø', "deep": {"a": [1, {"b": None}], "c": {}}}
    told = ask(hermes, call("weather", arguments))
    assert told.calls == [("weather", json.dumps(arguments))] and told.stop_reason == "tool_use"


@pytest.mark.parametrize("max_tokens", [4097, 64_000, 2**63 - 1])
def test_b26_max_tokens_may_be_what_the_model_of_a_name_has_elsewhere(hermes: Server, max_tokens: int) -> None:
    told = ask(hermes, "a" * 5000, max_tokens=max_tokens)
    assert told.stop_reason == "max_tokens" and told.num_input_tokens + told.num_output_tokens == 4096


def test_b01_b02_a_call_cut_by_max_tokens(hermes: Server) -> None:
    """At every token: the same reason whole and streamed, and an object as the input."""
    answer = f"Look: {OSLO}"
    reasons = set()
    for length in range(1, len(answer) + 2):
        told = ask(hermes, answer, max_tokens=length)
        reasons.add(told.stop_reason)
        assert told.stop_reason == ("tool_use" if length > len(answer) else "max_tokens")
        assert told.num_output_tokens == length
    assert reasons == {"max_tokens", "tool_use"}


def test_b03_b04_one_stop_reason_behind_all_text(hermes: Server) -> None:
    told = ask(hermes, "One two three", max_tokens=5)
    assert told == ToldMessage([("text", "One t")], "max_tokens", None, told.num_input_tokens, 5)


def test_b10_b11_calls_without_arguments(hermes: Server) -> None:
    assert ask(hermes, NOW + OSLO).blocks == [("tool_use", "clock", "{}"), OSLOS]
    assert ask(hermes, NOW).blocks == [("tool_use", "clock", "{}")]


def test_b12_b13_the_reason_with_every_choice(hermes: Server) -> None:
    for choice in (None, {"type": "auto"}, {"type": "any"}, NAMED):
        told = ask(hermes, OSLO, tool_choice=choice)
        assert (told.blocks, told.stop_reason) == ([OSLOS], "tool_use"), choice
    told = ask(hermes, OSLO, tool_choice={"type": "none"})
    assert (told.blocks, told.stop_reason) == ([("text", OSLO)], "end_turn")


def test_one_call_only(hermes: Server) -> None:
    for choice in ("auto", "any"):
        told = ask(hermes, OSLO + NOW, tool_choice={"type": choice, "disable_parallel_tool_use": True})
        assert told.blocks == [OSLOS]


@pytest.mark.parametrize(
    ("stop", "blocks", "reason", "sequence"),
    [
        ("three", [("text", "One two ")], "stop_sequence", "three"),
        ("Oslo", [("text", "One two three"), ("tool_use", "weather", '{"city": "')], "stop_sequence", "Oslo"),
        ("</tool_call>", [("text", "One two three"), OSLOS], "tool_use", None),
        ("zzz", [("text", "One two three"), OSLOS], "tool_use", None),
        ("four", [("text", "One two three"), OSLOS], "tool_use", None),
    ],
)
def test_b14_stop_sequences(hermes: Server, stop: str, blocks: list[Any], reason: str, sequence: str | None) -> None:
    told = ask(hermes, f"One two three{OSLO}", stop_sequences=["nothing", stop])
    assert (told.blocks, told.stop_reason, told.stop_sequence) == (blocks, reason, sequence)


def test_b16_text_is_held_only_while_it_may_become_a_stop_sequence(hermes: Server) -> None:
    events = named_events(hermes.post(MESSAGES, body(hermes, "abcdef", stop_sequences=["zzzzzzzz"], stream=True)))
    assert sum(event["type"] == "content_block_delta" for event in events) == 6


def test_b17_b52_marks_that_are_tokens(start_scripted: Callable[..., Server]) -> None:
    for special in (False, True):
        server = start_scripted(
            info=LONG,
            marks=MARKS,
            special=special,
            tool_call_parser="hermes",
            enable_auto_tool_choice=True,
            reasoning_parser="qwen3",
        )
        told = ask(server, f"<think>hm, b,</think>Look{OSLO}", stop_sequences=["b,c", "<tools"])
        assert [block[0] for block in told.blocks] == ["thinking", "text", "tool_use"] and told.texts("thinking") == "hm, b,"
        hidden = ask(server, f"<think>hm</think>Look{OSLO}", tool_choice={"type": "none"})
        assert [block[0] for block in hidden.blocks] == ["thinking", "text"] and hidden.calls == []
        server.stop()


def test_b41_thoughts_are_free_and_the_answer_is_bound(thinker: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for asked in (
        {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        {"output_format": {"type": "json_schema", "schema": schema}},
    ):
        told = ask(thinker, '<think>hm</think>{"a": 1}', tools=None, **asked)
        assert told.blocks == [("thinking", "hm"), ("text", '{"a": 1}')]
        assert thinker.model.requests[-1].constraint.grammar
    assert ask(thinker, "<think>hm</think>Hi", thinking={"type": "adaptive", "display": "omitted"}).blocks == [("text", "Hi")]


def test_an_empty_answer_is_one_empty_text(hermes: Server) -> None:
    assert ask(hermes, "").blocks == [("text", "")]


# --- prompts -----------------------------------------------------------------------------------------------------------


def shown_prompt(server: Server, **fields: Any) -> str:
    asked = {"model": "scripted", "max_tokens": 1, "messages": [{"role": "user", "content": "?"}]} | fields
    assert server.post(MESSAGES, asked).status_code == 200
    return str(server.tokenizer.decode(server.model.requests[-1].prompt_token_ids))


def test_b43_b44_b45_contents_of_every_form(showing: Server) -> None:
    used = {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "noon"}]}
    for content in ([used], [{"type": "text", "text": ""}, used], [{"type": "text", "text": "Look"}, used]):
        prompt = shown_prompt(
            showing,
            messages=[
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": content},
                {"role": "user", "content": [result]},
            ],
        )
        lines = [json.loads(line) for line in prompt.splitlines()[:3]]
        assert [line["role"] for line in lines] == ["user", "assistant", "tool"]
        assert lines[1]["tool_calls"][0]["function"]["name"] == "clock" and lines[1]["content"] == content[0].get("text", "")
        assert lines[2]["tool_call_id"] == "toolu_1" and lines[2]["content"] == "noon"
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    whole = shown_prompt(showing, system=parts, messages=[{"role": "user", "content": parts}])
    assert whole == shown_prompt(showing, system="a\nb", messages=[{"role": "user", "content": "a\nb"}])


BODIES: list[dict[str, Any]] = [
    {},
    {"system": "s"},
    {"tools": [WEATHER, CLOCK]},
    {"tools": [WEATHER], "tool_choice": NAMED, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "disabled"}, "system": [{"type": "text", "text": "s"}]},
    {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "I"}]},
    {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}},
    {"chat_template_kwargs": {"enable_thinking": 7}},
]


@pytest.mark.parametrize("fields", BODIES, ids=range(len(BODIES)))
def test_counted_tokens_are_those_of_the_prompt(showing: Server, fields: dict[str, Any]) -> None:
    asked = {"model": "scripted", "max_tokens": 1, "messages": [{"role": "user", "content": "?"}]} | fields
    counted = showing.post(COUNT, asked)
    assert counted.json() == {"input_tokens": told_whole(showing.post(MESSAGES, asked)).num_input_tokens}
    assert counted.json()["input_tokens"] == len(showing.model.requests[-1].prompt_token_ids)


def test_counting_goes_beyond_the_context(showing: Server) -> None:
    asked = {"model": "scripted", "messages": [{"role": "user", "content": "x" * 5000}]}
    assert showing.post(COUNT, asked).json()["input_tokens"] > 5000
    assert showing.post(MESSAGES, asked | {"max_tokens": 1}).status_code == 400


def test_b53_cached_tokens_are_told_and_all_parts_add_up(hermes: Server) -> None:
    asked = body(hermes, "Hi", tools=None, cache_salt="b53")
    first = hermes.post(MESSAGES, asked).json()["usage"]
    start, *_, delta, _ = named_events(hermes.post(MESSAGES, asked | {"stream": True}))
    again = start["message"]["usage"]
    assert first["cache_read_input_tokens"] == 0 < again["cache_read_input_tokens"] == delta["usage"]["cache_read_input_tokens"]
    assert first["input_tokens"] == again["input_tokens"] + again["cache_read_input_tokens"]
    assert [first["cache_creation_input_tokens"], again["cache_creation_input_tokens"]] == [0, 0]


# --- errors ------------------------------------------------------------------------------------------------------------


def test_tools_need_a_server_that_can_call_them(shared: Server) -> None:
    asked = {"model": "scripted", "max_tokens": 1, "messages": [{"role": "user", "content": "?"}], "tools": [CLOCK]}
    for path in (MESSAGES, COUNT):
        error = standard_error(shared.post(path, asked))
        assert error is not None and error["param"] == "tool_choice" and "--enable-auto-tool-choice" in error["message"]
        assert shared.post(path, asked | {"tool_choice": {"type": "none"}}).status_code == 200


def test_b05_b06_b07_failures_of_a_stream(start_scripted: Callable[..., Server], caplog: pytest.LogCaptureFixture) -> None:
    server = start_scripted(info=LONG)
    asked = body(server, "Hello", tools=None, stream=True)
    server.model.fails = {0: "bad row"}
    early = server.post(MESSAGES, asked)
    assert early.status_code == 500 and standard_error(early) and "bad row" in early.text
    server.model.fails = {3: "bad row"}
    late = named_events(server.post(MESSAGES, asked))
    assert late[-1] == {"type": "error", "error": {"type": "api_error", "message": "bad row", "param": None, "code": 500}}
    assert [event["type"] for event in late].count("message_stop") == 0 and "[DONE]" not in json.dumps(late)
    wrong = server.post(MESSAGES, asked | {"temperature": 3.0})
    assert wrong.status_code == 400 and standard_error(wrong)
    assert caplog.text.count(f"{MESSAGES} ended: error 500") == 2


def test_what_is_refused_before_a_route_is_told_in_its_form(start_scripted: Callable[..., Server]) -> None:
    server = start_scripted(api_keys=("k",), max_body_bytes=1000, root_path="/api")
    key = {"authorization": "Bearer k"}
    for path in (MESSAGES, COUNT):
        answers = {
            401: server.post(path, {}),
            413: server.post(path, {"model": "x" * 2000}, headers=key),
            405: server.get(path, headers=key),
            400: server.post(path, {}, headers=key | {"host": "evil.example"}),
        }
        assert {status: answer.status_code for status, answer in answers.items()} == {status: status for status in answers}
        assert all(map(standard_error, answers.values()))
        behind_a_proxy = server.post(f"/api{path}", {})
        assert behind_a_proxy.json()["type"] == "error" and behind_a_proxy.status_code == 401
    assert server.post("/v1/chat/completions", {}).json().keys() == {"error"}


# --- the official client -----------------------------------------------------------------------------------------------


def test_the_official_client_accumulates_what_the_whole_answer_says(thinker: Server, client: anthropic.Anthropic) -> None:
    answer = f"<think>hm</think>\n\nI look.\n{OSLO}\n{NOW}"
    for max_tokens in (500, 10, 40, 85, 88):
        asked = body(thinker, answer, max_tokens=max_tokens)
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            texts = "".join(stream.text_stream)
            streamed = stream.get_final_message()
        told, final = ([plain(block) for block in message.content] for message in (whole, streamed))
        assert told == final and texts == "".join(block.get("text", "") for block in told)
        assert (whole.stop_reason, whole.usage.output_tokens) == (streamed.stop_reason, streamed.usage.output_tokens)


def plain(block: Any) -> dict[str, Any]:
    return {name: value for name, value in block.to_dict().items() if name not in ("id", "parsed_output")}


def test_a_turn_with_tools_through_the_official_client(thinker: Server, client: anthropic.Anthropic) -> None:
    first = client.messages.create(**body(thinker, f"<think>hm</think>{OSLO}{NOW}"))
    used = [block for block in first.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": block.name, "is_error": False} for block in used]
    messages: list[Any] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]},
    ]
    prompt = "<|start|>user\n?<|end|>\n<|start|>assistant\n<|end|>\n"
    for text in ("tool\nweather", "tool\nclock", "user\nSo?"):
        prompt += f"<|start|>{text}<|end|>\n"
    thinker.model.says[tuple(thinker.tokens(f"{prompt}<|start|>assistant\n", False))] = "Noon in Oslo."
    second = client.messages.create(model="scripted", max_tokens=50, messages=messages, tools=[WEATHER, CLOCK])  # type: ignore[list-item]
    assert [plain(block) for block in second.content] == [{"type": "text", "text": "Noon in Oslo."}]
    counted = client.messages.count_tokens(model="scripted", messages=messages, tools=[WEATHER, CLOCK])  # type: ignore[list-item]
    assert counted.input_tokens == second.usage.input_tokens


def test_errors_are_the_official_clients_own_exceptions(thinker: Server, client: anthropic.Anthropic, shared: Server) -> None:
    asked = body(thinker, "Hello", tools=anthropic.omit)
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**asked | {"model": "claude-x"})
    assert unknown.value.type == "not_found_error" and "served: scripted" in unknown.value.message
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(**asked | {"max_tokens": 0})
    assert wrong.value.type == "invalid_request_error"
    thinker.model.fails = {2: "bad row"}
    try:
        with pytest.raises(anthropic.APIStatusError, match="bad row"), client.messages.stream(**asked) as stream:
            stream.until_done()
    finally:
        thinker.model.fails = {}


def test_every_header_of_anthropics_clients_is_taken(thinker: Server) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27,x", "x-api-key": "none"}
    answer: httpx.Response = thinker.http.post(f"{MESSAGES}?beta=true", json=body(thinker, "Hi"), headers=headers)
    assert told_whole(answer).blocks == [("text", "Hi")]
    assert told_stream(thinker.http.post(MESSAGES, json=body(thinker, "Hi", stream=True))).blocks == [("text", "Hi")]


# --- a coding agent ----------------------------------------------------------------------------------------------------

AGENTS_TEMPLATE = (
    "{{ tools | tojson }}\n{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}<|end|>\n{% endfor %}<|start|>assistant\n"
)


def test_a_recorded_exchange_of_a_coding_agent(start_scripted: Callable[..., Server]) -> None:
    """Ids that were issued come back, and the second prompt goes on where the first one ended, token for token."""
    first = coding_agent.first_request()
    server = start_scripted(
        info={"max_model_len": 32768},
        served_model_names=("scripted", first["model"]),
        chat_template=AGENTS_TEMPLATE,
        tool_call_parser="hermes",
        enable_auto_tool_choice=True,
        reasoning_parser="qwen3",
    )

    def replay(request: dict[str, Any], answer: str) -> tuple[list[dict[str, Any]], list[int]]:
        """(the answer's blocks, the prompt's tokens)."""
        counted = server.post(COUNT, request, headers=coding_agent.HEADERS).json()["input_tokens"]
        server.post(MESSAGES, request | {"stream": False, "max_tokens": 1})  # shows the prompt
        prompt = server.model.requests[-1].prompt_token_ids
        server.model.says[tuple(prompt)] = answer
        streamed = server.post(f"{MESSAGES}?beta=true", request, headers=coding_agent.HEADERS)
        assert told_stream(streamed).num_input_tokens == counted == len(prompt)
        return message_of(named_events(streamed))["content"], prompt

    blocks, prompt = replay(first, coding_agent.RECORDED["answer"])
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    second = coding_agent.second_request(first, blocks)
    told, longer = replay(second, coding_agent.RECORDED["second_answer"])
    assert longer[: len(prompt)] == prompt and len(longer) > len(prompt)
    more = str(server.tokenizer.decode(longer[len(prompt) :]))
    ids = [block["id"] for block in blocks[2:]]
    assert [more.count(call_id) for call_id in ids] == [2, 2] and len(set(ids)) == 2 and ids[0].startswith("toolu_")
    assert blocks[0]["thinking"].strip() in more and coding_agent.RECORDED["results"][0]["content"][0]["text"] in more
    assert "cch=" not in str(server.tokenizer.decode(longer)), "what differs each time is no part of the prompt"
    assert told == [{"type": "text", "text": coding_agent.RECORDED["second_answer"]}]
    again, _ = replay(second, coding_agent.RECORDED["second_answer"])
    assert again == told


def message_of(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that the official client makes of a stream's events."""
    snapshot, buffers = None, dict[int, bytes]()
    for event in events:
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)  # type: ignore[arg-type]
    assert snapshot is not None
    message: dict[str, Any] = json.loads(snapshot.to_json())
    for block in message["content"]:
        block.pop("parsed_output", None)
    return message
