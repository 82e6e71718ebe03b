"""Pieces of Lark that the grammars of several syntaxes are made of. Knows Lark; knows no mark and no model."""

from __future__ import annotations

import json
from collections.abc import Sequence

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.tool_parsers.protocol import JsonTerm


def literal(text: str) -> str:
    """`text` as a Lark terminal."""
    return json.dumps(text, ensure_ascii=False)


def schema_of(tool: Tool) -> object:
    """The schema of a tool's arguments: one without parameters takes an empty object."""
    return dict(tool.parameters) or {"type": "object", "properties": {}, "additionalProperties": False}


def json_call_rules(
    rule: str, tools: Sequence[Tool], json_term: JsonTerm, *, arguments_key: str = "arguments", opened: bool = False
) -> str:
    """Rules that make `rule` one of the objects `{"name": ..., "arguments": {...}}` of the tools. opened: without a brace."""
    names = [f"{rule}_{index}" for index in range(len(tools))]
    rules = [f"{rule}: {' | '.join(names)}"]
    for name, tool in zip(names, tools, strict=True):
        head = f'"name": {json.dumps(tool.name)}, "{arguments_key}": '
        rules.append(f'{name}: {literal(head if opened else "{" + head)} {name}_arguments "}}"')
        rules.append(f"{name}_arguments: {json_term(schema_of(tool))}")
    return "\n".join(rules) + "\n"
