"""Answers that are calls as a whole: `{"name": ..., "arguments": {...}}` or an array of such objects.

No mark says that such a call begins. So it is one only where the answer begins with it and it names a tool of the request; a
fence may be around it. `xlam` takes the marks of other families too, which its models write now and then.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import ClassVar

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.reading import Reader, Steps, Text
from halfbyte.entrypoints.tool_parsers.grammars import json_call_rules
from halfbyte.entrypoints.tool_parsers.json_calls import opened_calls
from halfbyte.entrypoints.tool_parsers.protocol import CallGrammar, CallReader, JsonTerm


class JsonAnswer:
    """opens, closes: texts that may stand around the JSON."""

    opens: ClassVar[tuple[str, ...]] = ("```json", "```")
    closes: ClassVar[tuple[str, ...]] = ("```",)

    def __init__(self, marks: Marks) -> None:
        self._opens = tuple(map(marks.mark, self.opens))
        self._closes = tuple(map(marks.mark, self.closes))

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        names = frozenset(tool.name for tool in tools)
        return Reader(lambda text: self._read(text, names))

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        more = '(", " object)*' if parallel else ""
        return CallGrammar(
            f'calls: object {more} "]"\n{json_call_rules("object", tools, json_term)}',
            "[",
            anchored=True,
            others=("{", *self.opens),
        )

    def _read(self, text: Text, names: Container[str]) -> Steps[None]:
        while not text.has_content:
            yield from text.skip_space(text.content)
            opening = yield from text.accepts("{", "[", *self._opens)
            if opening is None:
                return
            text.open_call(opening)
            if opening not in self._opens:
                yield from opened_calls(text, opening, names=names)
                continue
            yield from text.skip_space()
            yield from opened_calls(text, (yield from text.expect("{", "[")), names=names)
            yield from text.skip_space()
            yield from text.accepts(*self._closes, drops_cut=True)


class Xlam(JsonAnswer):
    opens = (*JsonAnswer.opens, "[TOOL_CALLS]", "<tool_call>")
    closes = (*JsonAnswer.closes, "</tool_call>")
