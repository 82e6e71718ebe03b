"""Answers as models write them, each with what it means: the data of the conformance tests, and how they run a reader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfbyte.entrypoints.answers.events import CallArguments, CallStart, Content, Event, Reasoning, Tool
from halfbyte.entrypoints.tool_parsers.protocol import CallReader, ToolSyntax


@dataclass(frozen=True)
class Recorded:
    """One whole answer. calls: (name, the exact text of the arguments) in order. In `text` marks are spelled out."""

    name: str
    text: str
    content: str = ""
    calls: Sequence[tuple[str, str]] = ()
    tools: Sequence[Tool] = ()
    reasoning: str = ""
    call_ids: Sequence[str | None] | None = None


@dataclass
class Meaning:
    """Events put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    call_ids: list[str | None] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> Meaning:
        for event in events:
            match event:
                case Content():
                    self.content += event.text
                case Reasoning():
                    self.reasoning += event.text
                case CallStart():
                    assert event.index == len(self.calls), "calls are counted"
                    self.calls.append([event.name, ""])
                    self.call_ids.append(event.call_id)
                case CallArguments():
                    assert event.index == len(self.calls) - 1, "only the last call grows"
                    self.calls[event.index][1] += event.text
        return self


def read(reader: CallReader, pieces: Iterable[str], *, finish: bool = True) -> Meaning:
    """What a reader makes of a text in pieces."""
    meaning = Meaning()
    for piece in pieces:
        meaning.add(reader.feed(piece))
    return meaning.add(reader.finish()) if finish else meaning


def read_with(syntax: ToolSyntax, case: Recorded, pieces: Iterable[str], **options: Any) -> Meaning:
    return read(syntax.reader(case.tools), pieces, **options)
