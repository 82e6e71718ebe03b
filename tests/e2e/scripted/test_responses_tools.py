"""Tools of /v1/responses that are more than functions: namespaces, custom tools, and those that are left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses import ToolParam

from halfbyte.entrypoints.responses.tools import FOREIGN, TAKEN
from tests.e2e.responses_told import both, plain, streamed

Server = Any
PATH = "/v1/responses"
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "description": "Today's.", "parameters": {"type": "object"}}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Changes files."}
CRM: dict[str, Any] = {"type": "namespace", "name": "crm", "description": "Of customers.", "tools": [WEATHER, PATCH]}
# Shows all that a template is given.
SHOWS_ALL = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}{{ tools | tojson }}"
ONE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False}
DIFF = '--- a\n+++ b\n+"é" \\ 😀'


def written(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(start_scripted: Callable[..., Server]) -> Server:
    flags = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "chat_template": SHOWS_ALL}
    return start_scripted(info={"max_model_len": 8192}, **flags)


def prompt_of(server: Server, **body: Any) -> str:
    answer = server.post(PATH, {"input": "?", "max_output_tokens": 1} | body)
    assert answer.status_code == 200, answer.text
    return str(server.tokenizer.decode(server.model.requests[-1].prompt_token_ids, skip_special_tokens=False))


def offered(server: Server, **body: Any) -> dict[str, Any]:
    """The functions that the model reads about, by name."""
    tools = json.loads(prompt_of(server, **body).splitlines()[-1])
    return {tool["function"]["name"]: tool["function"] for tool in tools}


def ask(server: Server, answer: str, **body: Any) -> dict[str, Any]:
    """What is told when the model answers so; whole and streamed alike."""
    prompt = prompt_of(server, **body)
    server.model.says[tuple(server.tokenizer.encode(prompt, False))] = answer
    return both(partial(server.post, PATH), {"input": "?"} | body)


def test_what_the_model_reads_about_tools(server: Server) -> None:
    functions = offered(server, tools=[WEATHER, PATCH, CRM])
    assert set(functions) == {"weather", "patch", "crm__weather", "crm__patch"}
    assert functions["patch"] == {"name": "patch", "description": "Changes files.", "parameters": ONE_TEXT}
    assert functions["crm__weather"]["description"] == "Of customers.\n\nToday's."
    assert functions["crm__patch"]["description"] == "Changes files."


def test_a_call_has_its_namespace(server: Server) -> None:
    told = ask(server, written("crm__weather", {"city": "Oslo"}) + written("weather", {}), tools=[WEATHER, CRM])
    first, second = told["output"]
    assert (first["name"], first["namespace"], first["arguments"]) == ("weather", "crm", '{"city": "Oslo"}')
    assert second["name"] == "weather" and "namespace" not in second
    assert told["tools"] == [WEATHER, CRM]


@pytest.mark.parametrize(("name", "namespace"), [("patch", None), ("crm__patch", "crm")])
def test_a_custom_tool_has_an_input(server: Server, name: str, namespace: str | None) -> None:
    told = ask(server, "So." + written(name, {"input": DIFF}), tools=[PATCH, CRM])
    call = told["output"][-1]
    assert plain(told["output"]) == [("message", "So."), ("custom", "patch", DIFF)]
    assert call.get("namespace") == namespace and call["id"].startswith("ctc_")


def test_an_input_streams_as_it_is_written(server: Server) -> None:
    """Not only in the end, and not a letter of its JSON."""
    prompt = prompt_of(server, tools=[PATCH])
    server.model.says[tuple(server.tokenizer.encode(prompt, False))] = written("patch", {"input": DIFF})
    told = streamed(server.post(PATH, {"input": "?", "tools": [PATCH], "stream": True}))
    deltas = [event["delta"] for event in told.events if event["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 5 and "".join(deltas) == DIFF


def test_arguments_of_another_form_are_the_input(server: Server) -> None:
    told = ask(server, written("patch", {"diff": "x"}), tools=[PATCH])
    assert plain(told["output"]) == [("custom", "patch", '{"diff": "x"}')]


def test_an_input_that_is_cut_is_incomplete(server: Server) -> None:
    call = written("patch", {"input": DIFF})
    told = ask(server, call, tools=[PATCH], max_output_tokens=call.index("+++"))
    assert told["status"] == "incomplete" and plain(told["output"]) == [("custom", "patch", "--- a\n")]


def test_calls_and_results_go_back_as_the_model_wrote_them(server: Server) -> None:
    """Also by previous_response_id, for which items are kept as they are."""
    tools = [PATCH, CRM]
    answer = "Look. " + written("crm__patch", {"input": DIFF}) + written("crm__weather", {"city": "Oslo"})
    told = ask(server, answer, tools=tools)
    custom, call = told["output"][1:]
    results = [
        {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "done"},
        {"type": "function_call_output", "call_id": call["call_id"], "output": [{"type": "input_text", "text": "rain"}]},
    ]
    stateless = prompt_of(server, tools=tools, input=[{"role": "user", "content": "?"}, *told["output"], *results])
    assert prompt_of(server, tools=tools, input=results, previous_response_id=told["id"]) == stateless
    turn, *answers = (json.loads(line) for line in stateless.splitlines()[1:-1])
    calls = [made["function"] for made in turn["tool_calls"]]
    assert calls == [
        {"name": "crm__patch", "arguments": {"input": DIFF}},
        {"name": "crm__weather", "arguments": {"city": "Oslo"}},
    ]
    assert [(result["name"], result["content"]) for result in answers] == [("crm__patch", "done"), ("crm__weather", "rain")]
    kept = server.post(PATH, {"input": results, "previous_response_id": told["id"], "max_output_tokens": 1}).json()
    listed = server.get(f"{PATH}/{kept['id']}/input_items?order=asc").json()["data"]
    assert [item["type"] for item in listed] == [result["type"] for result in results]


def test_a_namespace_holds_no_other(server: Server) -> None:
    refused = server.post(PATH, {"input": "?", "tools": [CRM | {"tools": [CRM]}]})
    assert refused.status_code == 400 and refused.json()["error"]["message"].endswith("this server takes function, custom there")


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "patch", "namespace": "crm"}])
def test_a_custom_tool_can_be_forced(server: Server, choice: Any) -> None:
    server.post(PATH, {"input": "?", "tools": [CRM | {"tools": [PATCH]}], "tool_choice": choice, "max_output_tokens": 1})
    assert "crm__patch" in server.model.requests[-1].constraint.grammar


def test_tools_that_run_elsewhere_are_left_out_where_others_remain(server: Server) -> None:
    """Agents offer them whether a server has them or not. The response tells what it was made with."""
    left_out = [{"type": "web_search", "external_web_access": True}, {"type": "image_generation"}]
    assert set(offered(server, tools=[left_out[0], WEATHER, left_out[1]])) == {"weather"}
    told = ask(server, "Hi", tools=[*left_out, WEATHER], tool_choice="auto")
    assert told["tools"] == [WEATHER]
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "web_search"}, {"type": "function", "name": "weather"}],
    }
    assert set(offered(server, tools=[*left_out, WEATHER], tool_choice=allowed)) == {"weather"}


def test_every_kind_of_tool_that_the_official_client_has_is_known() -> None:
    kinds = {kind for tool in get_args(ToolParam) for kind in get_args(get_type_hints(tool)["type"])}
    assert kinds == {*FOREIGN, *TAKEN}
