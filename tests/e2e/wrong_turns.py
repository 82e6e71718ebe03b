"""Values of fields that /v1/messages and /v1/messages/count_tokens refuse, both of them, whatever the server was started with."""

from __future__ import annotations

from typing import Any

WRONG_TURNS: dict[str, list[Any]] = {
    "messages": [
        [], None, "hi", [{"content": "x"}], [{"role": "user", "content": 5}], [{"role": 5}], [{"role": "tool", "content": ""}],
        [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}],
    ],
    "system": [[{"type": "image"}], [{"type": "text"}]],
    "tools": [[{"name": "f"}], [{"type": "web_search_20250305", "name": "w"}], [{"name": "f", "input_schema": {}}]],
    "tool_choice": [{}, {"type": "any"}, {"type": "tool", "name": "f"}, {"type": "required"}],
    "thinking": [{}, {"type": "enabled"}, {"type": "enabled", "budget_tokens": 5}, {"type": "adaptive", "display": "x"}],
    "output_config": [{"effort": "extreme"}, {"format": {}}, {"format": {"type": "json_schema"}}],
    "output_format": [{"type": "text"}],
    "context_management": [{"edits": [{"type": "compact"}]}, {"edits": 5}],
    "chat_template": ["{{ messages }}"],
    "chat_template_kwargs": [{name: 1} for name in ("tokenize", "chat_template", "return_tensors", "conversation", "tools")],
    "container": ["c"], "mcp_servers": [[{"url": "http://x"}]], "kv_transfer_params": [{"do_remote_decode": True}], "seed": [1],
}  # fmt: skip
