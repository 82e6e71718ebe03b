"""Anthropic's tools and tool choice in the terms of the chat route. Tools that another server would run are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from halfbyte.errors import UserError

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """As `ChatRequest.tools`; None for no tools. Names and schemas are checked where chat tools are."""
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)] or None


def _tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise UserError(
            f"{place} is {str(kind)[:60]!r}, a tool of Anthropic's own, which this server does not have;"
            " describe a tool with name, description and input_schema",
            param="tools",
        )
    if not isinstance(tool.get("input_schema"), Mapping):
        raise UserError(f"{place} needs an input_schema, a JSON schema", param="tools")
    if tool.get("defer_loading"):
        raise UserError(f"{place}.defer_loading: this server has no search for tools; leave it out", param="tools")
    if tool.get("allowed_callers") not in (None, [], ["direct"]):
        raise UserError(f"{place}.allowed_callers: tools are called directly here; leave it out", param="tools")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    more = {name: tool[name] for name in ("strict", "input_examples") if tool.get(name) is not None}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None} | more}


def read_choice(choice: Mapping[str, Any], has_tools: bool) -> dict[str, Any]:
    """The fields of a ChatRequest that say the same."""
    kind, one_call = choice.get("type"), choice.get("disable_parallel_tool_use")
    if not isinstance(one_call, bool | None):
        raise UserError("tool_choice.disable_parallel_tool_use must be true or false", param="tool_choice")
    asked: Any = _CHOICES.get(kind) if isinstance(kind, str) else None
    if kind == "tool":
        asked = {"type": "function", "function": {"name": choice.get("name")}}
    elif asked is None:
        raise UserError(f"tool_choice.type must be auto, any, tool or none, got {str(kind)[:40]!r}", param="tool_choice")
    if asked == "auto" and not has_tools:
        return {}
    return {"tool_choice": asked, "parallel_tool_calls": not one_call}
