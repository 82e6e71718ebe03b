"""Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen2.5, Qwen3, SmolLM and Hermes write it."""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.reading import Reader, Steps, Text
from halfbyte.entrypoints.tool_parsers.grammars import json_call_rules
from halfbyte.entrypoints.tool_parsers.json_calls import call_object
from halfbyte.entrypoints.tool_parsers.protocol import CallGrammar, CallReader, JsonTerm

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._open, self._close = marks.mark(OPEN), marks.mark(CLOSE)

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return Reader(self._read)

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        opening, close = self._marks.terminal(OPEN), self._marks.terminal(CLOSE)
        more = f'("\\n" {opening} call)*' if parallel else ""
        rules = f'calls: call {more}\ncall: "\\n" object "\\n" {close}\n{json_call_rules("object", tools, json_term)}'
        return CallGrammar(rules, OPEN)

    def _read(self, text: Text) -> Steps[None]:
        while True:
            text.open_call((yield from text.until(self._open, sink=text.content)))
            yield from text.skip_space()
            yield from call_object(text, self._close)
            yield from text.skip_space()
            yield from text.accepts(self._close, drops_cut=True)
