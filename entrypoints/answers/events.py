"""What is read out of an answer as it is written: content, reasoning, tool calls. The words that all parsers share.

Made by the parsers of `tool_parsers` and `reasoning_parsers`, told to clients by the routes. Knows no syntax and no wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Content:
    """More of the text that is meant for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. Calls are counted from 0. call_id: the model's own name for it, None where its syntax has none."""

    index: int
    name: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: the pieces join to the text of one JSON object, unless the answer ends within them."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: the JSON schema of its arguments. strict: they must follow it."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
