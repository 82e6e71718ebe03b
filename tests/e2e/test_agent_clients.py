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

import jsonschema
import pytest

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


@pytest.mark.parametrize("client", ["openai_agent.py", "litellm_agent.py"])
def test_an_agent_turn_with_two_tools(server: Any, client: str) -> None:
    told = run(client, server.url, "smollm2-135m", str(TOOLS))
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
    assert last["role"] == "assistant" and last["content"] and not last.get("tool_calls")


def test_typed_answers_through_tools_and_schemas(server: Any) -> None:
    told = run("instructor_models.py", server.url, "smollm2-135m")
    assert set(told) == {"TOOLS", "JSON_SCHEMA"}
    for answers in told.values():
        assert answers["whole"] == answers["streamed"] and answers["parts"] > 1
        assert answers["whole"]["city"] in ("Oslo", "Rome") and 1 <= answers["whole"]["days"] <= 7
