"""A step with a tool and one without through litellm's Responses API.

Usage: litellm_responses.py URL MODEL TOOLS. Prints the items and the status of the last step as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look-up of prices on the network

import litellm


def main(url: str, model: str, tools_file: str) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in json.loads(Path(tools_file).read_text())]
    items: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    fields: dict[str, Any] = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "unused", "temperature": 0}
    answer = litellm.responses(input=items, tools=tools, tool_choice="required", max_output_tokens=64, **fields)
    said = [item if isinstance(item, dict) else item.model_dump(exclude_none=True) for item in answer.output]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
        for item in said
        if item["type"] == "function_call"
    ]
    items += [*said, *results]
    last = None
    for event in litellm.responses(input=items, tools=tools, tool_choice="none", max_output_tokens=16, stream=True, **fields):
        last = event
    print(json.dumps({"items": items, "status": last.response.status}))


if __name__ == "__main__":
    main(*sys.argv[1:])
