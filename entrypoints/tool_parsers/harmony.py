"""Harmony: messages in channels, as gpt-oss writes its thoughts, its calls and its answer.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>answer<|return|>

Thoughts and calls are one language, so one reader tells both. The prompt ends with `<|start|>assistant`, or within a message.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from halfbyte.entrypoints.answers.events import Reasoning, Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.reading import EndOfText, NotACall, Reader, Sink, Steps, Text, limited
from halfbyte.entrypoints.reasoning_parsers.protocol import ThoughtMarks
from halfbyte.entrypoints.tool_parsers.grammars import literal, schema_of
from halfbyte.entrypoints.tool_parsers.json_calls import json_value
from halfbyte.entrypoints.tool_parsers.protocol import CallGrammar, CallReader, JsonTerm

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANSWER_BEGINS = f"{START}assistant"
FUNCTIONS = "functions."
MAX_HEADER_CHARS = 1024
# Recipients that are no tools.
_PEOPLE = frozenset({"", "all", "user", "assistant"})


class Harmony:
    """A tool syntax and a reasoning syntax at once."""

    marks = ThoughtMarks(f"{CHANNEL}analysis{MESSAGE}", END + ANSWER_BEGINS, END + ANSWER_BEGINS + f"{CHANNEL}final{MESSAGE}")

    def __init__(self, marks: Marks) -> None:
        marks.require("the parser of gpt-oss", START, CHANNEL, MESSAGE, END, CALL)
        self._marks = marks
        self._mark = {text: marks.mark(text) for text in (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)}

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return self.whole_reader(tools, calls=True, reasoning=True, prompt=ANSWER_BEGINS)

    def whole_reader(self, tools: Sequence[Tool], *, calls: bool, reasoning: bool, prompt: str) -> CallReader:
        """Reads the answer to `prompt`.

        calls=False: what is addressed to a tool is content, without its header. reasoning=False: thoughts are content.
        """
        begun = _message_begun(prompt)
        for text, mark in self._mark.items():
            begun = begun.replace(text, mark)
        return Reader(lambda text: _Answer(text, self._mark, calls=calls, reasoning=reasoning).read(begun))

    def is_open(self, prompt: str, *, continues: bool) -> bool | None:
        """Whether the answer to `prompt` goes on with a thought (True), with something else (False), or may begin with one."""
        header, message, _ = _message_begun(prompt).partition(MESSAGE)
        return "analysis" in header if message else None

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        """The last call ends with the answer: its mark is one that a model stops at."""
        start, channel, constrain, message, end = map(self._marks.terminal, (START, CHANNEL, CONSTRAIN, MESSAGE, CALL))
        more = f'({end} {start} "assistant" {channel} call)*' if parallel else ""
        names = [f"call_{index}" for index in range(len(tools))]
        rules = [f"calls: call {more} {end}?", f"call: {literal('commentary to=' + FUNCTIONS)} ({' | '.join(names)})"]
        for name, tool in zip(names, tools, strict=True):
            rules.append(f'{name}: {literal(tool.name + " ")} {constrain} "json" {message} {name}_arguments')
            rules.append(f"{name}_arguments: {json_term(schema_of(tool))}")
        return CallGrammar("\n".join(rules) + "\n", CHANNEL, anchored=True, answer_head=self._final_head)

    def final_grammar(self, inner: str) -> str:
        """Lark for an answer that is one final message. inner: Lark with the rule `start`, for its text."""
        return f"start: {self._final_head} final\nfinal: %lark {{\n{inner}\n}}\n"

    @property
    def _final_head(self) -> str:
        """The header of an answer for the user, as Lark terms."""
        return f'{self._marks.terminal(CHANNEL)} "final" {self._marks.terminal(MESSAGE)}'


def _message_begun(prompt: str) -> str:
    """The message that a prompt ends within, behind its `<|start|>`; nothing where it ends between messages."""
    _, start, message = prompt.rpartition(START)
    return "" if not start or any(mark in message for mark in (END, CALL, RETURN)) else message


class _Messages:
    """Where messages of one kind go: each begins on a line of its own."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._is_empty = True
        self._lead = ""

    def begin(self) -> Sink:
        self._lead = "" if self._is_empty else "\n"
        return self._tell

    def _tell(self, piece: str) -> None:
        self._sink(self._lead + piece)
        self._is_empty, self._lead = False, ""


class _Answer:
    """The program that reads one answer. Nothing in it gives up, so it keeps what it knows."""

    def __init__(self, text: Text, mark: dict[str, str], *, calls: bool, reasoning: bool) -> None:
        self._text, self._mark = text, mark
        self._has_calls = calls
        self._content = _Messages(text.content)
        self._thoughts = _Messages(lambda piece: text.events.append(Reasoning(piece))) if reasoning else self._content
        # A message ends where its mark is, or where the next one begins.
        self._ends = tuple(mark[text] for text in (END, CALL, RETURN, START, CHANNEL))

    def read(self, begun: str) -> Steps[None]:
        """begun: what the prompt has of the first message."""
        text, mark = self._text, self._mark
        header, in_body, _ = begun.partition(mark[MESSAGE])
        ended_by: str | None
        if in_body:
            ended_by = yield from self._body(header)
        elif begun and (word := (yield from text.accepts(*mark.values(), " to="))) is not None:
            text.put_back(word)
            ended_by = yield from self._message("", begun)
        else:
            ended_by = yield from text.until(*self._ends, sink=self._content.begin())
        while ended_by is not None:
            if ended_by in (mark[START], mark[CHANNEL]):
                ended_by = yield from self._message(ended_by, "")
            else:
                yield from text.skip_space()
                ended_by = yield from text.until(*self._ends, sink=self._content.begin())

    def _message(self, opened_by: str, begun: str) -> Steps[str | None]:
        """Read a message. Returns the mark that ended it; None when it is none, and nothing more is to be read as one."""
        mark, found = self._mark, [opened_by]
        ends = (mark[MESSAGE], *(end for end in self._ends if end != mark[CHANNEL]))
        try:
            ended_by = yield from self._text.until(*ends, sink=limited(found, MAX_HEADER_CHARS))
        except NotACall:
            self._content.begin()("".join(found))
            return None
        if ended_by != mark[MESSAGE]:
            return ended_by
        return (yield from self._body(begun + "".join(found)))

    def _body(self, header: str) -> Steps[str]:
        """Read what is behind a header. Returns the mark that ended it."""
        channel, recipient = self._parts(header)
        if recipient and self._has_calls:
            return (yield from self._call(recipient))
        messages = self._thoughts if channel == "analysis" and not recipient else self._content
        return (yield from self._text.until(*self._ends, sink=messages.begin()))

    def _parts(self, header: str) -> tuple[str, str]:
        """(channel, the tool that is addressed) of a header; "" for none. The tool stands before the channel or behind it."""
        role, _, rest = header.partition(self._mark[CHANNEL])
        for mark in self._mark.values():
            role, rest = role.replace(mark, " "), rest.replace(mark, " ")
        words = rest.split()
        recipients = [word.removeprefix("to=") for word in (*role.split(), *words) if word.startswith("to=")]
        recipient = recipients[0] if recipients else ""
        return words[0] if words else "", "" if recipient in _PEOPLE else recipient.removeprefix(FUNCTIONS)

    def _call(self, name: str) -> Steps[str]:
        text = self._text
        text.start_call(name)
        yield from text.skip_space()
        if (yield from text.peek()) != "{":
            return (yield from self._free_form())
        yield from json_value(text, text.arguments, *self._ends)
        yield from text.skip_space()
        return (yield from text.until(*self._ends, sink=self._content.begin()))

    def _free_form(self) -> Steps[str]:
        """Read what a tool is sent that takes no JSON, told as `{"input": "..."}`. It ends with the answer: models stop there."""
        text, is_open = self._text, False

        def tell(piece: str) -> None:
            nonlocal is_open
            text.arguments(("" if is_open else '{"input": "') + json.dumps(piece, ensure_ascii=False)[1:-1])
            is_open = True

        try:
            ended_by = yield from text.until(*self._ends, sink=tell)
        except EndOfText:
            if not text.was_cut:
                text.arguments('"}')
            raise
        text.arguments('"}' if is_open else "{}")
        return ended_by
