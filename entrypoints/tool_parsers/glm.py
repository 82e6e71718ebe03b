"""GLM-4.5 and later: `<tool_call>NAME`, then pairs of `<arg_key>K</arg_key>` and `<arg_value>V</arg_value>`, `</tool_call>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.reading import NotACall, Reader, Steps, Text
from halfbyte.entrypoints.tool_parsers.element_grammar import ParameterRules
from halfbyte.entrypoints.tool_parsers.element_reading import ParameterReader, is_name
from halfbyte.entrypoints.tool_parsers.element_shapes import ParameterShape, sign
from halfbyte.entrypoints.tool_parsers.grammars import literal
from halfbyte.entrypoints.tool_parsers.protocol import CallGrammar, CallReader, JsonTerm
from halfbyte.entrypoints.tool_parsers.typed import ArgumentsWriter

TOKENS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


class Glm45:
    """Versions differ in the gap alone: the white space behind each element."""

    parser: ClassVar[str] = "glm45"
    gap: ClassVar[str] = "\n"

    def __init__(self, marks: Marks) -> None:
        marks.require(f"--tool-call-parser {self.parser}", *TOKENS)
        self._open, self._close, key, key_end, value, value_end = (sign(marks, text) for text in TOKENS)
        shape = ParameterShape(key, {key_end: None}, value_end, pad="", gap=self.gap, value_opening=value)
        self._key = key
        self._parameters = ParameterReader(shape, {self._close: (), self._open: ()})
        self._rules = ParameterRules(shape, [self._close, self._open])

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        by_name = {tool.name: tool for tool in tools}
        return Reader(lambda text: self._read(text, by_name))

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        gap = f"{literal(self.gap)} " if self.gap else ""
        more = f" ({gap}{self._open.term} call)*" if parallel else ""
        rules = [f"calls: call{more}", f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
        for index, tool in enumerate(tools):
            rules.append(f"call_{index}: {literal(tool.name + self.gap)} parameters_{index} {self._close.term}")
            rules.append(self._rules.rules(f"parameters_{index}", tool, json_term))
        return CallGrammar("\n".join([*rules, self._rules.shared]), TOKENS[0])

    def _read(self, text: Text, tools: Mapping[str, Tool]) -> Steps[None]:
        mark = self._close.read
        while True:
            if mark != self._open.read:
                mark = yield from text.until(self._open.read, sink=text.content)
            text.open_call(mark)
            yield from text.skip_space()
            name, end = yield from text.word("\n", self._key.read, self._close.read, self._open.read)
            name = name.strip()
            text.put_back(end)
            yield from text.skip_space()
            next_mark = yield from text.expect(self._key.read, self._close.read)
            if not is_name(name):
                raise NotACall
            text.put_back(next_mark)
            text.start_call(name)
            mark = yield from self._parameters.read(text, ArgumentsWriter(tools.get(name), text.arguments))
            text.end_call()


class Glm47(Glm45):
    parser = "glm47"
    gap = ""
