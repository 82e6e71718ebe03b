"""What operators report of grammars, tokens and limits (rows B01 to B51), on the demo model and a real server.

Logit biases push the model towards what the reports describe; what comes out must be right whatever the model would like.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from tests.e2e.chat_answers import Told, told_both

Server = Any
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROUTES = (COMPLETIONS, CHAT)
QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CITY = {"type": "string", "enum": ["Oslo", "Rome"]}
TOOLS = [tool("weather", city=CITY), tool("clock")]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    """One for all: with parsers, a short context, and prompts in chunks."""
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    flags += ["--max-model-len", "1024", "--kv-cache-memory-bytes", "256M", "--max-num-batched-tokens", "64"]
    return start_server(*flags).ready()


def post(server: Server, route: str, body: dict[str, Any]) -> httpx.Response:
    """Greedy, and without thoughts: this model has none, but where a grammar leaves it nothing else it would begin one."""
    defaults = {"temperature": 0} | ({"thinking_token_budget": 0} if route == CHAT else {})
    return httpx.post(f"{server.url}{route}", json=defaults | body, timeout=120)


def asking(route: str, max_tokens: int = 60) -> dict[str, Any]:
    return ({"messages": QUESTION} if route == CHAT else {"prompt": "The weather:"}) | {"max_tokens": max_tokens}


def text_of(server: Server, route: str, **fields: Any) -> tuple[str, str]:
    """(text, finish reason) of one answer."""
    answer = post(server, route, asking(route) | fields)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["message"]["content"] if route == CHAT else choice["text"], choice["finish_reason"]


def token_of(server: Server, text: str) -> int:
    """The id of a text that is one token."""
    tokens: list[int] = httpx.post(f"{server.url}/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert len(tokens) == 1, text
    return tokens[0]


def bias(server: Server, *texts: str, by: float = 100.0) -> dict[str, float]:
    return {str(token_of(server, text)): by for text in texts}


def message_of(server: Server, route: str, **fields: Any) -> str:
    answer = post(server, route, asking(route, 4) | fields)
    assert answer.status_code == 400, answer.text
    message: str = answer.json()["error"]["message"]
    return message


# --- calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"])
def test_b12_b13_forced_calls_are_made_whatever_the_model_would_say(server: Server, choice: Any, reason: str) -> None:
    body = {"messages": QUESTION, "tools": TOOLS, "tool_choice": choice, "max_tokens": 80, "parallel_tool_calls": False}
    (told,) = told_both(partial(post, server, CHAT), body)
    ((name, arguments),) = told.calls
    assert told.finish_reason == reason and told.content == ""
    assert json.loads(arguments) in ([{"city": "Oslo"}, {"city": "Rome"}] if name == "weather" else [{}])
    assert name == "weather" or choice == "required"


def test_b01_b02_a_forced_call_cut_anywhere(server: Server) -> None:
    body = {"messages": QUESTION, "tools": TOOLS, "tool_choice": NAMED}
    (whole,) = told_both(partial(post, server, CHAT), body | {"max_tokens": 80})
    for limit in (1, 4, 9, 13, 16, 19):
        (cut,) = told_both(partial(post, server, CHAT), body | {"max_tokens": limit})
        assert cut.finish_reason == "length"
        assert all(whole.calls[0][1].startswith(arguments) for _, arguments in cut.calls)


# --- schemas that cannot be used ---------------------------------------------------------------------------------------

BROKEN_SCHEMAS: dict[str, tuple[Any, str]] = {
    "node that is a text": ({"type": "object", "properties": {"foo": "bar"}}, "properties/foo"),
    "unknown type": ({"type": "object", "properties": {"foo": {"type": "str"}}}, "properties/foo"),
    "dangling reference": ({"properties": {"a": {"$ref": "#/$defs/gone"}}}, "gone"),
    "broken regex": ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(["}}}, "properties/a"),
    "nothing fits": ({"type": "integer", "minimum": 3, "maximum": 2}, ""),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("schema", "place"), BROKEN_SCHEMAS.values(), ids=BROKEN_SCHEMAS)
def test_b31_a_broken_schema_is_refused_with_its_place(server: Server, route: str, schema: Any, place: str) -> None:
    """Wherever it stands; a request beside it is not disturbed."""
    neighbour = text_of(server, COMPLETIONS, max_tokens=12)
    together: list[tuple[str, str]] = []
    running = threading.Thread(target=lambda: together.append(text_of(server, COMPLETIONS, max_tokens=12)))
    running.start()
    forms: list[dict[str, Any]] = [
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json": json.dumps(schema)}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
    ]
    if route == CHAT:
        function = {"name": "f", "parameters": schema}
        forms.append({"tools": [{"type": "function", "function": function | {"strict": True}}]})
        forms.append({"tools": [{"type": "function", "function": function}], "tool_choice": "required"})
    messages = [message_of(server, route, **form) for form in forms]
    running.join()
    assert all(place in message for message in messages), messages
    assert together == [neighbour]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "asked", [{"regex": "(["}, {"grammar": 'root ::= "a" undefined'}, {"grammar": "start: ("}, {"choice": []}], ids=str
)
def test_b31_other_broken_grammars_are_refused(server: Server, route: str, asked: dict[str, Any]) -> None:
    assert message_of(server, route, structured_outputs=asked)


def nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + "true" + "}}" * depth


CIRCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
TOO_MUCH: dict[str, dict[str, Any]] = {
    "1k": {"json": nested(1000)},
    "60k": {"json": nested(60_000)},
    "circle": {"json": CIRCLE},
    "itself": {"json": {"$ref": "#"}},
    "open groups": {"regex": "(" * 60_000},
    "groups": {"regex": "(" * 9000 + "a" + ")" * 9000},
    "counts of counts": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "groups of a grammar": {"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("asked", TOO_MUCH.values(), ids=TOO_MUCH)
def test_b32_what_is_nested_too_deep_is_refused_at_once(server: Server, route: str, asked: dict[str, Any]) -> None:
    started = time.monotonic()
    assert message_of(server, route, structured_outputs=asked)
    assert time.monotonic() - started < 5  # milliseconds on a quiet machine; the bound only tells it from a hang
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_b32_depth_and_recursion_that_are_reasonable_work(server: Server, route: str) -> None:
    recursive = {
        "$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                           "required": ["next"], "additionalProperties": False}},
        "$ref": "#/$defs/node",
    }  # fmt: skip
    # By itself this model never comes to an end here.
    text, reason = text_of(server, route, structured_outputs={"json": recursive}, logit_bias=bias(server, "null"))
    assert reason == "stop" and list(json.loads(text)) == ["next"]
    text, reason = text_of(server, route, structured_outputs={"json": nested(10)})
    assert reason == "stop" and isinstance(json.loads(text), dict)


# --- what grammars hold to ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
def test_b34_white_space_is_bounded_whatever_the_model_would_like(server: Server, route: str) -> None:
    pushed = bias(server, " ", "\n", "  ", "\n\n", "\t", by=20.0)
    text, reason = text_of(server, route, max_tokens=120, logit_bias=pushed, structured_outputs={"json": PERSON})
    assert reason == "stop" and set(json.loads(text)) == {"name", "age"}


@pytest.mark.parametrize("route", ROUTES)
def test_b35_g06_the_pattern_of_white_space_is_honoured(server: Server, route: str) -> None:
    pushed = bias(server, "\n", "\n\n", "\t", "  ", by=60.0)
    for options in ({"whitespace_pattern": " ?"}, {"disable_any_whitespace": True}):
        text, reason = text_of(server, route, logit_bias=pushed, structured_outputs={"json": PERSON} | options)
        assert reason == "stop" and json.loads(text)
        assert not re.search(r"[\n\t]|  ", re.sub(r'"[^"]*"', "text", text))
    assert "whitespace_pattern" in message_of(server, route, structured_outputs={"json": PERSON, "whitespace_pattern": "a+"})


@pytest.mark.parametrize("route", ROUTES)
def test_b36_pattern_and_length_hold_together(server: Server, route: str) -> None:
    schema = {"type": "string", "pattern": "^[a-z]+$", "maxLength": 8}
    text, reason = text_of(server, route, structured_outputs={"json": schema})
    assert reason == "stop" and re.fullmatch(r"[a-z]{1,8}", json.loads(text))


@pytest.mark.parametrize("route", ROUTES)
def test_b38_what_is_required_is_there_also_without_properties(server: Server, route: str) -> None:
    text, _ = text_of(server, route, structured_outputs={"json": {"type": "object", "required": ["a"], "maxProperties": 1}})
    assert list(json.loads(text)) == ["a"]
    text, reason = text_of(server, route, max_tokens=100, structured_outputs={"json": {"type": "object", "required": ["a"]}})
    assert reason == "stop" and "a" in json.loads(text)


@pytest.mark.parametrize("route", ROUTES)
def test_b39_a_text_in_json_has_no_raw_control_characters(server: Server, route: str) -> None:
    pushed = bias(server, "\t", "\n", "\n\n", by=40.0)
    schema = {"type": "object", "properties": {"s": {"type": "string", "minLength": 3, "maxLength": 12}}, "required": ["s"]}
    text, reason = text_of(server, route, logit_bias=pushed, structured_outputs={"json": schema})
    assert reason == "stop" and 3 <= len(json.loads(text, strict=True)["s"]) <= 12


def test_b40_completions_keep_to_a_grammar_with_and_without_a_reasoning_parser(server: Server, demo_server: Server) -> None:
    for each in (server, demo_server):
        text, reason = text_of(each, COMPLETIONS, structured_outputs={"choice": ["blue", "green"]})
        assert (text in ("blue", "green")) and reason == "stop"


@pytest.mark.parametrize("form", ["structured_outputs", "response_format"])
def test_b41_a_thought_is_free_and_the_content_behind_it_is_not(server: Server, form: str) -> None:
    """The prompt opens a thought, the budget closes it; then comes JSON."""
    asked: dict[str, Any] = {"structured_outputs": {"json": PERSON}}
    if form == "response_format":
        asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}}
    body = {
        "messages": [*QUESTION, {"role": "assistant", "content": "<think>\nThe user wants"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "thinking_token_budget": 8,
        "max_tokens": 90,
    }
    (told,) = told_both(partial(post, server, CHAT), body | asked)
    assert told.reasoning and told.finish_reason == "stop" and set(json.loads(told.content)) == {"name", "age"}


# --- tokens and their scores -------------------------------------------------------------------------------------------

EMOJI = "👋🏽 ďábel 漢"


@pytest.mark.parametrize("route", ROUTES)
def test_b18_characters_of_several_tokens_come_whole(server: Server, route: str) -> None:
    """The grammar leaves the model no other text; eight streams at once."""
    body = asking(route) | {"structured_outputs": {"choice": [EMOJI]}, "n": 8, "temperature": 1, "stream": True}
    answer = post(server, route, body)
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(8):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(c["delta"].get("content", "") if route == CHAT else c["text"] for c in own) == EMOJI
    assert "\ufffd" not in answer.text


@pytest.mark.parametrize("route", ROUTES)
def test_b19_b20_scores_where_one_token_is_allowed(server: Server, route: str) -> None:
    """Byte tokens have their bytes, and what a grammar forbids has a number that JSON knows."""
    asked = {"logprobs": True, "top_logprobs": 20} if route == CHAT else {"logprobs": 20}
    answer = post(server, route, asking(route) | {"structured_outputs": {"choice": [EMOJI]}} | asked)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    if route == CHAT:
        entries = choice["logprobs"]["content"]
        assert bytes(b for entry in entries for b in entry["bytes"]).decode().startswith(EMOJI)
        assert all(len(entry["top_logprobs"]) == 20 for entry in entries)
        values = [top["logprob"] for entry in entries for top in entry["top_logprobs"]]
    else:
        values = [value for top in choice["logprobs"]["top_logprobs"] for value in top.values()]
    assert values and all(-9999.0 <= value <= 0 for value in values)


PROMPTS = [f"{start} the quick brown fox jumps over the lazy dog, and " * 4 for start in ("One", "Two", "Six", "Ten")]


def test_b25_scores_of_prompts_do_not_depend_on_company(server: Server) -> None:
    """Eight requests at once, prompts in chunks, against each alone. There is no speculation here to be switched on."""
    bodies = [{"prompt": prompt, "prompt_logprobs": 0, "max_tokens": 2, "n": n} for prompt in PROMPTS for n in (1, 2)]
    bodies = [body | ({"temperature": 1, "seed": 3} if body["n"] > 1 else {}) for body in bodies]

    def scores(body: dict[str, Any]) -> Any:
        return post(server, COMPLETIONS, body).json()["choices"][0]["prompt_logprobs"]

    alone = [scores(body) for body in bodies]
    together: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda i=i: together.update({i: scores(bodies[i])})) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(len(bodies))] == alone


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("ids", [{"99999999": 5}, {"-1": 5}, {"49152": 5}, {str(2**40): 5}], ids=str)
def test_b27_biases_of_unknown_tokens_are_refused(server: Server, route: str, ids: dict[str, float]) -> None:
    assert next(iter(ids)) in message_of(server, route, logit_bias=ids)
    assert text_of(server, route, max_tokens=2)


@pytest.mark.parametrize("prompt", [[-1], [10**9], [[1, 2], [3, 10**12]], [49152]], ids=str)
def test_b28_prompts_of_unknown_tokens_are_refused(server: Server, prompt: list[Any]) -> None:
    answer = post(server, COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
    last = prompt[-1][-1] if isinstance(prompt[-1], list) else prompt[-1]
    assert answer.status_code == 400 and str(last) in answer.json()["error"]["message"]
    assert text_of(server, COMPLETIONS, max_tokens=2)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": list(range(2000))},
        {"logit_bias": {str(i): 1 for i in range(1500)}},
        {"stop_token_ids": list(range(200))},
    ],
    ids=["allowed", "bias", "stop"],
)
def test_b29_many_token_ids_are_served(server: Server, route: str, fields: dict[str, Any]) -> None:
    assert text_of(server, route, max_tokens=2, **fields)


@pytest.mark.parametrize(
    ("route", "fields"),
    [(COMPLETIONS, {"prompt": prompt}) for prompt in ("", [""], [], [[]], ["a", ""])] + [(CHAT, {"messages": []})],
)
def test_b30_empty_prompts_are_refused_and_hurt_nobody(server: Server, route: str, fields: dict[str, Any]) -> None:
    assert post(server, route, {"max_tokens": 2} | fields).status_code == 400
    assert text_of(server, route, max_tokens=2)


def test_b48_two_starts_differ_unless_there_is_a_seed(server: Server, demo_server: Server) -> None:
    def draw(each: Server, **fields: Any) -> tuple[str, str]:
        return text_of(each, COMPLETIONS, temperature=1, max_tokens=24, prompt="Once upon a time", **fields)

    unseeded = [draw(each) for each in (server, server, demo_server, demo_server)]
    assert len(set(unseeded)) == 4
    assert draw(server, seed=7) == draw(demo_server, seed=7) == draw(server, seed=7)


@pytest.mark.parametrize("route", ROUTES)
def test_b51_min_tokens_holds_off_every_end(server: Server, route: str) -> None:
    """A second token that ends an answer, and a stop string, which the model is pushed towards."""
    second = token_of(server, "!")
    for fields in ({"stop_token_ids": [second]}, {"stop": ["!"]}):
        for least, expected in ((0, 1), (10, 11)):
            body = asking(route) | fields | {"min_tokens": least, "max_tokens": 20, "logit_bias": {str(second): 100}}
            answer = post(server, route, body).json()
            assert answer["usage"]["completion_tokens"] == expected and answer["choices"][0]["finish_reason"] == "stop"


def test_a_plain_answer_of_the_model_is_told_the_same_whole_and_streamed(server: Server) -> None:
    (told,) = told_both(partial(post, server, CHAT), {"messages": QUESTION, "max_tokens": 12})
    assert isinstance(told, Told) and told.content and not told.calls


def test_checklist_14_a_checkpoint_without_a_response_template_is_not_served_by_it(start_server: Callable[..., Server]) -> None:
    refused = start_server("--tool-call-parser", "hf")
    refused.wait_for_line("response_template")
    assert refused.process.wait(60) != 0
