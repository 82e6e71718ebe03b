"""hf: answers read by the checkpoint's own response_template, thoughts, content and tool calls alike.

One reader tells all three. Knows how regions follow each other and what the prompt has opened of an answer. It must not know the
wire. Made once per server by the registries of parsers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from halfbyte.entrypoints.answers.events import CallArguments, CallStart, Content, Event, Reasoning, Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.reading import Reader, Sink, Steps, Text
from halfbyte.entrypoints.reasoning_parsers.protocol import ThoughtMarks
from halfbyte.entrypoints.tool_parsers.hf_calls import CallRegion
from halfbyte.entrypoints.tool_parsers.hf_delimiters import Delimiters, Found, Pattern
from halfbyte.entrypoints.tool_parsers.hf_grammar import call_grammar
from halfbyte.entrypoints.tool_parsers.hf_patterns import first_text, marked, marked_pattern
from halfbyte.entrypoints.tool_parsers.protocol import CallGrammar, JsonTerm
from halfbyte.entrypoints.tool_parsers.response_template import Delimiter, Region, load_response_template
from halfbyte.errors import UserError

if TYPE_CHECKING:
    from halfbyte.engine.tokenizer import Tokenizer

_FLAGS = {"tool_calls": "--tool-call-parser", "thinking": "--reasoning-parser"}


class ResponseTemplateSyntax:
    """template: as it is in tokenizer_config.json; None if that has none. needs: the fields that the server was told to read.

    marks: the texts that open and close a thought, empty where the template has none, several, or patterns for them.
    UserError when the template cannot be served.
    """

    def __init__(self, marks: Marks, template: Mapping[str, Any] | None, *, needs: Collection[str] = ("tool_calls",)) -> None:
        self.template = load_response_template(template)
        for name in needs:
            if name not in self.template.regions:
                raise UserError(
                    f"{_FLAGS[name]} hf needs the field {name}, which the checkpoint's response_template does not have",
                    param=_FLAGS[name],
                )
        self._marks = marks
        self._spelled: dict[str, str] = {}
        regions = {name: self._with_marks(region) for name, region in self.template.regions.items()}
        self.outside = next((region for region in regions.values() if region.opening is None), None)
        self.regions = regions
        openers = [(name, Pattern(region.opening.source)) for name, region in regions.items() if region.opening is not None]
        closing = self.outside.closing if self.outside is not None else None
        self.between = Delimiters([*openers, *([("", Pattern(closing.source))] if closing is not None else [])])
        self.closers = {
            name: Delimiters([] if region.closing is None else [("", Pattern(region.closing.source, crosses=True))])
            for name, region in regions.items()
        }
        self.calls = _call_region(regions["tool_calls"]) if "tool_calls" in regions else None
        thinking = self.template.regions.get("thinking")
        around = (None, None) if thinking is None else (thinking.opening, thinking.closing)
        opened_by, closed_by = map(_literal, around)
        self.marks = ThoughtMarks(opened_by, closed_by, closed_by)

    @classmethod
    def for_server(cls, marks: Marks, value: str, tokenizer: Tokenizer, flag: str) -> ResponseTemplateSyntax:
        needs = next(name for name, needing in _FLAGS.items() if needing == flag)
        return cls(marks, tokenizer.response_template, needs=(needs,))

    def whole_reader(self, tools: Sequence[Tool], *, calls: bool, reasoning: bool, prompt: str) -> ResponseTemplateReader:
        """Reads the answer to `prompt`: what that has of the answer already is read first, and not told."""
        return self.reader(tools, calls=calls, reasoning=reasoning, prefix=self.template.prefix_of(prompt))

    def final_grammar(self, inner: str) -> str:
        """Lark for an answer whose content is what `inner` says."""
        content = self.template.regions.get("content")
        opening = _literal(content.opening) if content is not None else ""
        return f"start: {self._marks.terminal(opening)} content\ncontent: %lark {{\n{inner}\n}}\n" if opening else inner

    def reader(
        self, tools: Sequence[Tool], *, calls: bool = True, reasoning: bool = True, prefix: str = ""
    ) -> ResponseTemplateReader:
        """calls=False: a region of calls is content, with what opens and closes it. reasoning=False: thoughts are content.

        prefix: what the prompt already has of the answer; nothing of it is told.
        """
        return ResponseTemplateReader(self, tools, calls=calls, reasoning=reasoning, prefix=prefix)

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        """UserError where the template's patterns, content or transform cannot be written backwards."""
        return call_grammar(self.template.regions["tool_calls"], self._marks, tools, json_term, parallel=parallel)

    def is_open(self, prompt: str, *, continues: bool = False) -> bool | None:
        """Whether the answer to `prompt` begins inside a thought (True), behind one or in content (False); None: either."""
        return self.reader([], prefix=self.template.prefix_of(prompt)).is_thinking

    def as_read(self, text: str) -> str:
        """`text` with the characters of `Marks` in the place of the tokens that the template names."""
        for spelled in sorted(self._spelled, key=len, reverse=True):
            text = text.replace(spelled, self._spelled[spelled])
        return text

    def _with_marks(self, region: Region) -> Region:
        opening, closing = self._marked(region.opening), self._marked(region.closing)
        return replace(region, opening=opening, closing=closing, content_args=self._marked_args(region.content_args))

    def _marked_args(self, content_args: Mapping[str, Any]) -> dict[str, Any]:
        args = dict(content_args)
        if "string_delims" in args:
            args["string_delims"] = [
                [marked(text, self._marks, self._spelled) for text in pair] for pair in args["string_delims"]
            ]
        if "tag_pattern" in args:
            args["tag_pattern"] = marked_pattern(args["tag_pattern"], self._marks, self._spelled)
        if args.get("value_parser") is not None:
            args["value_parser"] = {**args["value_parser"], "args": self._marked_args(args["value_parser"].get("args", {}))}
        return args

    def _marked(self, delimiter: Delimiter | None) -> Delimiter | None:
        if delimiter is None or delimiter.literals:
            return delimiter and Delimiter(tuple(marked(text, self._marks, self._spelled) for text in delimiter.literals))
        return Delimiter(pattern=marked_pattern(delimiter.pattern, self._marks, self._spelled))


def _literal(delimiter: Delimiter | None) -> str:
    """The text of a delimiter, "" where it may have several."""
    return delimiter.literals[0] if delimiter is not None and len(delimiter.literals) == 1 else ""


class ResponseTemplateReader:
    """Reads one answer. White space around content and around thoughts is no part of them, unless their field has strip=false."""

    def __init__(
        self, syntax: ResponseTemplateSyntax, tools: Sequence[Tool], *, calls: bool, reasoning: bool, prefix: str
    ) -> None:
        self._syntax = syntax
        self._tools = {tool.name: tool for tool in tools}
        self._calls = syntax.calls if calls else None
        self._reasoning = reasoning
        self._inside: str | None = None  # the region that is open
        self._opened: set[str] = set()  # regions that were
        self._written: set[str] = set()  # fields that have more than white space
        self._space = ""  # of thoughts, told when more of them comes
        self._num_prefix_calls = 0
        self._is_prefix = bool(prefix)
        self._reader = Reader(self._read)
        if prefix:
            events = self._reader.feed(syntax.as_read(prefix))
            self._num_prefix_calls = sum(isinstance(event, CallStart) for event in events)
            self._is_prefix = False
        self._told_of = {*self._written}

    @property
    def is_thinking(self) -> bool | None:
        """True inside a thought, False behind one, or where content or a call has begun; None before."""
        outside = self._syntax.outside
        inside = self._inside or (outside.name if outside is not None else None)
        return True if inside == "thinking" else False if self._opened or self._written else None

    def feed(self, text: str) -> list[Event]:
        return self._told(self._reader.feed(text))

    def finish(self, *, was_cut: bool = False) -> list[Event]:
        return self._told(self._reader.finish(was_cut=was_cut))

    def _read(self, text: Text) -> Steps[None]:
        syntax = self._syntax
        while True:
            self._inside = None
            outside = syntax.outside
            name, found = yield from syntax.between.until(text, self._sink(text, outside.name if outside is not None else None))
            if not name:
                continue
            self._inside = name
            self._opened.add(name)
            if name == "tool_calls" and self._calls is not None:
                yield from self._calls.read(text, found, self._tools)
            else:
                yield from self._passed(text, name, found)

    def _passed(self, text: Text, name: str, found: Found) -> Steps[None]:
        """A region of text, or of calls that are not to be read."""
        sink = self._sink(text, "content" if name == "tool_calls" else name)
        if name == "tool_calls":
            sink(found.text)
        _, found = yield from self._syntax.closers[name].until(text, sink)
        if name == "tool_calls":
            sink(found.text)

    def _sink(self, text: Text, name: str | None) -> Sink:
        """Where text of the field `name` goes."""
        strips = self._strips("content")

        def tell(piece: str) -> None:
            if name is None:
                return
            if not piece.isspace():
                self._written.add(name)
            if self._is_prefix:
                text.has_content |= name == "content" and not piece.isspace()
                return
            if name == "thinking" and self._reasoning:
                text.events.append(Reasoning(piece))
            elif strips:
                text.content(piece)
            else:
                text.events.append(Content(piece))

        return tell

    def _told(self, events: list[Event]) -> list[Event]:
        """`events` less white space that is no part of a text, and less the calls of the prefix."""
        return [told for event in events if (told := self._trimmed(event)) is not None]

    def _trimmed(self, event: Event) -> Event | None:
        match event:
            case Content() if self._strips("content"):
                text = event.text if "content" in self._told_of else event.text.lstrip()
                self._told_of |= {"content"} if text.strip() else set()
                return Content(text) if text.strip() else None
            case Reasoning() if self._strips("thinking"):
                text = self._space + event.text
                text = text if "thinking" in self._told_of else text.lstrip()
                kept = text.rstrip()
                self._space = text[len(kept) :]
                self._told_of |= {"thinking"} if kept else set()
                return Reasoning(kept) if kept else None
            case CallStart() | CallArguments():
                index = event.index - self._num_prefix_calls
                return replace(event, index=index) if index >= 0 else None
        return event

    def _strips(self, name: str) -> bool:
        region = self._syntax.regions.get(name)
        return region is None or region.strips


def _call_region(region: Region) -> CallRegion:
    closing = region.closing
    if closing is None:
        return CallRegion(region, None, ())
    texts = closing.literals or tuple(filter(None, [first_text(closing.pattern)]))
    return CallRegion(region, Pattern(closing.source), texts)
