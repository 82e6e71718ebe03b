"""Reading the calls of one region as they come: JSON, tags, or, where a template allows neither, the region as a whole.

Knows how a region's content is told as calls. It must not know what opens regions, prompts or grammars. Called by `hf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.reading import EndOfText, NotACall, Steps, Text, limited
from halfbyte.entrypoints.tool_parsers.hf_delimiters import Delimiters, Found, Pattern
from halfbyte.entrypoints.tool_parsers.hf_patterns import TagShape, tag_shape
from halfbyte.entrypoints.tool_parsers.hf_values import Malformed, calls_of
from halfbyte.entrypoints.tool_parsers.json_calls import arguments_value, json_string, json_value
from halfbyte.entrypoints.tool_parsers.response_template import CallShape, Region
from halfbyte.entrypoints.tool_parsers.typed import ArgumentsWriter

_DIALECT = ("unquoted_keys", "string_delims", "allow_non_json")


def streams_json(region: Region) -> bool:
    """Whether the region is plain JSON with name and arguments as parts of it."""
    args = region.content_args
    return region.content == "json" and region.call_shape is not None and not any(args.get(key) for key in _DIALECT)


def streamed_tags(region: Region) -> TagShape | None:
    """The tags of a region whose opener names the tool and whose tags are its arguments; None for any other."""
    shape, args = region.call_shape, region.content_args
    if region.content != "xml-inline" or shape is None or shape.name_group is None or shape.argument_keys:
        return None
    if region.transform_each or args.get("value_parser") is not None or args.get("merge_duplicates"):
        return None
    return tag_shape(args["tag_pattern"])


@dataclass(frozen=True)
class CallRegion:
    """A region of calls. closing: what ends it; None: the end of the answer. ends: marks that end JSON when they come in it."""

    region: Region
    closing: Pattern | None
    ends: tuple[str, ...]

    def read(self, text: Text, opener: Found, tools: Mapping[str, Tool]) -> Steps[None]:
        """Tell the calls behind `opener`, which was just read."""
        if streams_json(self.region):
            text.open_call(opener.text)
            yield from self._json(text, opener)
        elif (tags := streamed_tags(self.region)) is not None:
            text.open_call(opener.text)
            yield from self._tags(text, opener, tags, tools)
        else:
            yield from self._whole(text, opener, tools)

    def _json(self, text: Text, opener: Found) -> Steps[None]:
        shape = self.region.call_shape
        if shape is None:
            raise NotACall
        name = None if shape.name_group is None else opener.groups.get(shape.name_group, "")
        yield from text.skip_space()
        if name is not None and not self.region.transform_each and (yield from self._closes(text)):
            text.start_call(name)
            text.end_call()
            return
        if self.region.transform_each:
            yield from text.expect("[")
            yield from text.skip_space()
            is_over = (yield from text.accepts("]")) is not None
            while not is_over:
                yield from _JsonCall(text, shape, name, self.ends).read()
                yield from text.skip_space()
                is_over = (yield from text.expect(",", "]")) == "]"
                if not is_over:
                    yield from text.skip_space()
        else:
            yield from _JsonCall(text, shape, name, self.ends).read()
        yield from text.skip_space()
        yield from self._closes(text)

    def _tags(self, text: Text, opener: Found, tags: TagShape, tools: Mapping[str, Tool]) -> Steps[None]:
        shape = self.region.call_shape
        name = opener.groups.get(shape.name_group, "").strip() if shape is not None and shape.name_group is not None else ""
        text.start_call(name)
        writer = ArgumentsWriter(tools.get(name), text.arguments)
        closing = [] if self.closing is None else [("closing", self.closing)]
        between = Delimiters([("tag", Pattern(tags.head)), *closing])
        while True:
            try:
                which, found = yield from between.until(text, _nothing)
            except EndOfText:
                if self.closing is None:
                    writer.close()
                raise
            if which == "tag":
                key = found.groups["key"]
                writer.begin(key)
                value = Delimiters([("tag", Pattern(tags.tail_of(key))), *closing])
                which, _ = yield from value.until(text, writer.feed)
                writer.end()
            if which == "closing":
                writer.close()
                return

    def _whole(self, text: Text, opener: Found, tools: Mapping[str, Tool]) -> Steps[None]:
        """A region that the answer leaves open is read like a closed one. One that cannot be read is content."""
        body: list[str] = []
        closer = ""
        is_over = False
        try:
            _, found = yield from self._end.until(text, body.append)
            closer = found.text
        except EndOfText:
            is_over = True
        try:
            for name, arguments in calls_of(self.region, "".join(body), opener.groups, tools):
                text.start_call(name)
                text.arguments(arguments)
        except Malformed:
            text.content(opener.text + "".join(body) + closer)
        if is_over:
            raise EndOfText

    @property
    def _end(self) -> Delimiters[str]:
        return Delimiters([] if self.closing is None else [("closing", self.closing)])

    def _closes(self, text: Text) -> Steps[bool]:
        return (yield from self._end.accepts(text))


class _JsonCall:
    """Reads one JSON value and tells the call in it. name: where the opener has told it."""

    def __init__(self, text: Text, shape: CallShape, name: str | None, ends: tuple[str, ...]) -> None:
        self._text = text
        self._shape = shape
        self._name = name
        self._ends = ends
        self._is_started = False
        self._early: list[str] = []  # arguments that came before the name

    def read(self) -> Steps[None]:
        """NotACall if the value is no object, or names nothing."""
        if (yield from self._text.peek()) != "{":
            raise NotACall
        if self._name is not None:
            self._start(self._name)
        yield from self._value(())
        if not self._is_started:
            raise NotACall
        self._text.end_call()

    def _start(self, name: str) -> None:
        self._text.start_call(name)
        self._is_started = True
        self._text.arguments("".join(self._early))

    def _value(self, path: tuple[str, ...]) -> Steps[None]:
        """Read the value to which the keys `path` lead."""
        text, shape = self._text, self._shape
        first = yield from text.peek()
        if path == shape.argument_keys and self._is_started:
            yield from arguments_value(text, *self._ends)
        elif path == shape.argument_keys:
            yield from json_value(text, self._early.append, *self._ends)
        elif self._name is None and path == shape.name_keys:
            name: list[str] = []
            yield from json_string(text, limited(name))
            self._start("".join(name))
        elif first == "{" and path in (shape.argument_keys[: len(path)], shape.name_keys[: len(path)]):
            yield from self._object(path)
        else:
            yield from json_value(text, _nothing, *self._ends)

    def _object(self, path: tuple[str, ...]) -> Steps[None]:
        text = self._text
        separator = yield from text.expect("{")
        while separator != "}":
            yield from text.skip_space()
            if separator == "{" and (yield from text.accepts("}")) is not None:
                return
            key: list[str] = []
            yield from json_string(text, limited(key))
            yield from text.skip_space()
            yield from text.expect(":")
            yield from text.skip_space()
            yield from self._value((*path, "".join(key)))
            yield from text.skip_space()
            separator = yield from text.expect(",", "}")


def _nothing(piece: str) -> None:
    """A sink for what means nothing."""
