"""A request's tools, and what it lets the model do with them. Checks fields; knows no syntax of any model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.openai.protocol import ChatRequest
from halfbyte.errors import UserError

MAX_TOOLS = 512
MAX_TOOL_NAME_CHARS = 128

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """tools: those that may be called, none for mode "none". parallel: whether an answer may hold several calls."""

    mode: Mode = "none"
    tools: tuple[Tool, ...] = ()
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def needs_grammar(self) -> bool:
        """Whether the answer is to be kept to what was asked: calls at all, arguments that follow a schema, at most one call."""
        return self.is_forced or (self.mode == "auto" and (not self.parallel or any(tool.strict for tool in self.tools)))


def tool_use(request: ChatRequest) -> ToolUse:
    """UserError names the field that is wrong."""
    choice = request.tool_choice
    if request.tools is None:
        if choice not in (None, "none"):
            raise UserError("tool_choice needs tools", param="tool_choice")
        return ToolUse()
    tools = parse_tools(request.tools)
    parallel = request.parallel_tool_calls is not False
    if choice in (None, "auto"):
        return ToolUse("auto", tools, parallel)
    if choice == "none":
        return ToolUse()
    if choice == "required":
        return ToolUse("required", tools, parallel)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _allowed(choice, tools, parallel)
    if isinstance(choice, Mapping) and choice.get("type", "function") == "function":
        return ToolUse("named", (_named(choice, tools),), parallel=False)
    raise UserError(
        'tool_choice must be "none", "auto", "required", or {"type": "function", "function": {"name": ...}}', param="tool_choice"
    )


def parse_tools(given: list[dict[str, Any]]) -> tuple[Tool, ...]:
    """The functions of a request's `tools`. UserError says which one is wrong, and how."""
    if not 0 < len(given) <= MAX_TOOLS:
        raise UserError(f"tools must hold 1 to {MAX_TOOLS} tools, got {len(given)}; leave it out for none", param="tools")
    tools: dict[str, Tool] = {}
    for index, entry in enumerate(given):
        tool = _tool(entry, f"tools[{index}]")
        if tool.name in tools:
            raise UserError(f"tools[{index}]: there are two tools named {tool.name!r}", param="tools")
        tools[tool.name] = tool
    return tuple(tools.values())


def _tool(entry: Mapping[str, Any], place: str) -> Tool:
    if entry.get("type", "function") != "function":
        raise UserError(f"{place}.type is {str(entry['type'])[:40]!r}; only function tools can be called here", param="tools")
    function = entry.get("function")
    if not isinstance(function, Mapping):
        raise UserError(f"{place} needs a function: an object with name and parameters", param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TOOL_NAME_CHARS or not name.isprintable() or name != name.strip():
        raise UserError(f"{place}.function.name must be a printable name of 1 to {MAX_TOOL_NAME_CHARS} characters", param="tools")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        raise UserError(f"{place}.function.parameters must be a JSON schema, an object", param="tools")
    if not isinstance(function.get("description"), (str, type(None))):
        raise UserError(f"{place}.function.description must be a text", param="tools")
    strict = function.get("strict", entry.get("strict"))
    if strict is not None and not isinstance(strict, bool):
        raise UserError(f"{place}.function.strict must be true or false", param="tools")
    return Tool(name, parameters, bool(strict))


def _named(choice: Mapping[str, Any], tools: tuple[Tool, ...]) -> Tool:
    """The tool that {"type": "function", "function": {"name": ...}} means."""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    for tool in tools:
        if tool.name == name:
            return tool
    raise UserError(
        f"tool_choice names {str(name)[:100]!r}; the tools are {', '.join(tool.name for tool in tools)[:500]}",
        param="tool_choice",
    )


def _allowed(choice: Mapping[str, Any], tools: tuple[Tool, ...], parallel: bool) -> ToolUse:
    """{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}: some of the tools, auto or required."""
    allowed = choice.get("allowed_tools")
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    entries = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(entries, list) or not all(isinstance(e, Mapping) for e in entries):
        raise UserError('tool_choice.allowed_tools needs mode ("auto" or "required") and tools', param="tool_choice")
    chosen = list({tool.name: tool for tool in (_named(entry, tools) for entry in entries)}.values())
    if not chosen:
        raise UserError("tool_choice.allowed_tools.tools must name a tool", param="tool_choice")
    use = ToolUse(mode, tuple(chosen), parallel)
    # What is not allowed is kept out by a grammar, which the model's own choice has only for strict tools.
    return (
        use
        if mode == "required" or len(chosen) == len(tools)
        else replace(use, tools=tuple(replace(t, strict=True) for t in chosen))
    )
