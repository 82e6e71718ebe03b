"""The syntax of a served model's answers, as its operator named it, and the parser of one answer.

An answer is thoughts, then content and tool calls. What tells thoughts apart reads first, what tells calls apart reads the rest;
families whose language has both in one (`Whole`) read by themselves. Knows the flags and the vocabulary; knows no request.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, Protocol, cast, runtime_checkable

from halfbyte.config import ServerConfig
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints.answers.events import CallArguments, CallStart, Content, Event, Reasoning, Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.reasoning_parsers import REASONING_PARSERS
from halfbyte.entrypoints.reasoning_parsers.protocol import ReasoningSyntax, ThoughtReader
from halfbyte.entrypoints.reasoning_parsers.think_tags import Tags, ThinkTags
from halfbyte.entrypoints.tool_parsers import TOOL_PARSERS
from halfbyte.entrypoints.tool_parsers.protocol import CallReader, ToolSyntax
from halfbyte.errors import UserError
from halfbyte.types import Thinking


@runtime_checkable
class Whole(Protocol):
    """A syntax in which thoughts and calls are one language."""

    def whole_reader(self, tools: Sequence[Tool], *, calls: bool, reasoning: bool, prompt: str) -> CallReader:
        """calls=False: what is addressed to tools is content. reasoning=False: thoughts are."""
        ...

    def final_grammar(self, inner: str) -> str:
        """Lark for an answer whose content is what the Lark `inner` says."""
        ...


class AnswerSyntax:
    """Made once per server. UserError when the flags do not fit each other, or the model."""

    def __init__(self, config: ServerConfig, tokenizer: Tokenizer) -> None:
        self.marks = Marks(tokenizer)
        self._tokenizer = tokenizer
        tools, reasoning = config.tool_call_parser, config.reasoning_parser
        if config.enable_auto_tool_choice and tools is None:
            raise UserError("--enable-auto-tool-choice needs --tool-call-parser")
        self.tools = None if tools is None else _tool_syntax(tools, self.marks, tokenizer)
        self.reasoning = self._reasoning_syntax(reasoning, config.reasoning_config)
        self._whole: Whole | None = None
        for syntax in (self.reasoning, self.tools):
            self._whole = syntax if isinstance(syntax, Whole) else self._whole
        if self._whole is not None and tools is not None and reasoning is not None and self.tools is not self.reasoning:
            raise UserError(
                f"--tool-call-parser {tools} and --reasoning-parser {reasoning} cannot read the same answer; name the same family"
            )

    def new_call_id(self, prefix: str) -> str:
        """An id for a call, in the form that the syntax demands; where it demands none, one that begins with `prefix`."""
        own: Callable[[], str] | None = getattr(self.tools, "new_call_id", None)
        return prefix + uuid.uuid4().hex if own is None else own()

    def thinking(self, prompt: str, *, continues: bool) -> Thinking | None:
        """How the engine sees the thoughts of the answer to `prompt`; None for a model without a reasoning parser."""
        if self.reasoning is None:
            return None
        opening, closing, forced = self._thought_ids
        return Thinking(opening, closing, forced, is_open=self.reasoning.is_open(prompt, continues=continues))

    @cached_property
    def _thought_ids(self) -> tuple[list[int], list[int], list[int]]:
        """The token ids of what opens a thought, closes it, and closes it by force."""
        assert self.reasoning is not None, "asked where there are thoughts"
        marks, encode = self.reasoning.marks, self._tokenizer.encode
        return encode(marks.opening, False), encode(marks.closing, False), encode(marks.forced, False)

    def parser(
        self, tools: Sequence[Tool] | None, thinking: Thinking | None, prompt: str, *, special: bool
    ) -> AnswerParser | None:
        """The parser of one answer; None when all of it is content.

        tools: None where calls are not looked for. thinking: None where thoughts are not. special: whether control tokens that
        mean nothing to the syntax are shown.
        """
        if self._whole is not None:
            reader = self._whole.whole_reader(tools or (), calls=tools is not None, reasoning=thinking is not None, prompt=prompt)
            return AnswerParser(self.marks, None, reader, special=special)
        thoughts = None if thinking is None or self.reasoning is None else self.reasoning.reader(thinking.is_open)
        calls = None if tools is None or self.tools is None else self.tools.reader(tools)
        return None if thoughts is None and calls is None else AnswerParser(self.marks, thoughts, calls, special=special)

    def wrap(self, grammar: str, *, begins: bool) -> str:
        """Lark for an answer of which `grammar` is the content. begins: the prompt does not end within its content."""
        return grammar if self._whole is None or not begins else self._whole.final_grammar(grammar)

    def _reasoning_syntax(self, name: str | None, config: Mapping[str, Any]) -> ReasoningSyntax | None:
        if name is None:
            if config:
                raise UserError("--reasoning-config needs --reasoning-parser")
            return None
        known = REASONING_PARSERS.get(name)
        if known is None:
            raise UserError(f"--reasoning-parser: {name!r} is not one of {', '.join(REASONING_PARSERS)}")
        if isinstance(known, str):
            if config:
                raise UserError(f"--reasoning-config does nothing with --reasoning-parser {name}; leave it out")
            made: ReasoningSyntax = _make(known, "--reasoning-parser", name, self.marks, self._tokenizer)
            return cast(ReasoningSyntax, self.tools) if type(self.tools) is type(made) else made
        interrupting: tuple[str, ...] = ()
        if config.get("tool_calls_end_reasoning"):
            interrupting = (self._trigger(),)
        return ThinkTags(self.marks, _configured(known, config), interrupting)

    def _trigger(self) -> str:
        if self.tools is None:
            raise UserError("--reasoning-config: tool_calls_end_reasoning needs --tool-call-parser")
        calls = self.tools.grammar([Tool("f")], lambda schema: "%json {}", parallel=False)
        if calls.anchored:
            raise UserError("--reasoning-config: tool_calls_end_reasoning needs a tool call parser with marks of its own")
        return calls.trigger


class AnswerParser:
    """Reads one answer. What it tells does not depend on how the text is cut; marks are spelled out in it."""

    def __init__(self, marks: Marks, thoughts: ThoughtReader | None, calls: CallReader | None, *, special: bool) -> None:
        self._marks = marks
        self._thoughts, self._calls = thoughts, calls
        self._special = special

    def feed(self, text: str) -> list[Event]:
        if self._thoughts is None:
            return self._told("", self._rest(text))
        thought, rest = self._thoughts.feed(text)
        return self._told(thought, self._rest(rest))

    def finish(self, *, was_cut: bool = False) -> list[Event]:
        """The rest. was_cut: the answer ended by its length."""
        thought, rest = ("", "") if self._thoughts is None else self._thoughts.finish()
        last = self._calls.finish(was_cut=was_cut) if self._calls is not None else ()
        return self._told(thought, [*self._rest(rest), *last])

    def _rest(self, text: str) -> list[Event]:
        if not text:
            return []
        return [Content(text)] if self._calls is None else self._calls.feed(text)

    def _told(self, thought: str, events: list[Event]) -> list[Event]:
        plain = self._marks.plain
        told: list[Event] = [Reasoning(plain(thought, special=self._special))] if thought else []
        for event in events:
            match event:
                case Content():
                    told.append(Content(plain(event.text, special=self._special)))
                case Reasoning():
                    told.append(Reasoning(plain(event.text, special=self._special)))
                case CallStart():
                    told.append(CallStart(event.index, plain(event.name), event.call_id and plain(event.call_id)))
                case CallArguments():
                    told.append(CallArguments(event.index, self._marks.plain_json(event.text)))
        return [event for event in told if not isinstance(event, (Content, Reasoning)) or event.text]


def _tool_syntax(name: str, marks: Marks, tokenizer: Tokenizer) -> ToolSyntax:
    known = TOOL_PARSERS.get(name.partition(":")[0])
    if known is None:
        raise UserError(f"--tool-call-parser: {name!r} is not one of {', '.join(TOOL_PARSERS)}")
    made: ToolSyntax = _make(known, "--tool-call-parser", name, marks, tokenizer)
    return made


def _make(place: str, flag: str, value: str, marks: Marks, tokenizer: Tokenizer) -> Any:
    """The syntax that `flag` names. Its class may want more than the marks: the operator's file, the model's words."""
    module, _, name = place.partition(":")
    kind = getattr(import_module(module), name)
    return kind.for_server(marks, value, tokenizer, flag) if hasattr(kind, "for_server") else kind(marks)


def _configured(tags: Tags, config: Mapping[str, Any]) -> Tags:
    """A family's tags with what --reasoning-config changes about them."""
    start, end = config.get("reasoning_start_str"), config.get("reasoning_end_str")
    return Tags(tags.opening if start is None else (start,), tags.closing if end is None else (end,), tags.assumed)
