"""Mistral: `[TOOL_CALLS]name[ARGS]{...}`, formerly with `[CALL_ID]...` between, and before that `[TOOL_CALLS][{...}, {...}]`.

All three are read whatever the vocabulary; what a grammar asks for follows from the marks that are tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.reading import Reader, Steps, Text
from halfbyte.entrypoints.tool_parsers.grammars import json_call_rules, literal, schema_of
from halfbyte.entrypoints.tool_parsers.json_calls import arguments_value, opened_calls
from halfbyte.entrypoints.tool_parsers.protocol import CallGrammar, CallReader, JsonTerm

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class Mistral:
    def __init__(self, marks: Marks) -> None:
        marks.require("--tool-call-parser mistral", OPEN)
        self._marks = marks
        self._open, self._call_id, self._args = map(marks.mark, (OPEN, CALL_ID, ARGS))

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return Reader(self._read)

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        if self._marks.token_id(ARGS) is None:
            more = '(", " object)*' if parallel else ""
            return CallGrammar(f'calls: "[" object {more} "]"\n{json_call_rules("object", tools, json_term)}', OPEN)
        opening, call_id, args = map(self._marks.terminal, (OPEN, CALL_ID, ARGS))
        identity = f"({call_id} /[a-zA-Z0-9]{{9}}/)?" if self._marks.token_id(CALL_ID) is not None else ""
        calls = " | ".join(f"{literal(tool.name)} id {args} {json_term(schema_of(tool))}" for tool in tools)
        more = f"({opening} call)*" if parallel else ""
        return CallGrammar(f"calls: call {more}\ncall: {calls}\nid: {identity}\n", OPEN)

    @staticmethod
    def new_call_id() -> str:
        """An id as the family's chat templates demand it: nine letters and digits."""
        return secrets.token_hex(5)[:9]

    def _read(self, text: Text) -> Steps[None]:
        while True:
            text.open_call((yield from text.until(self._open, sink=text.content)))
            yield from text.skip_space()
            bracket = yield from text.accepts("[", "{")
            if bracket is not None:
                yield from opened_calls(text, bracket, self._open)
            else:
                yield from self._named(text)

    def _named(self, text: Text) -> Steps[None]:
        name, mark = yield from text.word(self._call_id, self._args, "{")
        call_id = None
        if mark == self._call_id:
            call_id, mark = yield from text.word(self._args, "{")
        if mark == "{":
            text.put_back(mark)
        text.start_call(name, call_id)
        yield from text.skip_space()
        yield from arguments_value(text, self._open)
        text.end_call()
