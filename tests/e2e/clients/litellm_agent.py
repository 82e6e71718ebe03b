"""The same agent turn with litellm, which most agent frameworks call models through; streamed, put together by its own helper.

Usage: litellm_agent.py URL MODEL TOOLS [openai|anthropic]: the API that it is to speak. Prints the conversation as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look-up of prices on the network

import litellm

# `openai/` passes tools on as they are; `hosted_vllm/` takes additionalProperties out of them. Messages have no min_tokens.
APIS: dict[str, dict[str, Any]] = {
    "openai": {"path": "/v1", "more": {"extra_body": {"min_tokens": 8}}},
    "anthropic": {"path": "", "more": {}},
}


def main(url: str, model: str, tools_file: str, api: str = "openai") -> None:
    tools = json.loads(Path(tools_file).read_text())
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo, and the time there?"}]
    reasons = []
    for choice in ("required", {"type": "function", "function": {"name": "get_time"}}, "none"):
        chunks = list(
            litellm.completion(
                model=f"{api}/{model}",
                api_base=f"{url}{APIS[api]['path']}",
                api_key="unused",
                messages=messages,
                tools=tools,
                tool_choice=choice,
                stream=True,
                max_tokens=64,
                temperature=0,
                **APIS[api]["more"],
            )
        )
        answer = litellm.stream_chunk_builder(chunks, messages=messages).choices[0]
        reasons.append(answer.finish_reason)
        messages.append(answer.message.model_dump(exclude_none=True))
        for call in answer.message.tool_calls or ():
            result = {"called": call.function.name, "with": json.loads(call.function.arguments)}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    print(json.dumps({"messages": messages, "reasons": reasons}))


if __name__ == "__main__":
    main(*sys.argv[1:])
