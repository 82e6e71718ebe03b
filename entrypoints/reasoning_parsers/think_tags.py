"""Thoughts between two marks, `<think>` and `</think>` or others, at the beginning of an answer."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.reading import EndOfText, Steps, Text
from halfbyte.entrypoints.reasoning_parsers.protocol import ThoughtMarks, ThoughtReader


@dataclass(frozen=True, slots=True)
class Tags:
    """One family's marks; the first of several spellings is the model's usual one.

    assumed: the model thinks first even where neither the prompt nor the answer opens a thought.
    """

    opening: tuple[str, ...] = ("<think>",)
    closing: tuple[str, ...] = ("</think>",)
    assumed: bool = False


class ThinkTags:
    """interrupting: marks that end a thought without being its end, such as those of tool calls."""

    def __init__(self, marks: Marks, tags: Tags, interrupting: tuple[str, ...] = ()) -> None:
        self._tags = tags
        self._opening = tuple(map(marks.mark, tags.opening))
        self._closing = tuple(map(marks.mark, tags.closing))
        self._interrupting = tuple(map(marks.mark, interrupting))
        self.marks = ThoughtMarks(tags.opening[0], tags.closing[0], tags.closing[0])

    def is_open(self, prompt: str, *, continues: bool) -> bool | None:
        text = prompt.rstrip()
        if text.endswith(self._tags.opening):
            return True
        if text.endswith(self._tags.closing):
            return False
        if continues:
            opened = max(text.rfind(mark) for mark in self._tags.opening)
            closed = max(text.rfind(mark) for mark in self._tags.closing)
            return opened > closed
        return True if self._tags.assumed else None

    def reader(self, is_open: bool | None) -> ThoughtReader:
        return _Reader(self._opening, self._closing, self._interrupting, is_open)


class _Reader:
    def __init__(
        self, opening: tuple[str, ...], closing: tuple[str, ...], interrupting: tuple[str, ...], is_open: bool | None
    ) -> None:
        self._marks = opening, closing, interrupting
        self._is_open = is_open
        self._text = Text()
        self._thoughts: list[str] = []
        self._space = ""  # at the end of the thoughts so far
        self._answer: list[str] = []
        self._steps = self._read(self._text)
        self._is_over = False

    def feed(self, text: str) -> tuple[str, str]:
        self._text.add(text)
        return self._run()

    def finish(self) -> tuple[str, str]:
        self._text.ended = True
        return self._run()

    def _run(self) -> tuple[str, str]:
        if not self._is_over:
            try:
                next(self._steps)
            except (EndOfText, StopIteration):
                self._is_over = True
        if self._is_over:
            self._answer.append(self._text.take(self._text.num_left))
        told = "".join(self._thoughts), "".join(self._answer)
        self._thoughts, self._answer = [], []
        return told

    def _read(self, text: Text) -> Steps[None]:
        opening, closing, interrupting = self._marks
        if self._is_open is False:
            return
        if self._is_open is None and not (yield from self._opens(text)):
            return
        if self._is_open:  # a model may write what the prompt already has
            yield from text.skip_space()
            yield from text.accepts(*opening)
        yield from text.skip_space()
        mark = yield from text.until(*closing, *interrupting, sink=self._think)
        if mark in interrupting:
            text.put_back(mark)
        else:
            yield from text.skip_space()

    def _opens(self, text: Text) -> Steps[bool]:
        """Whether the answer begins with a thought, whose mark is read then. White space before it is nobody's."""
        space: list[str] = []
        try:
            while (yield from text.peek()).isspace():
                space.append(text.take(1))
            if (yield from text.accepts(*self._marks[0])) is not None:
                return True
        except EndOfText:
            pass
        self._answer.append("".join(space))
        return False

    def _think(self, piece: str) -> None:
        """White space at the end of a thought is none of it."""
        kept = piece.rstrip()
        if kept:
            self._thoughts.append(self._space + kept)
            self._space = piece[len(kept) :]
        else:
            self._space += piece
