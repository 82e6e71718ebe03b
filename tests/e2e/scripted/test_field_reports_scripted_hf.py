"""What is reported of parsers that a checkpoint describes itself (rows F13, F18, item 14 of the checklist), over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from halfbyte.config import ServerConfig
from halfbyte.entrypoints.answers.parser import AnswerSyntax
from halfbyte.errors import UserError
from tests.e2e.chat_answers import Told, stream_events, told_both

Server = Any
CHAT = "/v1/chat/completions"
CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.args}"}}
TEMPLATE: dict[str, Any] = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<call>", "close": "</call>", "repeats": True, "content": "json", "transform": CALL},
        "content": {"close": "<|end|>"},
    },
}
TOOL = {"type": "function", "function": {"name": "w", "parameters": {"type": "object", "properties": {"c": {"type": "string"}}}}}
STRICT = {"type": "function", "function": TOOL["function"] | {"strict": True}}  # type: ignore[operator]
OSLO = '<call>{"name": "w", "args": {"c": "Oslo"}}</call>'
CALLED = ("w", {"c": "Oslo"})


@pytest.fixture(scope="module")
def server(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(
        info={"max_model_len": 4096},
        response_template=TEMPLATE,
        tool_call_parser="hf",
        reasoning_parser="hf",
        enable_auto_tool_choice=True,
    )


def ask(server: Server, text: str, **fields: Any) -> Told:
    body = {"messages": server.say_chat("hf", text), "tools": [TOOL]} | fields
    (told,) = told_both(partial(server.post, CHAT), body)
    return told


def by_transformers(text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """(content, thoughts, calls) as transformers reads them."""
    from transformers.utils.chat_parsing.response_parser import parse_response

    message = parse_response(text, TEMPLATE, prefix="<|start|>assistant\n", tools=[TOOL])
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message.get("content", ""), message.get("thinking", ""), calls


ANSWERS = {
    "content": "Hello.",
    "reasoning and content": "<think>Look it up.</think>Sure.",
    "one call": f"Sure.{OSLO}",
    "parallel calls": f"<think>Both.</think>{OSLO}{OSLO.replace('Oslo', ' Rome ')}",
    "truncated": "<think>Look it",
}


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS)
def test_f18_answers_mean_what_transformers_makes_of_them(server: Server, text: str) -> None:
    told = ask(server, text)
    calls = [(name, json.loads(arguments)) for name, arguments in told.calls]
    assert (told.content, told.reasoning, calls) == by_transformers(text)
    assert told.finish_reason == ("tool_calls" if calls else "stop")


FORCED: dict[str, dict[str, Any]] = {
    "strict": {"tools": [STRICT]},
    "required": {"tool_choice": "required"},
    "named": {"tool_choice": {"type": "function", "function": {"name": "w"}}},
    "one call": {"parallel_tool_calls": False},
}


@pytest.mark.parametrize("fields", FORCED.values(), ids=FORCED)
def test_f13_a_template_enforces_what_a_request_wants_of_calls(server: Server, fields: dict[str, Any]) -> None:
    """The grammar is written from the template."""
    told = ask(server, OSLO, **fields)
    assert [(name, json.loads(arguments)) for name, arguments in told.calls] == [CALLED]
    grammar = server.model.requests[-1].constraint.grammar
    assert "<call>" in grammar and "</call>" in grammar


def test_f15_a_call_of_a_template_that_is_cut_is_not_lost(server: Server) -> None:
    for limit in range(8, len(OSLO), 5):
        told = ask(server, OSLO, max_tokens=limit)
        assert told.finish_reason == "length" and (told.calls or told.content == OSLO[:limit])


def test_checklist_14_a_call_of_a_template_comes_with_its_end_at_the_latest(server: Server) -> None:
    body = {"messages": server.say_chat("hf", f"{OSLO} Done."), "tools": [TOOL], "stream": True}
    deltas = [json.loads(event)["choices"][0]["delta"] for event in stream_events(server.post(CHAT, body))]
    last_of_call = max(at for at, delta in enumerate(deltas) if "tool_calls" in delta)
    first_of_text = min(at for at, delta in enumerate(deltas) if delta.get("content"))
    assert last_of_call < first_of_text


def test_checklist_14_without_a_template_there_is_no_such_parser(shared: Server) -> None:
    for flags in ({"tool_call_parser": "hf"}, {"reasoning_parser": "hf"}):
        with pytest.raises(UserError, match="response_template"):
            AnswerSyntax(ServerConfig(**flags), shared.tokenizer)
