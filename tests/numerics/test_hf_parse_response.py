"""Answers read by a response template mean what transformers makes of them, whole and in pieces.

Its templates for checkpoints that bring none of their own are subjects too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers.hf import ResponseTemplateSyntax
from tests.unit.tool_parsers.recorded import Meaning, read
from tests.unit.tool_parsers.test_hf import ANSWERS

# What transformers cannot read: it raises, reads delimiters inside of JSON strings, or keeps only the last part of content.
OURS_ALONE = {
    "truncated call",
    "truncated before the name",
    "tags cut short",
    "a value without its closer",
    "arguments before the name, a delimiter in a string",
    "what is no call is content",
    "no arguments, no closer",
    "a list that is cut",
    "a region that cannot be read is content",
    "strings byte for byte",
}
SHARED = [(template, case) for template, case in ANSWERS if case.name not in OURS_ALONE]

QWEN3 = [
    "Hello there.<|im_end|>",
    "<think>\nLet me see.\n</think>\n\nHello.<|im_end|>",
    "<think>\nhm\n</think>\n\nSure\n"
    '<tool_call>\n{"name": "f", "arguments": {"a": "\U0001f600 \\n", "b": [1, {}]}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {"x": null}}\n</tool_call><|im_end|>',
    "<think>\nLet me s",
]
QWEN3_5 = [
    "Hello there.<|im_end|>\n<|endoftext|>",
    "<think>\nLet me see.\n</think>\n\nHello.<|im_end|>\n<|endoftext|>",
    "Sure\n\n<tool_call>\n<function=f>\n"
    "<parameter=n>\n3\n</parameter>\n<parameter=t>\n a <b>\n\n c\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=f>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=g>\n<parameter=a>\n[1]\n</parameter>\n</function>\n</tool_call>",
    "Half of a sen",
]
GEMMA4 = [
    "Hello there.<turn|>",
    "<|channel>thought\nLet me see.<channel|>Hello.<turn|>",
    '<|channel>thought\nhm<channel|>Sure<|tool_call>call:f{n:3,t:<|"|>a {b}: "c"<|"|>,o:{x:[true,null]}}<tool_call|><turn|>',
    '<|tool_call>call:f{}<tool_call|><|tool_call>call:g{a:[<|"|>x<|"|>]}<tool_call|><|tool_response>',
    "<|channel>thought\nLet me s",
]
FAMILIES = {"qwen3": QWEN3, "qwen3_5": QWEN3_5, "gemma4": GEMMA4}
TOOLS = [Tool("f", {"type": "object", "properties": {"n": {"type": "integer"}, "t": {"type": "string"}}}), Tool("g")]


def by_transformers(template: Mapping[str, Any], text: str, tools: list[Tool]) -> dict[str, Any]:
    """The message that transformers reads."""
    from transformers.utils.chat_parsing.response_parser import parse_response

    declared = [{"type": "function", "function": {"name": tool.name, "parameters": dict(tool.parameters)}} for tool in tools]
    message: dict[str, Any] = parse_response(text, dict(template), prefix="", tools=declared)
    return message


def as_message(meaning: Meaning) -> tuple[str, str, list[tuple[str, Any]]]:
    return meaning.content, meaning.reasoning, [(name, json.loads(arguments)) for name, arguments in meaning.calls]


def of_transformers(message: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    found = message.get("tool_calls", [])
    calls = [call["function"] for call in (found if isinstance(found, list) else [found])]
    return message.get("content", ""), message.get("thinking", ""), [(call["name"], call["arguments"]) for call in calls]


def check(template: Mapping[str, Any], text: str, tools: list[Tool]) -> None:
    expected = of_transformers(by_transformers(template, text, tools))
    syntax = ResponseTemplateSyntax(Marks(), template)
    assert as_message(read(syntax.reader(tools), [text])) == expected
    assert as_message(read(syntax.reader(tools), text)) == expected
    draw = random.Random(text)
    for at in range(1, len(text)):
        other = draw.randrange(at, len(text))
        assert as_message(read(syntax.reader(tools), [text[:at], text[at:other], text[other:]])) == expected, (at, other)


@pytest.mark.parametrize(("template", "case"), SHARED, ids=[case.name for _, case in SHARED])
def test_recorded_answers_mean_the_same(template: Mapping[str, Any], case: Any) -> None:
    plain = {key: {k: v for k, v in field.items() if v is not None} for key, field in template["fields"].items()}
    check({**template, "fields": plain}, case.text, list(case.tools))


@pytest.mark.parametrize(("family", "text"), [(family, text) for family, texts in FAMILIES.items() for text in texts])
def test_f18_answers_of_families_mean_the_same(family: str, text: str) -> None:
    """Content; a thought and content; calls; several calls; a text that is cut."""
    from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as fallbacks

    template = next(template for families, template in fallbacks.items() if family in families)
    check(template, text, TOOLS)
