"""JSON schemas of the fields that the request models leave open: messages, items, tools, prompts, response formats.

They show readers of /docs, and whoever generates clients or requests, what such a field looks like. Nothing is checked against
them: what is refused, and how it is said, is the business of the code that reads the field.
"""

from __future__ import annotations

from typing import Any

Shape = dict[str, Any]

_TEXT: Shape = {"type": "string"}
_FLAG: Shape = {"type": ["boolean", "null"]}


def _object(required: tuple[str, ...], /, **properties: Shape) -> Shape:
    return {"type": "object", "required": list(required), "properties": properties}


def _list(items: Shape, **bounds: int) -> Shape:
    return {"type": "array", "items": items, **bounds}


JSON_SCHEMA = _object(
    (),
    type={"enum": ["object", "array", "string", "integer", "number", "boolean", "null"]},
    properties={"type": "object", "additionalProperties": {"type": "object"}},
    required=_list(_TEXT),
    items={"type": "object"},
    enum={"type": "array", "minItems": 1},
)
_PART = _object(("type", "text"), type={"enum": ["text", "input_text", "output_text"]}, text=_TEXT)
_CALL = _object(("function",), id=_TEXT, type={"const": "function"}, function=_object(("name",), name=_TEXT, arguments=_TEXT))
MESSAGE = _object(
    ("role",),
    role={"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
    content={"anyOf": [_TEXT, _list(_PART), {"type": "null"}]},
    reasoning={"type": ["string", "null"]},
    tool_calls=_list(_CALL),
    tool_call_id=_TEXT,
)
TOOL = _object(
    ("type", "function"),
    type={"const": "function"},
    function=_object(
        ("name",), name=_TEXT | {"minLength": 1, "maxLength": 128}, description=_TEXT, parameters=JSON_SCHEMA, strict=_FLAG
    ),
)
_NAMED = _object(("type", "function"), type={"const": "function"}, function=_object(("name",), name=_TEXT))
TOOL_CHOICE_NAME: Shape = {"enum": ["none", "auto", "required"]}
TOOL_CHOICE: Shape = {
    "oneOf": [
        _NAMED,
        _object(
            ("type", "allowed_tools"),
            type={"const": "allowed_tools"},
            allowed_tools=_object(("mode", "tools"), mode={"enum": ["auto", "required"]}, tools=_list(_NAMED, minItems=1)),
        ),
    ]
}
RESPONSE_FORMAT: Shape = {
    "oneOf": [
        _object(("type",), type={"enum": ["text", "json_object"]}),
        _object(
            ("type", "json_schema"),
            type={"const": "json_schema"},
            json_schema=_object(("name", "schema"), name=_TEXT, schema=JSON_SCHEMA, strict=_FLAG),
        ),
        _object(("type", "format"), type={"const": "structural_tag"}, format={"type": "object"}),
    ]
}
STRUCTURED_OUTPUTS: Shape = {
    "oneOf": [
        _object(("json",), json=JSON_SCHEMA),
        _object(("regex",), regex=_TEXT | {"minLength": 1, "format": "regex"}),
        _object(("choice",), choice=_list(_TEXT | {"minLength": 1}, minItems=1)),
        _object(("grammar",), grammar=_TEXT | {"minLength": 1}),
        _object(("json_object",), json_object={"const": True}),
        _object(("structural_tag",), structural_tag=_TEXT | {"minLength": 1}),
    ]
}
_INPUT_TEXT = _object(("type", "text"), type={"enum": ["input_text", "output_text"]}, text=_TEXT)
_THOUGHT = _object(("type", "text"), type={"const": "reasoning_text"}, text=_TEXT)
INPUT_ITEM: Shape = {
    "oneOf": [
        _object(
            ("role", "content"),
            type={"const": "message"},
            role={"enum": ["user", "assistant", "system", "developer"]},
            content={"anyOf": [_TEXT, _list(_INPUT_TEXT)]},
        ),
        *(
            _object(
                ("type", "call_id", "name", told),
                type={"const": kind},
                call_id=_TEXT | {"minLength": 1},
                name=_TEXT | {"minLength": 1},
                namespace=_TEXT | {"minLength": 1},
                **{told: _TEXT},
            )
            for kind, told in (("function_call", "arguments"), ("custom_tool_call", "input"))
        ),
        _object(
            ("type", "call_id", "output"),
            type={"enum": ["function_call_output", "custom_tool_call_output"]},
            call_id=_TEXT | {"minLength": 1},
            output={"anyOf": [_TEXT, _list(_INPUT_TEXT)]},
        ),
        _object(("type",), type={"const": "reasoning"}, content=_list(_THOUGHT), summary=_list({"type": "object"})),
        _object(("type", "id"), type={"const": "item_reference"}, id=_TEXT),
    ]
}
_TOOL_NAME = _TEXT | {"minLength": 1, "maxLength": 128}
_FLAT_FUNCTION = _object(
    ("type", "name"),
    type={"const": "function"},
    name=_TOOL_NAME,
    description=_TEXT,
    parameters=JSON_SCHEMA,
    strict=_FLAG,
)
_CUSTOM = _object(
    ("type", "name"),
    type={"const": "custom"},
    name=_TOOL_NAME,
    description=_TEXT,
    format=_object(("type",), type={"const": "text"}),
)
FLAT_TOOL: Shape = {
    "oneOf": [
        _FLAT_FUNCTION,
        _CUSTOM,
        _object(
            ("type", "name", "tools"),
            type={"const": "namespace"},
            name=_TEXT | {"minLength": 1, "maxLength": 64},
            description=_TEXT,
            tools=_list({"oneOf": [_FLAT_FUNCTION, _CUSTOM]}, minItems=1),
        ),
    ]
}
_FLAT_NAMED = _object(("type", "name"), type={"enum": ["function", "custom"]}, name=_TEXT, namespace=_TEXT)
FLAT_TOOL_CHOICE: Shape = {
    "oneOf": [
        _FLAT_NAMED,
        _object(
            ("type", "mode", "tools"),
            type={"const": "allowed_tools"},
            mode={"enum": ["auto", "required"]},
            tools=_list(_FLAT_NAMED, minItems=1),
        ),
    ]
}
TEXT_FORMAT: Shape = {
    "oneOf": [
        _object(("type",), type={"enum": ["text", "json_object"]}),
        _object(("type", "name", "schema"), type={"const": "json_schema"}, name=_TEXT, schema=JSON_SCHEMA, strict=_FLAG),
    ]
}
TOKEN_BIASES: Shape = {"propertyNames": {"pattern": "^[0-9]{1,19}$"}}
_TOKEN: Shape = {"type": "integer", "minimum": 0}
PROMPTS: Shape = {
    "oneOf": [
        _TEXT | {"minLength": 1},
        _list(_TEXT | {"minLength": 1}, minItems=1),
        _list(_TOKEN, minItems=1),
        _list(_list(_TOKEN, minItems=1), minItems=1),
    ]
}
STATE: Shape = {"description": "a text, or any JSON"}
ORDER: Shape = {"enum": ["given", "average"]}
_DESCRIPTION: Shape = {"type": ["string", "null"]}
_CHOICES: Shape = {"type": "object", "minProperties": 1, "maxProperties": 255, "additionalProperties": _DESCRIPTION}
_YES_AND_NO: Shape = {"type": ["object", "null"], "properties": {"true": _TEXT, "false": _TEXT}, "additionalProperties": False}
_LEVELS: Shape = _list(_TEXT, minItems=2, maxItems=10) | {"uniqueItems": True}


def _question(name: str, criteria: Shape, *required: str) -> Shape:
    fields = _object(("type", *required), type={"const": name}, instructions=_TEXT, criteria=criteria)
    return fields | {"additionalProperties": False}


QUESTIONS: Shape = {
    "minProperties": 1,
    "maxProperties": 64,
    "propertyNames": {"minLength": 1},
    "additionalProperties": {
        "oneOf": [
            _question("choice", _CHOICES, "criteria"),
            _question("noul", _YES_AND_NO),
            _question("score", _LEVELS, "criteria"),
        ]
    },
}
