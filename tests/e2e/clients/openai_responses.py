"""An agent turn through the Responses API with the official openai client: two tools, then an answer; all of it streamed.

Usage: openai_responses.py URL MODEL TOOLS. Prints the items, and what each step used, as JSON: once with the history kept by the
server, once sent anew with each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import openai


def run(client: openai.OpenAI, model: str, tools: list[Any], *, kept: bool) -> dict[str, Any]:
    news: list[Any] = [{"role": "user", "content": "What is the weather in Oslo, and the time there?"}]
    items, previous, used = list(news), None, []
    for choice in ("required", {"type": "function", "name": "get_time"}, "none"):
        with client.responses.stream(
            model=model,
            input=news if kept else items,
            tools=tools,
            tool_choice=choice,
            max_output_tokens=64,
            temperature=0,
            store=kept,
            **({"previous_response_id": previous} if kept and previous else {}),
            extra_body={"min_tokens": 8},  # the small model has little to say to results of tools
        ) as stream:
            for _ in stream:
                pass
            answer = stream.get_final_response()
        previous = answer.id
        said = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
        for item in said:
            for part in item.get("content", ()):
                part.pop("parsed", None)
        news = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": json.dumps({"called": item["name"]})}
            for item in said
            if item["type"] == "function_call"
        ]
        items += [*said, *news]
        used.append([answer.status, answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens])
    return {"items": items, "used": used}


def main(url: str, model: str, tools_file: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
    tools = [{"type": "function", **tool["function"]} for tool in json.loads(Path(tools_file).read_text())]
    print(json.dumps([run(client, model, tools, kept=kept) for kept in (True, False)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
