"""An agent turn with the official openai client: the model calls two tools, one after the other, and answers; all of it streamed.

Usage: openai_agent.py URL MODEL TOOLS. Prints the conversation as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import openai


def step(client: openai.OpenAI, model: str, messages: list[Any], tools: list[Any], choice: Any) -> Any:
    """One answer, put together by the client's own helper for streams."""
    with client.chat.completions.stream(
        model=model,
        messages=messages,
        tools=tools,
        tool_choice=choice,
        max_tokens=64,
        temperature=0,
        extra_body={"min_tokens": 8},  # the small model has little to say to results of tools
    ) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0]


def main(url: str, model: str, tools_file: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
    tools = json.loads(Path(tools_file).read_text())
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo, and the time there?"}]
    reasons = []
    for choice in ("required", {"type": "function", "function": {"name": "get_time"}}, "none"):
        answer = step(client, model, messages, tools, choice)
        reasons.append(answer.finish_reason)
        messages.append(answer.message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in answer.message.tool_calls or ():
            result = {"called": call.function.name, "with": json.loads(call.function.arguments)}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    print(json.dumps({"messages": messages, "reasons": reasons}))


if __name__ == "__main__":
    main(*sys.argv[1:])
