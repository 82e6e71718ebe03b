"""The seam of reasoning syntaxes: how a model sets its thoughts apart from its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class ThoughtReader(Protocol):
    """Splits one answer. Its text holds the characters of `Marks`; what it tells does not depend on how the text is cut."""

    def feed(self, text: str) -> tuple[str, str]:
        """(more of the thoughts, more of what follows them)."""
        ...

    def finish(self) -> tuple[str, str]: ...


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """What the engine is to look for, as texts: what opens a thought, and what closes it.

    forced: what closes it before the model does, where nothing else says how the answer goes on.
    """

    opening: str
    closing: str
    forced: str


class ReasoningSyntax(Protocol):
    """Made once per server."""

    marks: ThoughtMarks

    def is_open(self, prompt: str, *, continues: bool) -> bool | None:
        """Whether the answer to `prompt` begins inside a thought (True), behind one (False), or may begin with one (None).

        continues: the prompt ends within an answer, which goes on.
        """
        ...

    def reader(self, is_open: bool | None) -> ThoughtReader: ...
