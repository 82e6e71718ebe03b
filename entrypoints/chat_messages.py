"""Messages and tools as clients write them, read into one form.

Knows the forms that a content may have (null, a text, a list of parts; of a tool's result any JSON) and the older spellings of
tool calls; knows no template, no Jinja and no HTTP. Called by `halfbyte.entrypoints.chat_template` for each render, before
`halfbyte.entrypoints.chat_roles` arranges what was read. A UserError names the message or the tool that is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halfbyte.errors import UserError

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")

ToContent = Callable[[list[str]], Any]


def content_maker(loops_over_parts: bool, accepts_texts: bool) -> ToContent:
    """From the texts of a content's parts to what the template takes. Parts of one text are joined by a line break."""

    def parts(texts: list[str]) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts if text or len(texts) > 1]

    def whole(texts: list[str]) -> str:
        return "\n".join(texts)

    if not loops_over_parts:
        return whole
    if not accepts_texts:
        return parts
    return lambda texts: parts(texts) if len(texts) > 1 else whole(texts)


def quote_message(message: Any, quote: Callable[[str], str]) -> Any:
    """A message in which control tokens come from the template only: `quote` is applied to each text of it.

    What the assistant said is left as it is: templates look for the model's own marks in it.
    """
    if isinstance(message, Mapping) and message.get("role") != "assistant":
        return quote_all(message, quote)
    return message


def quote_all(value: Any, quote: Callable[[str], str]) -> Any:
    """JSON with `quote` applied to each text in it, names too."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, Mapping):
        return {quote_all(name, quote): quote_all(item, quote) for name, item in value.items()}
    if isinstance(value, list):
        return [quote_all(item, quote) for item in value]
    return value


def read_message(message: object, index: int) -> dict[str, Any]:
    """A message with `content` as the list of its texts, without nulls, with either name of its reasoning.

    The role `function` is read as `tool`, an assistant's `function_call` as one tool call.
    """
    place = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise UserError(f"{place} must be an object with role and content", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UserError(f"{place} needs a role", param="messages")
    read = {name: value for name, value in message.items() if value is not None}
    read["role"] = "tool" if role == "function" else role
    content = message.get("content")
    if read["role"] == "tool" and not _is_content(content):
        content = _to_json(content, place)
    read["content"] = _texts(content, f"{place}.content")
    reasoning = read.get("reasoning", read.get("reasoning_content"))
    if reasoning is not None:  # templates know it by either name
        read["reasoning"] = read["reasoning_content"] = reasoning
    legacy = read.pop("function_call", None)
    calls = read.pop("tool_calls", None) or ([{"function": legacy}] if legacy else None)
    if calls:
        if not isinstance(calls, list):
            raise UserError(f"{place}.tool_calls must be a list", param="messages")
        read["tool_calls"] = [_tool_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return read


def read_tools(tools: Sequence[object] | None) -> list[dict[str, Any]] | None:
    """Tools as templates expect them: {"type": "function", "function": {"name", "parameters", ...}}. None for no tools.

    A function may also stand there by itself. One without parameters takes an empty object.
    """
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)] if tools else None


def _tool(tool: object, place: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise UserError(f'{place} must be {{"type": "function", "function": {{...}}}}', param="tools")
    function = tool.get("function", {name: value for name, value in tool.items() if name != "type"})
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UserError(f"{place} needs a function with a name", param="tools")
    stated = {name: value for name, value in function.items() if value is not None}
    return {
        "type": "function",
        "function": {**stated, "parameters": stated.get("parameters", {"type": "object", "properties": {}})},
    }


def _is_content(value: object) -> bool:
    """Whether this is a content's ordinary form, and not the value that a tool returned."""
    if not isinstance(value, list):
        return value is None or isinstance(value, str)
    return all(isinstance(part, str) or (isinstance(part, Mapping) and ("type" in part or "text" in part)) for part in value)


def _to_json(value: object, place: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise UserError(f"{place}.content must be a text, a list of parts, or JSON", param="messages") from None


def _texts(content: object, place: str) -> list[str]:
    """The texts of a content in any of its forms: null, a text, a list of parts."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise UserError(f"{place} must be a text, a list of parts, or null, got {type(content).__name__}", param="messages")
    return [_part_text(part, f"{place}[{index}]") for index, part in enumerate(content)]


def _part_text(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise UserError(f'{place} must be a part such as {{"type": "text", "text": "..."}}', param="messages")
    if kind not in TEXT_PARTS:
        raise UserError(f"{place} has type {kind[:40]!r}; this model takes parts of type text", param="messages")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise UserError(f"{place} needs a text", param="messages")
    return text


def _tool_call(call: object, place: str) -> dict[str, Any]:
    """A call without nulls, of type function where it has one."""
    if not isinstance(call, Mapping):
        raise UserError(f"{place} must be an object", param="messages")
    stated = {name: value for name, value in call.items() if value is not None}
    return {"type": "function", **stated} if isinstance(stated.get("function"), Mapping) else stated


def mark_end(message: dict[str, Any], marker: str) -> None:
    """Put the marker, and a space that shows whether the template trims, behind the text of a message that is ready to render."""
    content = message["content"]
    if content is None or isinstance(content, str):
        message["content"] = f"{content or ''}{marker} "
    elif content:
        content[-1]["text"] += f"{marker} "
    else:
        message["content"] = [{"type": "text", "text": f"{marker} "}]
