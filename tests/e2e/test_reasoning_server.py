"""Thoughts on a real server. The demo model does not think by itself: the template opens a thought, and a budget closes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ASKED = {
    "model": "smollm2-135m",
    "messages": [{"role": "user", "content": "Name the capital of France, as JSON."}],
    "temperature": 0,
    "max_tokens": 80,
}
SCHEMA = {"type": "object", "properties": {"capital": {"type": "string"}}, "required": ["capital"], "additionalProperties": False}
AS_JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
OPENAI_FIELDS = ("max_tokens", "response_format", "tools", "tool_choice")
TOOLS = [{"type": "function", "function": {"name": "answer", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def server(start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    template: Path = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text(TEMPLATE)
    flags = ("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--max-model-len", "512")
    server = start_server("--chat-template", str(template), *flags).ready()
    yield server
    server.stop()


def ask(server: Any, **fields: Any) -> Any:
    """The answer, which is the same streamed."""
    client = server.client()
    extra = {name: fields.pop(name) for name in list(fields) if name not in OPENAI_FIELDS}
    whole = client.chat.completions.create(**ASKED | fields, extra_body=extra)
    thought = content = arguments = ""
    for chunk in client.chat.completions.create(**ASKED | fields, extra_body=extra, stream=True):
        for choice in chunk.choices:
            thought += getattr(choice.delta, "reasoning", None) or ""
            content += choice.delta.content or ""
            arguments += "".join(call.function.arguments for call in choice.delta.tool_calls or ())
            reason = choice.finish_reason or ""
    message = whole.choices[0].message
    assert (thought, content) == (getattr(message, "reasoning", None) or "", message.content or "")
    assert arguments == "".join(call.function.arguments for call in message.tool_calls or ())
    assert reason == whole.choices[0].finish_reason
    return whole


def test_a_thought_that_never_ends_is_all_there_is(server: Any) -> None:
    answer = ask(server, max_tokens=12)
    message = answer.choices[0].message
    assert message.reasoning and message.content is None and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 12


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_ends_the_thought(server: Any, budget: int) -> None:
    answer = ask(server, thinking_token_budget=budget)
    thought = answer.usage.completion_tokens_details.reasoning_tokens
    closing = thought - budget
    assert 1 <= closing <= 4, "the end mark is a few tokens of this vocabulary"
    assert answer.choices[0].message.content, "an answer follows"


def test_a_grammar_holds_behind_the_thought(server: Any) -> None:
    answer = ask(server, thinking_token_budget=6, response_format=AS_JSON)
    message = answer.choices[0].message
    assert message.reasoning and set(json.loads(message.content)) == {"capital"}
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_that_must_not_think_is_held_to_its_grammar_at_once(server: Any) -> None:
    answer = ask(server, response_format=AS_JSON, chat_template_kwargs={"enable_thinking": False})
    message = answer.choices[0].message
    assert not getattr(message, "reasoning", None) and set(json.loads(message.content)) == {"capital"}
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_forced_calls_come_behind_the_thought(server: Any) -> None:
    answer = ask(server, thinking_token_budget=6, tools=TOOLS, tool_choice="required")
    message = answer.choices[0].message
    assert message.reasoning and message.content is None and answer.choices[0].finish_reason == "tool_calls"
    assert all(set(json.loads(call.function.arguments)) == {"capital"} for call in message.tool_calls)


def test_hidden_thoughts_are_thought_all_the_same(server: Any) -> None:
    answer = ask(server, thinking_token_budget=6, response_format=AS_JSON, include_reasoning=False)
    message = answer.choices[0].message
    assert not getattr(message, "reasoning", None) and set(json.loads(message.content)) == {"capital"}
    assert answer.usage.completion_tokens_details.reasoning_tokens > 6


def test_completions_are_held_to_their_grammar_whatever_parser_there_is(server: Any) -> None:
    answer = server.client().completions.create(
        model="smollm2-135m", prompt="Yes or no?", temperature=0, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert answer.choices[0].text in ("yes", "no")
