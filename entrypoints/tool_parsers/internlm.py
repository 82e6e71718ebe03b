"""InternLM 2 and 3: `<|action_start|><|plugin|>\\n{"name": ..., "parameters": {...}}<|action_end|>`, one call to an answer.

The other kind of action, code for its interpreter, is no call.
"""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.reading import Reader, Steps, Text
from halfbyte.entrypoints.tool_parsers.grammars import json_call_rules
from halfbyte.entrypoints.tool_parsers.json_calls import call_object
from halfbyte.entrypoints.tool_parsers.protocol import CallGrammar, CallReader, JsonTerm

OPEN, PLUGIN, CLOSE = "<|action_start|>", "<|plugin|>", "<|action_end|>"


class InternLM:
    def __init__(self, marks: Marks) -> None:
        marks.require("--tool-call-parser internlm", OPEN, PLUGIN)
        self._marks = marks
        self._open, self._plugin, self._close = map(marks.mark, (OPEN, PLUGIN, CLOSE))

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return Reader(self._read)

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        plugin, close = self._marks.terminal(PLUGIN), self._marks.terminal(CLOSE)
        objects = json_call_rules("object", tools, json_term, arguments_key="parameters")
        return CallGrammar(f'calls: {plugin} "\\n" object {close}\n{objects}', OPEN)

    def _read(self, text: Text) -> Steps[None]:
        while True:
            text.open_call((yield from text.until(self._open, sink=text.content)))
            yield from text.skip_space()
            yield from text.accepts(self._plugin)
            yield from text.skip_space()
            yield from call_object(text, self._close)
            yield from text.skip_space()
            yield from text.accepts(self._close, drops_cut=True)
