"""What requests ask of tools and structure, from the fields of the wire."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from halfbyte.entrypoints.openai.protocol import ChatRequest
from halfbyte.entrypoints.openai.settings import StructureSettings
from halfbyte.entrypoints.openai.structure import EARLIER_NAMES, asked_structure
from halfbyte.entrypoints.openai.tools import MAX_TOOL_NAME_CHARS, MAX_TOOLS, ToolUse, tool_use
from halfbyte.errors import UserError
from halfbyte.types import StructuredOutputsParams


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})


TOOLS = [function("f"), function("g", parameters={"type": "object"}, strict=True)]


def names(use: ToolUse) -> list[str]:
    return [tool.name for tool in use.tools]


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("choice", "mode", "callable_tools"),
    [
        (None, "auto", ["f", "g"]),
        ("auto", "auto", ["f", "g"]),
        ("none", "none", []),
        ("required", "required", ["f", "g"]),
        (function("g"), "named", ["g"]),
        ({"type": "function", "name": "f"}, "named", ["f"]),
        (allowed("required", {"type": "function", "name": "g"}), "required", ["g"]),
        (allowed("auto", function("f")), "auto", ["f"]),
    ],
)
def test_tool_choice(choice: Any, mode: str, callable_tools: list[str]) -> None:
    use = tool_use(request(tools=TOOLS, tool_choice=choice))
    assert (use.mode, names(use), use.is_forced) == (mode, callable_tools, mode in ("required", "named"))
    assert use.parallel is (mode != "named")
    assert tool_use(request(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)).parallel is (mode == "none")


def test_when_a_grammar_is_needed() -> None:
    loose = [function("f")]
    assert not tool_use(request(tools=loose)).needs_grammar
    assert not tool_use(request(tools=TOOLS, tool_choice="none")).needs_grammar
    assert tool_use(request(tools=TOOLS)).needs_grammar, "a tool is strict"
    assert tool_use(request(tools=loose, parallel_tool_calls=False)).needs_grammar
    assert tool_use(request(tools=loose, tool_choice="required")).needs_grammar
    assert tool_use(request(tools=[*loose, function("h")], tool_choice=allowed("auto", function("h")))).needs_grammar
    assert tool_use(request()) == ToolUse()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [function(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [function("")]}, "tools"),
        ({"tools": [function("a\nb")]}, "tools"),
        ({"tools": [function("x" * (MAX_TOOL_NAME_CHARS + 1))]}, "tools"),
        ({"tools": [function(5)]}, "tools"),  # type: ignore[arg-type]
        ({"tools": [function("f", parameters=[])]}, "tools"),
        ({"tools": [function("f", description=5)]}, "tools"),
        ({"tools": [function("f", strict="yes")]}, "tools"),
        ({"tools": [function("f"), function("f")]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": function("f")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": function("h")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("none", function("f"))}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ],
)
def test_wrong_tools_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UserError) as caught:
        tool_use(request(**fields))
    assert caught.value.param == param


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
         StructuredOutputsParams(json=SCHEMA)),
        ({"response_format": {"type": "structural_tag", "format": {}}},
         StructuredOutputsParams(structural_tag='{"type": "structural_tag", "format": {}}')),
        ({"structured_outputs": {"regex": "a+", "json": None}}, StructuredOutputsParams(regex="a+")),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
         StructuredOutputsParams(json=SCHEMA, whitespace_pattern=" ?")),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "json_object"}},
         StructuredOutputsParams(json_object=True)),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, StructuredOutputsParams(regex="a+")),
        ({"guided_json_object": False}, None),
    ],
)  # fmt: skip
def test_asked_structure(fields: dict[str, Any], expected: StructuredOutputsParams | None) -> None:
    assert asked_structure(request(**fields))[0] == expected


@pytest.mark.parametrize("earlier", [name for name in EARLIER_NAMES if name != "guided_whitespace_pattern"])
def test_earlier_names_are_honoured_with_a_warning(earlier: str, caplog: pytest.LogCaptureFixture) -> None:
    value: Any = {"json": SCHEMA, "choice": ["a"], "json_object": True}.get(EARLIER_NAMES[earlier], "a+")
    with caplog.at_level(logging.WARNING, "halfbyte"):
        asked, param = asked_structure(request(**{earlier: value}))
    assert asked is not None and getattr(asked, EARLIER_NAMES[earlier]) == value and param == earlier
    assert len(caplog.records) == 1 and earlier in caplog.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": 1}}},
            "response_format",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"jsno": SCHEMA}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a\0"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": " "}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
)
def test_wrong_structures_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UserError) as caught:
        asked_structure(request(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"backend": "xgrammar"}, "xgrammar"),
        ({"whitespace": 1}, "whitespace"),
        ({"enable_in_reasoning": 1}, "enable_in_reasoning"),
        ({"whitespace_pattern": 5}, "whitespace_pattern"),
        ({"whitespace_pattern": "x"}, "whitespace_pattern"),
        ({"whitespace_pattern": "("}, "whitespace_pattern"),
    ],
)
def test_settings_that_mean_nothing_here_are_refused(given: dict[str, Any], complaint: str) -> None:
    assert StructureSettings.from_config({"backend": "auto", "enable_in_reasoning": True}).enable_in_reasoning
    with pytest.raises(UserError, match=complaint):
        StructureSettings.from_config(given)
