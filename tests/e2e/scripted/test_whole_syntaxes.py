"""gpt-oss, whose answers are written in channels: also read where a request wants nothing of tools and thoughts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Oslo."


@pytest.mark.parametrize(
    ("flags", "content", "reasoning"),
    [
        ({"tool_call_parser": "gpt_oss"}, "Hm.\nOslo.", None),
        ({"reasoning_parser": "gpt_oss"}, "Oslo.", "Hm."),
        ({"tool_call_parser": "gpt_oss", "reasoning_parser": "gpt_oss"}, "Oslo.", "Hm."),
    ],
)
def test_headers_of_channels_are_no_text(
    start_scripted: Callable[..., Any], flags: dict[str, str], content: str, reasoning: str | None
) -> None:
    server = start_scripted(marks=MARKS, special=True, info={"max_model_len": 512}, **flags)
    message = server.post("/v1/chat/completions", {"messages": server.say_chat("q", ANSWER)}).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (content, reasoning)


def test_a_grammar_may_hold_from_the_first_token_of_a_forced_call(start_scripted: Callable[..., Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for enabled in (False, True):
        server = start_scripted(
            tool_call_parser="hermes",
            reasoning_parser="qwen3",
            structured_outputs_config={"enable_in_reasoning": enabled},
            info={"max_model_len": 512},
        )
        body = {"messages": [{"role": "user", "content": "q"}], "tools": tools, "tool_choice": "required", "max_tokens": 1}
        assert server.post("/v1/chat/completions", body).status_code == 200
        constraint = server.model.requests[-1].constraint
        assert constraint.grammar is not None and (constraint.thinking is None) is enabled
