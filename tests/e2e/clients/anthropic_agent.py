"""An agent turn with the official anthropic client: the model calls two tools, one after the other, and answers; all streamed.

Usage: anthropic_agent.py URL MODEL TOOLS. Prints the conversation as JSON, with the prompt tokens of each request as they were
counted beforehand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anthropic


def main(url: str, model: str, tools_file: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="unused")
    functions = [tool["function"] for tool in json.loads(Path(tools_file).read_text())]
    tools: Any = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions]
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo, and the time there?"}]
    reasons, counted, used = [], [], []
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "get_time"}, {"type": "none"}]
    for choice in choices:
        prompt = {"model": model, "messages": messages, "tools": tools, "tool_choice": choice}
        counted.append(client.messages.count_tokens(**prompt).input_tokens)
        with client.messages.stream(**prompt, max_tokens=64, extra_body={"temperature": 0}) as stream:
            answer = stream.get_final_message()
        reasons.append(answer.stop_reason)
        used.append(answer.usage.model_dump(exclude_none=True))
        messages.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": json.dumps({"called": block.name, "with": block.input})}
            for block in answer.content
            if block.type == "tool_use"
        ]
        if results:
            messages.append({"role": "user", "content": results})
    print(json.dumps({"messages": messages, "reasons": reasons, "counted": counted, "used": used}))


if __name__ == "__main__":
    main(*sys.argv[1:])
