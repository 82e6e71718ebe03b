"""DeepSeek V3 and R1: `function<｜tool▁sep｜>name`, then arguments in a fence; V3.1: `name<｜tool▁sep｜>{...}`.

Both stand between marks of a call, and these between marks of all calls. Each reads the other's form too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.reading import Reader, Steps, Text
from halfbyte.entrypoints.tool_parsers.grammars import literal, schema_of
from halfbyte.entrypoints.tool_parsers.json_calls import arguments_value
from halfbyte.entrypoints.tool_parsers.protocol import CallGrammar, CallReader, JsonTerm
from halfbyte.entrypoints.tool_parsers.sections import read_sections

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"


class DeepseekV3:
    """between: what stands between two calls."""

    between: ClassVar[str] = "\n"

    def __init__(self, marks: Marks) -> None:
        marks.require("--tool-call-parser deepseek_v3 (or deepseek_v31)", BEGIN, CALL_BEGIN, SEPARATOR)
        self._marks = marks
        begin, end, call_begin, self._separator, self._call_end = map(marks.mark, (BEGIN, END, CALL_BEGIN, SEPARATOR, CALL_END))
        self._section, self._call_marks = (begin, end), (call_begin, self._call_end)

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return Reader(lambda text: read_sections(text, self._section, self._call_marks, self._call))

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        end, opening, close = map(self._marks.terminal, (END, CALL_BEGIN, CALL_END))
        between = literal(self.between) if self.between else ""
        more = f"({between} call)*" if parallel else ""
        bodies = " | ".join(self._body(tool, json_term) for tool in tools)
        return CallGrammar(f"calls: call {more} {end}\ncall: {opening} body {close}\nbody: {bodies}\n", BEGIN)

    def _body(self, tool: Tool, json_term: JsonTerm) -> str:
        head, tail = literal(f"{tool.name}\n{FENCE}json\n"), literal(f"\n{FENCE}")
        return f'"function" {self._marks.terminal(SEPARATOR)} {head} {json_term(schema_of(tool))} {tail}'

    def _call(self, text: Text) -> Steps[None]:
        name, _ = yield from text.word(self._separator)
        yield from text.skip_space()
        if (yield from text.peek()) not in ("{", self._call_end[0]):  # what came was the type of the call
            name, mark = yield from text.word("\n", FENCE, "{", self._call_end)
            text.put_back(mark)
        text.start_call(name)
        yield from text.skip_space()
        yield from text.accepts(f"{FENCE}json", FENCE, drops_cut=True)
        yield from text.skip_space()
        yield from arguments_value(text, FENCE, self._call_end)
        text.end_call()
        yield from text.skip_space()
        yield from text.accepts(FENCE, drops_cut=True)


class DeepseekV31(DeepseekV3):
    between = ""

    def _body(self, tool: Tool, json_term: JsonTerm) -> str:
        return f"{literal(tool.name)} {self._marks.terminal(SEPARATOR)} {json_term(schema_of(tool))}"
