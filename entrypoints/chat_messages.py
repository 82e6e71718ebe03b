"""Messages as clients write them, turned into messages as chat templates expect them.

Knows the forms that a content may have (null, a text, a list of parts) and what templates do with them; knows no Jinja and no
HTTP. Called by `halfbyte.entrypoints.chat_template` for each render. A UserError names the message that is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from halfbyte.errors import UserError

ToContent = Callable[[list[str]], Any]


def content_maker(loops_over_parts: bool, accepts_texts: bool) -> ToContent:
    """From the texts of a content's parts to what the template takes."""

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
        return _quote_all(message, quote)
    return message


def _quote_all(value: Any, quote: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, Mapping):
        return {name: _quote_all(item, quote) for name, item in value.items()}
    if isinstance(value, list):
        return [_quote_all(item, quote) for item in value]
    return value


def prepare_message(message: object, index: int, to_content: ToContent) -> dict[str, Any]:
    """A message as templates expect it: content always there, no nulls, arguments of tool calls as objects."""
    place = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise UserError(f"{place} must be an object with role and content", param="messages")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise UserError(f"{place} needs a role", param="messages")
    prepared = {name: value for name, value in message.items() if value is not None}
    prepared["content"] = to_content(_texts(message.get("content"), f"{place}.content"))
    reasoning = prepared.get("reasoning", prepared.get("reasoning_content"))
    if reasoning is not None:  # templates know it by either name
        prepared["reasoning"] = prepared["reasoning_content"] = reasoning
    calls = prepared.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise UserError(f"{place}.tool_calls must be a list", param="messages")
        prepared["tool_calls"] = [_tool_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return prepared


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
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise UserError(f"{place} has type {kind[:40]!r}; this model takes parts of type text", param="messages")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise UserError(f"{place} needs a text", param="messages")
    return text


def _tool_call(call: object, place: str) -> dict[str, Any]:
    """A call whose arguments are an object. What the model once wrote and is no JSON object stays as it was."""
    if not isinstance(call, Mapping):
        raise UserError(f"{place} must be an object", param="messages")
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def mark_end(message: dict[str, Any], marker: str) -> None:
    """Put the marker, and a space that shows whether the template trims, behind the message's text."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = f"{content}{marker} "
    elif content:
        content[-1]["text"] += f"{marker} "
    else:
        message["content"] = [{"type": "text", "text": f"{marker} "}]
