"""Llama 3 and 4 with JSON: `{"name": ..., "parameters": {...}}`, several joined by `; `, as these models write custom tools.

No mark says that such a call begins. So it is one where the answer begins, or behind another call, and where it names a tool of
the request; behind `<|python_tag|>` (Llama 4: `<|python_start|>`) it may stand anywhere and name anything.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.reading import Reader, Steps, Text
from halfbyte.entrypoints.tool_parsers.grammars import json_call_rules
from halfbyte.entrypoints.tool_parsers.json_calls import call_object, opened_calls
from halfbyte.entrypoints.tool_parsers.protocol import CallGrammar, CallReader, JsonTerm

TAGS = ("<|python_tag|>", "<|python_start|>")
END = "<|python_end|>"


class Llama3Json:
    def __init__(self, marks: Marks) -> None:
        self._tags = tuple(map(marks.mark, TAGS))
        self._end = marks.mark(END)

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        names = frozenset(tool.name for tool in tools)
        return Reader(lambda text: self._read(text, names))

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        objects = json_call_rules("object", tools, json_term, arguments_key="parameters", opened=True)
        more = '("; {" object)*' if parallel else ""
        return CallGrammar(f"calls: object {more}\n{objects}", "{", anchored=True)

    def _read(self, text: Text, names: Container[str]) -> Steps[None]:
        may_be_bare = not text.has_content
        while True:
            opening = None
            if may_be_bare:
                yield from text.skip_space(text.content)
                opening = yield from text.accepts("{", *self._tags)
            if opening is None:
                opening = yield from text.until(*self._tags, sink=text.content)
            text.open_call(opening)
            if opening == "{":
                yield from opened_calls(text, opening, names=names)
            else:
                yield from text.skip_space()
                yield from call_object(text, self._end)
            yield from text.skip_space(text.content)
            yield from text.accepts(";", self._end, drops_cut=True)
            may_be_bare = True
