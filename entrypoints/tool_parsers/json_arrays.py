"""Calls as a JSON array behind a mark: `[{"name": ..., "arguments": {...}}, ...]`.

The families differ in their marks, and in the white space between the objects. Only their grammars care for the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.reading import Reader, Steps, Text
from halfbyte.entrypoints.tool_parsers.grammars import json_call_rules, literal
from halfbyte.entrypoints.tool_parsers.json_calls import opened_calls
from halfbyte.entrypoints.tool_parsers.protocol import CallGrammar, CallReader, JsonTerm


class MarkedArray:
    """opens: marks, any of which begins calls, the model's own first. close: the mark behind them, if there is one.

    writes_close: whether models write it. layout: what a model writes before, between and behind the objects.
    """

    opens: ClassVar[tuple[str, ...]]
    close: ClassVar[str]
    layout: ClassVar[tuple[str, str, str]] = ("[", ", ", "]")
    writes_close: ClassVar[bool] = True

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._opens = tuple(map(marks.mark, self.opens))
        self._close = marks.mark(self.close)

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return Reader(self._read)

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        before, between, behind = map(literal, self.layout)
        more = f"({between} object)*" if parallel else ""
        close = self._marks.terminal(self.close) if self.writes_close else ""
        rules = f"calls: {before} object {more} {behind} {close}\n{json_call_rules('object', tools, json_term)}"
        return CallGrammar(rules, self.opens[0], others=self.opens[1:])

    def _read(self, text: Text) -> Steps[None]:
        while True:
            text.open_call((yield from text.until(*self._opens, sink=text.content)))
            yield from text.skip_space()
            yield from opened_calls(text, (yield from text.expect("[", "{")), self._close)
            yield from text.skip_space(text.content)
            yield from text.accepts(self._close, drops_cut=True)


class Granite(MarkedArray):
    """Granite 3. Its models spell `<tool_call>` where they were told so."""

    opens = ("<|tool_call|>", "<tool_call>")
    close = "</tool_call>"
    writes_close = False


class HunyuanA13b(MarkedArray):
    opens = ("<tool_calls>",)
    close = "</tool_calls>"


class Jamba(MarkedArray):
    opens = ("<tool_calls>",)
    close = "</tool_calls>"
    layout = ("[\n    ", ",\n    ", "\n]")

    def __init__(self, marks: Marks) -> None:
        marks.require("--tool-call-parser jamba", *self.opens, self.close)
        super().__init__(marks)


class Phi4MiniJson(MarkedArray):
    """Phi-4-mini: the word that its prompt asks for, or the marks of its vocabulary."""

    opens = ("functools", "<|tool_call|>")
    close = "<|/tool_call|>"
    writes_close = False
