"""Answers in the Hermes syntax."""

from __future__ import annotations

from tests.unit.tool_parsers.recorded import Recorded

PARSER = "hermes"
RECORDED = [
    Recorded(
        "one call",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
        calls=[("get_weather", '{"city": "Oslo", "days": 3}')],
    ),
    Recorded(
        "text, two calls, the first without arguments",
        'Let me look.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>',
        content="Let me look.",
        calls=[("now", "{}"), ("add", '{"x": 1}')],
    ),
    Recorded(
        "nested values, escapes, marks inside a string",
        '<tool_call>{"name": "write", "arguments": {"text": "a \\"b\\" </tool_call> {[\\u00e9", '
        '"at": [{"x": []}, -1.5e3, null]}}</tool_call>',
        calls=[("write", '{"text": "a \\"b\\" </tool_call> {[\\u00e9", "at": [{"x": []}, -1.5e3, null]}')],
    ),
    Recorded(
        "arguments before the name", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', calls=[("f", '{"a": 1}')]
    ),
    Recorded(
        "arguments as a string", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', calls=[("f", '{"a": 1}')]
    ),
    Recorded("no arguments at all", '<tool_call>{"name": "f"}</tool_call>', calls=[("f", "{}")]),
    Recorded("no arguments: null", '<tool_call>{"name": "f", "arguments": null}</tool_call>', calls=[("f", "{}")]),
    Recorded("no call", "Use <tool> or <tool_cal", content="Use <tool> or <tool_cal"),
    Recorded(
        "what is no call is content",
        'a <tool_call>junk</tool_call> <tool_call>{"name": "f"}</tool_call>',
        content="a <tool_call>junk</tool_call>",
        calls=[("f", "{}")],
    ),
]
