"""Agent turns through the clients that people use, each in a process of its own, against a real server and a real small model.

The demo model does not call tools by itself: the requests leave it no other choice.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.e2e import coding_agent
from tests.e2e.message_answers import named_events

CLIENTS = Path(__file__).parent / "clients"
TOOLS = CLIENTS / "tools.json"


@pytest.fixture(scope="module")
def server(start_server: Any) -> Iterator[Any]:
    server = start_server("--enable-auto-tool-choice", "--tool-call-parser", "hermes").ready()
    yield server
    server.stop()


def run(script: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, CLIENTS / script, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("client", [("openai_agent.py",), ("litellm_agent.py",), ("litellm_agent.py", "anthropic")])
def test_an_agent_turn_with_two_tools(server: Any, client: tuple[str, ...]) -> None:
    script, *api = client
    told = run(script, server.url, "smollm2-135m", str(TOOLS), *api)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in json.loads(TOOLS.read_text())}
    calls = [call for message in told["messages"] for call in message.get("tool_calls") or ()]
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
    assert calls[0]["function"]["name"] in schemas and calls[-1]["function"]["name"] == "get_time"
    assert len({call["id"] for call in calls}) == len(calls) >= 2
    results = [message for message in told["messages"] if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in results] == [call["id"] for call in calls]
    assert told["reasons"][0] == "tool_calls" and told["reasons"][2] in ("stop", "length")
    last = told["messages"][-1]
    assert last["role"] == "assistant" and not last.get("tool_calls")
    assert last["content"] or api, "where min_tokens can be asked for, the small model says something"


def test_an_agent_turn_on_the_messages_api(server: Any) -> None:
    told = run("anthropic_agent.py", server.url, "smollm2-135m", str(TOOLS))
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in json.loads(TOOLS.read_text())}
    blocks = [block for message in told["messages"][1:] for block in message["content"]]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    for call in calls:
        jsonschema.validate(call["input"], schemas[call["name"]])
    assert calls[-1]["name"] == "get_time" and len({call["id"] for call in calls}) == len(calls) >= 2
    assert [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"] == [call["id"] for call in calls]
    assert told["reasons"][:2] == ["tool_use", "tool_use"] and told["reasons"][2] in ("end_turn", "max_tokens")
    assert [block["type"] for block in told["messages"][-1]["content"]] == ["text"]
    assert told["counted"] == [used["input_tokens"] + used["cache_read_input_tokens"] for used in told["used"]]
    assert all(used["cache_read_input_tokens"] > 0 for used in told["used"][1:])


def test_a_coding_agents_second_turn_finds_the_first_one_in_the_cache(server: Any) -> None:
    """The recorded exchange on a real engine: all blocks of the first prompt are there when the second comes."""
    more = {"model": "smollm2-135m", "max_tokens": 64, "temperature": 0, "tool_choice": {"type": "any"}}
    with httpx.Client(base_url=server.url, headers=coding_agent.HEADERS, timeout=120) as client:
        first = coding_agent.first_request(**more, stream=False)
        answer = client.post("/v1/messages", json=first).json()
        assert [block["type"] for block in answer["content"]] == ["tool_use"], answer
        second = coding_agent.second_request(first, answer["content"])
        start = named_events(client.post("/v1/messages", json=second | {"stream": True}))[0]["message"]
    num_prompt_tokens = answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
    assert start["usage"]["cache_read_input_tokens"] == num_prompt_tokens // 16 * 16 > 100


def check_calls(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls among items: each follows its tool's schema, and has its result."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in json.loads(TOOLS.read_text())}
    calls = [item for item in items if item["type"] == "function_call"]
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
    results = [item["call_id"] for item in items if item["type"] == "function_call_output"]
    assert results == [call["call_id"] for call in calls] and len(set(results)) == len(results) > 0
    return calls


def test_an_agent_turn_through_responses(server: Any) -> None:
    """The server's history and the client's own make the same prompts and answers, and their beginnings are cached."""
    kept, sent = run("openai_responses.py", server.url, "smollm2-135m", str(TOOLS))
    for told in (kept, sent):
        told["items"][0]["type"] = "message"
        assert check_calls(told["items"])[-1]["name"] == "get_time"
        assert told["items"][-1]["role"] == "assistant" and told["items"][-1]["content"][0]["text"]
        assert [status for status, _, _ in told["used"]][:2] == ["completed", "completed"]
        assert all(cached > 0 for _, _, cached in told["used"][1:])
    assert [used[:2] for used in kept["used"]] == [used[:2] for used in sent["used"]]
    texts = [[item.get("arguments") or item.get("content") for item in told["items"]] for told in (kept, sent)]
    assert texts[0] == texts[1]


def test_litellm_speaks_responses(server: Any) -> None:
    told = run("litellm_responses.py", server.url, "smollm2-135m", str(TOOLS))
    told["items"][0]["type"] = "message"
    check_calls(told["items"])
    assert told["status"] in ("completed", "incomplete")


def test_typed_answers_through_tools_and_schemas(server: Any) -> None:
    told = run("instructor_models.py", server.url, "smollm2-135m")
    assert set(told) == {"TOOLS", "JSON_SCHEMA"}
    for answers in told.values():
        assert answers["whole"] == answers["streamed"] and answers["parts"] > 1
        assert answers["whole"]["city"] in ("Oslo", "Rome") and 1 <= answers["whole"]["days"] <= 7
