"""Reading a text that comes in pieces, with programs that read as if it were all there.

A program is a generator: `yield from text.until(...)` waits for more text where it must. `Reader` runs one over an answer. What
has been decided is told at once as an event; nothing is told twice, nothing taken back, and nothing depends on the cuts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

from halfbyte.entrypoints.answers.events import CallArguments, CallStart, Content, Event

MAX_NAME_CHARS = 256
# More white space between two marks is none of the syntax.
MAX_SPACE_CHARS = 1024
# A call whose name is still unknown after so many characters is none.
MAX_UNDECIDED_CHARS = 32 * 1024
# Of what was read, so much stays in sight: what a regular expression may look behind to.
CONTEXT_CHARS = 64

_SPACE = re.compile(r"\s+")

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
Sink = Callable[[str], None]


class EndOfText(Exception):
    """The answer ended where the program wanted more."""


class NotACall(Exception):
    """What began like a call is none: its text is content, and reading goes on behind its opening mark."""


class Text:
    """What has come, up to where it was read, and the events so far.

    Between `open_call` and `start_call` nothing is decided: should it turn out not to be a call, it is read again as content.
    """

    def __init__(self) -> None:
        self.ended = self.was_cut = False
        self.events: list[Event] = []
        self.num_calls = 0
        self.has_content = False  # told of more than white space
        self._buffer = ""
        self._at = 0  # where the program reads
        self._opened_at: int | None = None  # behind the mark that may begin a call
        self._opening = ""
        self._space = ""
        self._has_arguments = False

    def add(self, text: str) -> None:
        """More of the answer has come."""
        gone = max(0, (self._at if self._opened_at is None else self._opened_at) - CONTEXT_CHARS)
        self._buffer = self._buffer[gone:] + text
        self._at -= gone
        if self._opened_at is not None:
            self._opened_at -= gone

    # --- what programs read with ---

    def more(self) -> Steps[None]:
        """Wait until there is more to read. EndOfText when there never will be."""
        num_left = self.num_left
        if self._opened_at is not None and self._at - self._opened_at > MAX_UNDECIDED_CHARS:
            raise NotACall
        while self.num_left == num_left:
            if self.ended:
                raise EndOfText
            yield

    @property
    def unread(self) -> tuple[str, int]:
        """(what has come, where in it is read): up to CONTEXT_CHARS of what was read stand before."""
        return self._buffer, self._at

    @property
    def num_left(self) -> int:
        """How many characters have come and are not read."""
        return len(self._buffer) - self._at

    def take(self, count: int) -> str:
        """Read the next `count` characters, which must be there."""
        self._at += count
        return self._buffer[self._at - count : self._at]

    def put_back(self, read: str) -> None:
        """`read` was what came last; it comes again."""
        self._at -= len(read)

    def peek(self, count: int = 1) -> Steps[str]:
        """The next `count` characters, left in place. EndOfText when there are fewer."""
        while self.num_left < count:
            yield from self.more()
        return self._buffer[self._at : self._at + count]

    def skip_space(self, sink: Sink = lambda space: None) -> Steps[None]:
        """Read white space, pass it to `sink`, and wait for what follows it."""
        while (yield from self.peek()).isspace():
            space = _SPACE.match(self._buffer, self._at)
            assert space is not None
            self._pass(len(space.group()), sink)

    def accepts(self, *words: str, drops_cut: bool = False) -> Steps[str | None]:
        """Read one of `words` if it comes next, the longest that does; None, and nothing read, otherwise.

        drops_cut: where the text ends within a word, that is read, too, and told by EndOfText.
        """
        longest_first = sorted(words, key=len, reverse=True)
        while True:
            rest = self._buffer[self._at : self._at + len(longest_first[0])]
            for word in longest_first:
                if rest.startswith(word):
                    self.take(len(word))
                    return word
                if word.startswith(rest) and not self.ended:
                    break  # it may still come
                if word.startswith(rest) and drops_cut:
                    self.take(len(rest))
                    raise EndOfText
            else:
                return None
            num_left = self.num_left
            while self.num_left == num_left and not self.ended:
                yield

    def expect(self, *words: str) -> Steps[str]:
        """Read one of `words`; NotACall when another text comes."""
        word = yield from self.accepts(*words)
        if word is None:
            yield from self.peek()
            raise NotACall
        return word

    def until(self, *marks: str, sink: Sink, drops_cut: bool = False) -> Steps[str]:
        """Pass text to `sink` up to the first of `marks`, and read that one (the longest that begins there).

        What may become a mark is held back. EndOfText, after everything was passed on, when there is none. drops_cut: the first
        characters of a mark that the end of the text cuts are not passed on.
        """
        search = _search(marks)
        while True:
            found = search.pattern.search(self._buffer, self._at)
            if found is not None and (self.ended or not search.may_grow(self._buffer, found.start(), found.group())):
                self._pass(found.start() - self._at, sink)
                return self.take(len(found.group()))
            held = search.num_held(self._buffer, self._at) if found is None else len(self._buffer) - found.start()
            self._pass(self.num_left - held, sink)
            try:
                yield from self.more()
            except EndOfText:
                if found is None:
                    self._pass(self.num_left, (lambda cut: None) if drops_cut else sink)
                    raise

    def follows(self, *words: str) -> Steps[bool]:
        """Whether white space, if any, and one of `words` come next, or the text ends before that can be told. Reads nothing."""
        longest = max(map(len, words))
        for count in range(1, MAX_SPACE_CHARS + longest):
            while self.num_left < count and not self.ended:
                yield
            rest = self._buffer[self._at : self._at + count].lstrip()
            if any(rest.startswith(word) for word in words):
                return True
            if not any(word.startswith(rest) for word in words):
                return False
            if self.num_left < count:
                return True
        return False

    def word(self, *marks: str, max_chars: int = MAX_NAME_CHARS) -> Steps[tuple[str, str]]:
        """(the text before the first of `marks`, that mark), read. NotACall when the text is longer than a name can be."""
        search = _search(marks)
        most = max_chars + search.longest
        while True:
            found = search.pattern.search(self._buffer, self._at, self._at + most)
            if found is not None and (self.ended or not search.may_grow(self._buffer, found.start(), found.group())):
                word = self.take(found.start() - self._at)
                return word, self.take(len(found.group()))
            if found is None and self.num_left >= most:
                raise NotACall
            yield from self.more()

    # --- what programs tell ---

    def content(self, text: str) -> None:
        """Text for the user. White space around calls is no content."""
        kept = text.rstrip()
        if not kept:
            self._space += text
            return
        opens = self._space + kept
        self.events.append(Content(opens if self.has_content or not self.num_calls else opens.lstrip()))
        self.has_content = True
        self._space = text[len(kept) :]

    def open_call(self, mark: str) -> None:
        """`mark`, just read, may begin a call."""
        self._opening, self._opened_at = mark, self._at

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """It does, and this is its name."""
        name = name.strip()
        if not name:
            raise NotACall
        self._opened_at, self._space = None, ""
        self.events.append(CallStart(self.num_calls, name, call_id))
        self.num_calls += 1
        self._has_arguments = False

    def arguments(self, piece: str) -> None:
        """More of the arguments of the call that was started last."""
        if piece:
            self._has_arguments = True
            self.events.append(CallArguments(self.num_calls - 1, piece))

    def end_call(self) -> None:
        """The call is complete; one without arguments has an empty object."""
        if not self._has_arguments:
            self.arguments("{}")

    # --- what the reader does ---

    def undo_call(self) -> bool:
        """What was read since `open_call`, if it was called last, is to be read again, its mark being content; else False."""
        if self._opened_at is None:
            return False
        self._at, self._opened_at = self._opened_at, None
        self.content(self._opening)
        return True

    def flush(self) -> None:
        """Nothing more is read as a call: all that has come is content. At the end, white space behind calls is dropped."""
        self.undo_call()
        self.content(self.take(self.num_left))
        if self.ended and self._space:
            if not self.num_calls:
                self.events.append(Content(self._space))
            self._space = ""

    def _pass(self, count: int, sink: Sink) -> None:
        if count:
            sink(self.take(count))


def limited(found: list[str], max_chars: int = MAX_NAME_CHARS) -> Sink:
    """A sink that collects a short text in `found`; NotACall when it becomes too long."""

    def collect(piece: str) -> None:
        found.append(piece)
        if sum(map(len, found)) > max_chars:
            raise NotACall

    return collect


class Reader:
    """Runs `program` over one answer, again from its start behind what was no call. Where it returns, the rest is content."""

    def __init__(self, program: Callable[[Text], Steps[None]]) -> None:
        self._text = Text()
        self._program = program
        self._steps = program(self._text)
        self._is_over = False

    def feed(self, text: str) -> list[Event]:
        self._text.add(text)
        return self._run()

    def finish(self, *, was_cut: bool = False) -> list[Event]:
        self._text.ended, self._text.was_cut = True, was_cut
        return self._run()

    def _run(self) -> list[Event]:
        text = self._text
        while not self._is_over:
            try:
                next(self._steps)
                break  # it waits
            except NotACall:
                if not text.undo_call():  # wrong behind its name: the call ends here
                    text.end_call()
                self._steps = self._program(text)
            except (EndOfText, StopIteration):
                self._is_over = True
        if self._is_over:
            text.flush()
        events, text.events = text.events, []
        return events


class _Search:
    """Looks for any of some marks."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        self.longest = max(map(len, marks))
        self._beginnings = {mark[:count] for mark in marks for count in range(1, len(mark))}

    def may_grow(self, buffer: str, at: int, mark: str) -> bool:
        """Whether the text from `at` on may still become a longer mark than `mark`."""
        num_left = len(buffer) - at
        return num_left < self.longest and buffer[at:] in self._beginnings and len(mark) <= num_left

    def num_held(self, buffer: str, start: int) -> int:
        """How long the longest end of `buffer`, from `start` on, is that may become a mark."""
        for count in range(min(self.longest - 1, len(buffer) - start), 0, -1):
            if buffer[-count:] in self._beginnings:
                return count
        return 0


@lru_cache(maxsize=512)
def _search(marks: tuple[str, ...]) -> _Search:
    return _Search(marks)
