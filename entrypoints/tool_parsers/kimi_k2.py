"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` inside a section of calls.

`functions.name:0` is the model's own id of the call, and must come back with the tool's answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.reading import Reader, Steps, Text
from halfbyte.entrypoints.tool_parsers.grammars import literal, schema_of
from halfbyte.entrypoints.tool_parsers.json_calls import arguments_value
from halfbyte.entrypoints.tool_parsers.protocol import CallGrammar, CallReader, JsonTerm
from halfbyte.entrypoints.tool_parsers.sections import read_sections

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
PREFIX = "functions."


class KimiK2:
    def __init__(self, marks: Marks) -> None:
        marks.require("--tool-call-parser kimi_k2", BEGIN, CALL_BEGIN, ARGUMENTS)
        self._marks = marks
        begin, end, call_begin, self._arguments, self._call_end = map(marks.mark, (BEGIN, END, CALL_BEGIN, ARGUMENTS, CALL_END))
        self._section, self._call_marks = (begin, end), (call_begin, self._call_end)

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return Reader(lambda text: read_sections(text, self._section, self._call_marks, self._call))

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        end, opening, arguments, close = map(self._marks.terminal, (END, CALL_BEGIN, ARGUMENTS, CALL_END))
        bodies = " | ".join(
            f"{literal(f'{PREFIX}{tool.name}:')} /[0-9]{{1,4}}/ {arguments} {json_term(schema_of(tool))}" for tool in tools
        )
        calls = "call+" if parallel else "call"
        return CallGrammar(f"calls: {calls} {end}\ncall: {opening} body {close}\nbody: {bodies}\n", BEGIN)

    def _call(self, text: Text) -> Steps[None]:
        identity, mark = yield from text.word(self._arguments, "{", self._call_end)
        if mark != self._arguments:
            text.put_back(mark)
        text.start_call(*_name_and_id(identity.strip()))
        yield from text.skip_space()
        yield from arguments_value(text, self._call_end)


def _name_and_id(identity: str) -> tuple[str, str | None]:
    """The function that `functions.name:0` names, and the id; a bare name is no id."""
    head, colon, index = identity.rpartition(":")
    if colon and index.isdigit():
        return head.removeprefix(PREFIX), identity
    return identity.removeprefix(PREFIX), None
