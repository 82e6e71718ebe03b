"""The tools of a request: which of them the model is offered, under which name, and what a call of one is called by clients.

A model knows functions, each by one name. So a function of a namespace is offered under both names in one, and a custom tool as
a function of one text. Tools that run elsewhere than at the client are left out where others remain: an offer of what the model
cannot use changes no answer. The response says which tools it was made with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.errors import UserError

# Made for services and models of OpenAI's own: no model here was taught them, or nothing here runs them.
FOREIGN = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)
OFFERED = ("function", "custom")
TAKEN = (*OFFERED, "namespace")
INPUT = "input"  # what the one text of a custom tool is called
_ONE_TEXT = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT], "additionalProperties": False}
_OF_FUNCTION = ("name", "description", "parameters", "strict")
_FUNCTION = {"type": "function"}


def offered_name(name: str, namespace: str | None) -> str:
    """The one name under which a model knows a tool."""
    return name if namespace is None else f"{namespace}__{name}"


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as its client knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class RequestTools:
    """The tools of one request.

    given: as the client wrote them, without those left out; offered: as `ChatRequest.tools`.
    UserError for a tool that is neither taken nor known, and where nothing is left to offer.
    """

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        self.given: list[dict[str, Any]] = []
        self.offered: list[dict[str, Any]] = []
        self._by_name: dict[str, ClientTool] = {}
        left_out: list[str] = []
        for index, tool in enumerate(given):
            if (kind := tool.get("type")) in FOREIGN:
                left_out.append(str(kind))
                continue
            self._read(tool, f"tools[{index}]")
            self.given.append(dict(tool))
        if left_out and not self.offered:
            raise UserError(
                f"tools: {', '.join(left_out)} cannot be used here: this server runs no tools of its own;"
                f" it takes those of type {', '.join(TAKEN)}, which the client runs",
                param="tools",
            )

    def called(self, name: str) -> ClientTool:
        """Whose call it is. A name that was not offered stands for itself."""
        return self._by_name.get(name) or ClientTool(name)

    def _read(self, tool: Mapping[str, Any], place: str) -> None:
        if tool.get("type") != "namespace":
            self._offer(tool, place, None)
            return
        namespace, tools = tool.get("name"), tool.get("tools")
        if not isinstance(namespace, str) or not namespace:
            raise UserError(f"{place}.name must be the name of the namespace, got {short(namespace)}", param="tools")
        if not isinstance(tools, list) or not all(isinstance(member, Mapping) for member in tools):
            raise UserError(f"{place}.tools must be a list of tools", param="tools")
        about, first = tool.get("description"), len(self.offered)
        if not isinstance(about, str | None):
            raise UserError(f"{place}.description must be a text", param="tools")
        for index, member in enumerate(tools):
            self._offer(member, f"{place}.tools[{index}]", namespace)
        if about and first < len(self.offered):  # said once, before the first of them
            function = self.offered[first]["function"]
            described = function.get("description")
            if isinstance(described, str | None):  # others are refused where functions are read
                function["description"] = f"{about}\n\n{described}" if described else about

    def _offer(self, tool: Mapping[str, Any], place: str, namespace: str | None) -> None:
        match tool.get("type"):
            case "function":
                if "function" in tool:
                    raise UserError(f"{place}: name, description, parameters and strict stand in the tool itself", param="tools")
                function = {name: tool[name] for name in _OF_FUNCTION if name in tool}
            case "custom":
                function = _as_function(tool, place)
            case kind:
                taken = ", ".join(TAKEN) if namespace is None else f"{', '.join(OFFERED)} there"
                raise UserError(f"{place}.type is {short(kind)}; this server takes {taken}", param="tools")
        name = function.get("name")
        if isinstance(name, str):  # others are refused where functions are read
            function["name"] = offered_name(name, namespace)
            self._by_name[function["name"]] = ClientTool(name, namespace, tool["type"] == "custom")
        self.offered.append(_FUNCTION | {"function": function})


def _as_function(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    form = tool.get("format")
    kind = form.get("type") if isinstance(form, Mapping) else "text" if form is None else form
    if kind == "grammar":
        raise UserError(
            f"{place}.format is a grammar, which cannot be kept to in a tool's input; leave format out, and check the input",
            "tools",
        )
    if kind != "text":
        raise UserError(f"{place}.format.type must be text, got {short(kind)}", param="tools")
    about = {"description": tool["description"]} if "description" in tool else {}
    return {"name": tool.get("name"), **about, "parameters": _ONE_TEXT}


def read_choice(given: str | Mapping[str, Any] | None, *, has_tools: bool) -> str | dict[str, Any] | None:
    """As `ChatRequest.tool_choice`. "auto" of nothing is "none", as clients send it."""
    if given == "auto" and not has_tools:
        return "none"
    if given is None or isinstance(given, str):
        return given
    match given.get("type"):
        case "function" | "custom":
            return _named(given)
        case "allowed_tools":
            tools = given.get("tools")
            named = list(_allowed(tools)) if isinstance(tools, list) else tools
            return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode"), "tools": named}}
    raise UserError(
        'tool_choice must be "none", "auto", "required", {"type": "function" or "custom", "name": ...} or'
        ' {"type": "allowed_tools", "mode": ..., "tools": [...]}',
        param="tool_choice",
    )


def _allowed(tools: Sequence[object]) -> Iterator[object]:
    for tool in tools:
        if not isinstance(tool, Mapping):
            yield tool
        elif tool.get("type") not in FOREIGN:
            yield _named(tool)


def _named(given: Mapping[str, Any]) -> dict[str, Any]:
    name, namespace = given.get("name"), given.get("namespace")
    if isinstance(name, str) and isinstance(namespace, str):
        name = offered_name(name, namespace)
    return _FUNCTION | {"function": {"name": name}}


def short(value: object) -> str:
    """A value of a request as an error names it."""
    return repr(value[:40]) if isinstance(value, str) else type(value).__name__
