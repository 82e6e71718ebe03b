"""JSON schemas of the fields that the request models leave open, for readers of the API's schema; nothing is held against them.

As `halfbyte.entrypoints.openai.shapes`, in Anthropic's terms.
"""

from __future__ import annotations

from halfbyte.entrypoints.openai.shapes import Shape

_TEXT: Shape = {"type": "string"}
_OBJECT: Shape = {"type": "object"}
_FLAG: Shape = {"type": ["boolean", "null"]}


def _object(kind: str, required: tuple[str, ...] = (), /, **properties: Shape) -> Shape:
    return {"type": "object", "required": ["type", *required], "properties": {"type": {"const": kind}, **properties}}


TEXT_BLOCK = _object("text", ("text",), text=_TEXT, cache_control={"type": ["object", "null"]})
_TEXTS: Shape = {"anyOf": [_TEXT, {"type": "array", "items": TEXT_BLOCK}]}
_BLOCK: Shape = {
    "oneOf": [
        TEXT_BLOCK,
        _object("thinking", ("thinking",), thinking=_TEXT, signature=_TEXT),
        _object("redacted_thinking", data=_TEXT),
        _object(
            "tool_use",
            ("id", "name", "input"),
            id=_TEXT | {"minLength": 1},
            name=_TEXT | {"minLength": 1},
            input=_OBJECT,
        ),
        _object("tool_result", ("tool_use_id",), tool_use_id=_TEXT | {"minLength": 1}, content=_TEXTS, is_error=_FLAG),
    ]
}
MESSAGE: Shape = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _BLOCK}]},
    },
}
TOOL: Shape = {
    "type": "object",
    "required": ["name", "input_schema"],
    "properties": {
        "type": {"enum": ["custom", None]},
        "name": _TEXT | {"minLength": 1, "maxLength": 128},
        "description": _TEXT,
        "input_schema": _OBJECT,
        "strict": _FLAG,
    },
}
TOOL_CHOICE: Shape = {
    "oneOf": [
        _object("auto", disable_parallel_tool_use=_FLAG),
        _object("any", disable_parallel_tool_use=_FLAG),
        _object("tool", ("name",), name=_TEXT, disable_parallel_tool_use=_FLAG),
        _object("none"),
    ]
}
_DISPLAY: Shape = {"enum": ["summarized", "omitted", None]}
THINKING: Shape = {
    "oneOf": [
        _object("enabled", ("budget_tokens",), budget_tokens={"type": "integer", "minimum": 1024}, display=_DISPLAY),
        _object("adaptive", display=_DISPLAY),
        _object("disabled"),
    ]
}
OUTPUT_FORMAT = _object("json_schema", ("schema",), schema=_OBJECT)
OUTPUT_CONFIG: Shape = {
    "type": "object",
    "properties": {"effort": {"enum": ["low", "medium", "high", "xhigh", "max", None]}, "format": OUTPUT_FORMAT},
}
_TURNS = _object("thinking_turns", ("value",), value={"type": "integer", "minimum": 1})
CONTEXT_MANAGEMENT: Shape = {
    "type": "object",
    "properties": {
        "edits": {
            "type": "array",
            "items": _object("clear_thinking_20251015", keep={"anyOf": [{"enum": ["all"]}, _TURNS]}),
        }
    },
}
