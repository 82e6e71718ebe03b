"""A syntax that a file describes: marks as texts, and regular expressions for the head of a call and of a parameter.

The arguments are JSON, or parameters with an element each, which the tool's schema makes JSON of. Knows no model;
`--tool-call-parser regex:FILE` hands it the file's content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.reading import EndOfText, NotACall, Reader, Steps, Text
from halfbyte.entrypoints.tool_parsers.element_grammar import ParameterRules
from halfbyte.entrypoints.tool_parsers.element_shapes import ParameterShape, Sign, sign
from halfbyte.entrypoints.tool_parsers.grammars import literal, schema_of
from halfbyte.entrypoints.tool_parsers.head_patterns import HeadPattern, PatternError, head_pattern
from halfbyte.entrypoints.tool_parsers.json_calls import arguments_value, json_value
from halfbyte.entrypoints.tool_parsers.protocol import CallGrammar, CallReader, JsonTerm
from halfbyte.entrypoints.tool_parsers.typed import ArgumentsWriter, types_of
from halfbyte.errors import UserError

if TYPE_CHECKING:
    from halfbyte.engine.tokenizer import Tokenizer

FLAG = "--tool-call-parser"
MAX_FILE_BYTES = 64 * 1024


class Regex:
    """config: the content of the file, see docs/tool_calls.md. UserError says what is wrong with it."""

    def __init__(self, marks: Marks, config: Mapping[str, Any]) -> None:
        _check_keys(config, "", required={"open", "name", "arguments", "close"}, optional={"section", "parameter", "between"})
        self._opening, self._closing = sign(marks, _text(config, "open")), sign(marks, _text(config, "close"))
        self._name = _head(config, "name", "name")
        self._between = _text(config, "between") if "between" in config else ""
        section = _part(config, "section") if "section" in config else {}
        self._section = tuple(sign(marks, _text(section, key)) for key in ("open", "close") if section)
        if config["arguments"] not in ("json", "parameters"):
            raise _wrong(f'arguments must be "json" or "parameters", got {config["arguments"]!r}')
        if (config["arguments"] == "parameters") != ("parameter" in config):
            raise _wrong('parameter goes with arguments: "parameters", and only with it')
        self._parameter = _Parameter(marks, _part(config, "parameter")) if "parameter" in config else None

    @classmethod
    def for_server(cls, marks: Marks, value: str, tokenizer: Tokenizer, flag: str) -> Regex:
        """`value` is `regex:FILE`; the file is JSON or YAML."""
        path = Path(value.partition(":")[2])
        try:
            with path.open("rb") as file:
                source = file.read(MAX_FILE_BYTES + 1)
            config = yaml.safe_load(source.decode()) if len(source) <= MAX_FILE_BYTES else None
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"{FLAG} {value}: the file cannot be read: {error}", param=FLAG) from None
        if not isinstance(config, Mapping):
            raise UserError(f"{FLAG} {value}: the file must hold one mapping, in at most {MAX_FILE_BYTES} bytes", param=FLAG)
        return cls(marks, config)

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        by_name = {tool.name: tool for tool in tools}
        return Reader(lambda text: self._read(text, by_name))

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        for tool in tools:
            self._check_names(tool)
        before, behind = self._name.terms
        bodies = [f"{before} {literal(tool.name)} {behind} arguments_{index}" for index, tool in enumerate(tools)]
        rules = [f"call: ({' | '.join(bodies)}) {self._closing.term}"]
        rules += [] if self._parameter is None else [self._parameter.rules.shared]
        for index, tool in enumerate(tools):
            rule = f"arguments_{index}"
            if self._parameter is not None:
                rules.append(self._parameter.rules.rules(rule, tool, json_term))
            else:
                rules.append(f"{rule}: {json_term(schema_of(tool))}")
        between = literal(self._between) if self._between else ""
        calls = f"call ({between} {self._opening.term} call)*" if parallel else "call"
        trigger = self._opening
        if self._section:
            trigger, calls = self._section[0], f"{self._opening.term} {calls} {self._section[1].term}"
        return CallGrammar("\n".join([f"calls: {calls}", *rules]) + "\n", trigger.text)

    def _read(self, text: Text, tools: Mapping[str, Tool]) -> Steps[None]:
        opening, close = self._opening.read, self._closing.read
        section = tuple(mark.read for mark in self._section)
        ends = (close, opening, *section)
        while True:
            mark = yield from text.until(opening, *section[:1], sink=text.content)
            text.open_call(mark)
            if mark != opening:
                yield from text.skip_space()
                yield from text.expect(opening)
            name = yield from self._called(text)
            text.start_call(name)
            if self._parameter is not None:
                yield from self._parameter.read(text, tools.get(name), ends)
            else:
                yield from text.skip_space()
                yield from arguments_value(text, close)
            text.end_call()
            yield from text.skip_space(text.content)
            yield from text.accepts(close, drops_cut=True)
            if section:
                yield from text.skip_space(text.content)
                yield from text.accepts(section[1], drops_cut=True)

    def _check_names(self, tool: Tool) -> None:
        if not self._name.fits(tool.name):
            raise UserError(
                f"tool {tool.name!r}: the expression for names, in the file of {FLAG}, has no such name", param="tools"
            )
        keys = tool.parameters.get("properties", {}) if self._parameter is not None else {}
        for key in keys if isinstance(keys, Mapping) else ():
            if self._parameter is not None and not self._parameter.key.fits(key):
                raise UserError(
                    f"tool {tool.name!r}: the expression for parameters, in the file of {FLAG}, has no {key!r}", param="tools"
                )

    def _called(self, text: Text) -> Steps[str]:
        try:
            name = yield from self._name.read(text)
        except EndOfText:
            name = None
        if name is None:
            raise NotACall
        return name


class _Parameter:
    """How one parameter is written: a head with its name, its text, a mark."""

    def __init__(self, marks: Marks, config: Mapping[str, Any]) -> None:
        self.key = _head(config, "open", "key", "parameter.")
        self._close = sign(marks, _text(config, "close", "parameter."))

    @property
    def rules(self) -> ParameterRules:
        # Of a head's signs only the terms are used. Their text is the one that no value may hold anyway.
        before, behind = (Sign("", term, self._close.text) for term in self.key.terms)
        return ParameterRules(ParameterShape(before, {behind: None}, self._close, pad="", gap=""), ())

    def read(self, text: Text, tool: Tool | None, ends: tuple[str, ...]) -> Steps[None]:
        """Read parameters up to what is none: one of the marks `ends`, or anything else."""
        writer = ArgumentsWriter(tool, text.arguments)
        while (key := (yield from self._next_key(text, writer, ends))) is not None:
            writer.begin(key)
            types = types_of(tool, key)
            if types and "string" not in types and (yield from text.peek()) in ("{", "["):
                yield from json_value(text, writer.feed, self._close.read)  # whose strings may hold the mark
            yield from text.until(self._close.read, sink=writer.feed)
            writer.end()
        writer.close()

    def _next_key(self, text: Text, writer: ArgumentsWriter, ends: tuple[str, ...]) -> Steps[str | None]:
        """Where the answer ends with all that the tool requires, so does the call."""
        try:
            yield from text.skip_space()
            if (end := (yield from text.accepts(*ends))) is not None:
                text.put_back(end)
                return None
            return (yield from self.key.read(text))
        except EndOfText:
            if writer.has_required and not text.was_cut:
                writer.close()
            raise


def _head(config: Mapping[str, Any], key: str, group: str, path: str = "") -> HeadPattern:
    try:
        return head_pattern(_text(config, key, path), group)
    except PatternError as error:
        raise _wrong(f"{path}{key} {error}: {config[key]!r}") from None


def _part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = config[key]
    if not isinstance(part, Mapping):
        raise _wrong(f"{key} must be a mapping with open and close, got {part!r}")
    _check_keys(part, f"{key}.", required={"open", "close"})
    return part


def _text(config: Mapping[str, Any], key: str, path: str = "") -> str:
    text = config[key]
    if not isinstance(text, str) or not text:
        raise _wrong(f"{path}{key} must be a text that is not empty, got {text!r}")
    return text


def _check_keys(
    config: Mapping[str, Any], path: str, *, required: set[str], optional: frozenset[str] | set[str] = frozenset()
) -> None:
    for key in sorted(required - set(config)):
        raise _wrong(f"{path}{key} is missing")
    for key in sorted(map(str, set(config) - required - optional)):
        raise _wrong(f"{path}{key} is unknown; known are {', '.join(sorted(required | optional))}")


def _wrong(message: str) -> UserError:
    return UserError(f"{FLAG} regex: in its file, {message}", param=FLAG)
