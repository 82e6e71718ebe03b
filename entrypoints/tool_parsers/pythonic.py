"""Tool calls as Python: `[f(a=1, b="x"), g()]`, and the families that put marks around such calls.

A syntax is its marks and the texts between calls; `python_calls` reads what is inside, `python_grammar` says what may be there.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import ClassVar

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.reading import Reader, Steps, Text
from halfbyte.entrypoints.tool_parsers.grammars import literal
from halfbyte.entrypoints.tool_parsers.protocol import CallGrammar, CallReader, JsonTerm
from halfbyte.entrypoints.tool_parsers.python_calls import python_calls
from halfbyte.entrypoints.tool_parsers.python_grammar import JSON_WORDS, PYTHON_WORDS, python_call_rules


class Pythonic:
    """Llama 3.2: the answer begins with the list. No mark says so, so the names must be of tools of the request."""

    def __init__(self, marks: Marks) -> None:
        pass

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        names = frozenset(tool.name for tool in tools)
        return Reader(lambda text: bare_lists(text, names))

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        return _bare_grammar(tools, json_term, parallel=parallel)


class Marked:
    """Calls between two marks. layout: what the model writes before, between and behind the calls there; words: its literals."""

    open: ClassVar[str]
    close: ClassVar[str]
    layout: ClassVar[tuple[str, str, str]] = ("[", ", ", "]")
    words: ClassVar[Mapping[str, str]] = PYTHON_WORDS

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._open, self._close = marks.mark(self.open), marks.mark(self.close)

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return Reader(self._read)

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        before, between, behind = (literal(text) if text else "" for text in self.layout)
        more = f"({between} call)*" if parallel else ""
        rules = f"calls: {before} call {more} {behind} {self._marks.terminal(self.close)}\n"
        return CallGrammar(rules + python_call_rules("call", tools, json_term, self.words), self.open)

    def _read(self, text: Text) -> Steps[None]:
        while True:
            text.open_call((yield from text.until(self._open, sink=text.content)))
            yield from text.skip_space()
            yield from python_calls(text, is_list=(yield from text.accepts("[")) is not None)
            yield from text.skip_space()
            yield from text.accepts(self._close, drops_cut=True)


class Lfm2(Marked):
    open, close = "<|tool_call_start|>", "<|tool_call_end|>"

    def __init__(self, marks: Marks) -> None:
        marks.require("--tool-call-parser lfm2", self.open, self.close)
        super().__init__(marks)


class Olmo3(Marked):
    """Olmo 3: one call on a line, without brackets, and values as JSON writes them."""

    open, close = "<function_calls>", "</function_calls>"
    layout = ("", "\n", "")
    words = JSON_WORDS


class Llama4Pythonic(Marked):
    """Llama 4: a list as Llama 3.2 writes it, in marks or not."""

    open, close = "<|python_start|>", "<|python_end|>"

    def __init__(self, marks: Marks) -> None:
        marks.require("--tool-call-parser llama4_pythonic", self.open, self.close)
        super().__init__(marks)

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        names = frozenset(tool.name for tool in tools)
        return Reader(lambda text: self._read_both(text, names))

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        return _bare_grammar(tools, json_term, parallel=parallel)

    def _read_both(self, text: Text, names: Container[str]) -> Steps[None]:
        yield from bare_lists(text, names)
        yield from self._read(text)


def bare_lists(text: Text, names: Container[str]) -> Steps[None]:
    """Read the lists that an answer begins with, up to other text."""
    while not text.has_content:
        yield from text.skip_space(text.content)
        opening = yield from text.accepts("[")
        if opening is None:
            return
        text.open_call(opening)
        yield from python_calls(text, is_list=True, names=names)


def _bare_grammar(tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
    more = '(", " call)*' if parallel else ""
    return CallGrammar(f'calls: call {more} "]"\n{python_call_rules("call", tools, json_term)}', "[", anchored=True)
