"""Two turns of a coding agent on /v1/messages, in the shapes in which such clients send them (the texts are our own).

The first request is recorded whole; the second is what a client makes of the answer to it: the answer's blocks sent back as they
came, results for its calls, and what changes between two requests besides (marks for a cache, a header for another's billing).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECORDED = json.loads((Path(__file__).parent / "recorded" / "coding_agent.json").read_text(encoding="utf-8"))
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "x-api-key": "unused",
    "x-app": "cli",
}


def first_request(**fields: Any) -> dict[str, Any]:
    return copy.deepcopy(RECORDED["request"]) | fields


def second_request(first: dict[str, Any], answer: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """answer: the blocks of the answer to `first`."""
    request = copy.deepcopy(first)
    billing = request["system"][0]["text"]
    request["system"][0]["text"] = billing.replace("cch=00f3a", "cch=9b2c1")
    del request["messages"][-1]["content"][-1]["cache_control"]
    calls = [block for block in answer if block["type"] == "tool_use"]
    results = RECORDED["results"] + [{"content": ""}] * len(calls)
    told = [{"type": "tool_result", "tool_use_id": call["id"], **results[i]} for i, call in enumerate(calls)]
    told[-1] |= {"cache_control": {"type": "ephemeral"}}
    then = {"type": "text", "text": RECORDED["then"]}
    request["messages"] += [{"role": "assistant", "content": list(answer)}, {"role": "user", "content": [*told, then]}]
    return request
