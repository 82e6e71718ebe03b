"""The seam of tool-call syntaxes: one file each, made once per server, a reader per answer.

A syntax is pure: no I/O, no clock. What a reader makes of a text never depends on how the text is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from halfbyte.entrypoints.answers.events import Event, Tool

# From a JSON schema to the Lark term that writes such a value: `%json {...}`.
JsonTerm = Callable[[Any], str]


class CallReader(Protocol):
    """Reads one answer. Its text holds the characters of `Marks` where the model wrote control tokens."""

    def feed(self, text: str) -> list[Event]:
        """What more text means: Content, CallStart and CallArguments."""
        ...

    def finish(self, *, was_cut: bool = False) -> list[Event]:
        """The rest. An unfinished call whose name is known stays as far as it came; any other text becomes content.

        was_cut: the model had more to say. Else it may have left out what only closes a call.
        """
        ...


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """How calls are written, as Lark rules.

    rules: they define the rule `calls`, which is everything behind the first `trigger`. trigger: the mark (as `Marks.mark` takes
    it) with which calls begin. anchored: only an answer that begins with the trigger is a call, so that other text may hold it.
    answer_head: Lark terms that an answer without calls begins with. others: texts that the reader takes for the beginning of
    calls, too: other text has none of them in it, or where calls are anchored does not begin with their first characters.
    """

    rules: str
    trigger: str
    anchored: bool = False
    answer_head: str = ""
    others: tuple[str, ...] = ()


class ToolSyntax(Protocol):
    """How a model family writes tool calls. Made from `Marks`; UserError when the vocabulary does not fit."""

    def reader(self, tools: Sequence[Tool]) -> CallReader: ...

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        """One call of one of the tools, or several where parallel; arguments follow the tool's schema.

        UserError when a schema cannot be written in this syntax.
        """
        ...
