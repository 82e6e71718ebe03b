"""Calls as a response_template describes them, written backwards: from its patterns, content and transform to Lark rules.

Knows which templates can be written so; the others are refused in words that name the key at fault. It must not know readers or
streams. Called by `hf` when a request's calls are to be enforced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import regex

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers.grammars import literal, schema_of
from halfbyte.entrypoints.tool_parsers.hf_calls import streamed_tags, streams_json
from halfbyte.entrypoints.tool_parsers.hf_patterns import (
    Atom,
    NotPlain,
    TagShape,
    first_text,
    texts,
    tokens_in,
    without_leading_space,
    written,
)
from halfbyte.entrypoints.tool_parsers.protocol import CallGrammar, JsonTerm
from halfbyte.entrypoints.tool_parsers.response_template import CallShape, Delimiter, Region
from halfbyte.entrypoints.tool_parsers.variants import Schema, variants
from halfbyte.errors import UserError

# Where a template allows any white space, a grammar allows this much: a model cannot go on with it for ever.
_SPACE_CHARS = 4
_SPACE = f"/[ \\t\\r\\n]{{1,{_SPACE_CHARS}}}/?"
_ANNOTATIONS = {"type", "title", "description", "default", "examples", "format", "$defs", "definitions", "deprecated"}
_ARGUMENTS = "\ufdd1"  # a noncharacter: where the arguments go


def call_grammar(region: Region, marks: Marks, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
    """The grammar of the region's calls. UserError where the template cannot be written backwards."""
    try:
        return _Writer(region, marks, json_term).grammar(tools, parallel)
    except NotPlain as reason:
        raise UserError(
            f"--tool-call-parser hf cannot enforce calls of this model: in its response_template, fields.tool_calls has {reason},"
            ' which tells how calls are read but not how they are written; use tool_choice "auto" without strict tools, and'
            " parallel_tool_calls true",
            param="tool_choice",
        ) from None


class _Writer:
    def __init__(self, region: Region, marks: Marks, json_term: JsonTerm) -> None:
        if region.opening is None or region.call_shape is None:
            raise NotPlain("a transform that does not take name and arguments as they are")
        self._region = region
        self._marks = marks
        self._json_term = json_term
        self._shape: CallShape = region.call_shape
        self._opening = without_leading_space(_one_source(region.opening))
        self._closing = "" if region.closing is None else without_leading_space(_one_source(region.closing))
        self._tags = streamed_tags(region)
        if self._tags is None and not streams_json(region):
            raise NotPlain(f"the content {region.content} with its content_args {json.dumps(dict(region.content_args))}")

    def grammar(self, tools: Sequence[Tool], parallel: bool) -> CallGrammar:
        trigger = self._trigger()
        layout = self._list if self._region.transform_each else self._regions
        return CallGrammar("\n".join(layout(trigger, tools, parallel)) + "\n", trigger)

    def _regions(self, trigger: str, tools: Sequence[Tool], parallel: bool) -> list[str]:
        """A region for each call."""
        more = f" ({_SPACE} {self._marks.terminal(trigger)} call)*" if parallel and self._region.repeats else ""
        rules = [f"calls: call{more}", _choice("call", len(tools))]
        for index, tool in enumerate(tools):
            groups = {} if self._shape.name_group is None else {self._shape.name_group: tool.name}
            name = f"call_{index}"
            rules.append(f"{name}: {self._opener(trigger, groups)} {name}_body {self._terms(written(self._closing, {}))}")
            rules += self._json(f"{name}_body", tool) if self._tags is None else self._elements(f"{name}_body", tool, self._tags)
        return rules

    def _list(self, trigger: str, tools: Sequence[Tool], parallel: bool) -> list[str]:
        """A region with a list of all calls."""
        if self._shape.name_group is not None:
            raise NotPlain("transform_each with a name from its opener")
        more = f' ({_SPACE} "," call)*' if parallel else ""
        closing = self._terms(written(self._closing, {}))
        rules = [f'calls: {self._opener(trigger, {})} {_SPACE} "[" call{more} {_SPACE} "]" {_SPACE} {closing}']
        rules.append(_choice("call", len(tools)))
        for index, tool in enumerate(tools):
            rules += self._json(f"call_{index}", tool)
        return rules

    def _trigger(self) -> str:
        """The token, or the text up to one, that an opener begins with."""
        text = first_text(self._opening)
        at, token = next(tokens_in(text, self._marks), (len(text), ""))
        if not text:
            raise NotPlain(f"the opener {self._opening!r}")
        return token if at == 0 else text[:at]

    def _opener(self, trigger: str, groups: Mapping[str, str]) -> str:
        """What stands behind the trigger in the opener of one call."""
        return self._terms(written(self._opening, groups)[len(trigger) :])

    def _json(self, rule: str, tool: Tool) -> list[str]:
        """`rule` as the JSON value of one call."""
        value: dict[str, Any] = {}
        for keys, leaf in ((self._shape.name_keys, tool.name), (self._shape.argument_keys, _ARGUMENTS)):
            at = value
            for key in keys[:-1]:
                at = at.setdefault(key, {})
            if keys:
                at[keys[-1]] = leaf
        whole: Any = value if self._shape.argument_keys else _ARGUMENTS
        before, behind = json.dumps(whole, ensure_ascii=False).split(json.dumps(_ARGUMENTS, ensure_ascii=False))
        parts = [_SPACE, literal(before) if before else "", f"{rule}_arguments", literal(behind) if behind else "", _SPACE]
        return [f"{rule}: {' '.join(filter(None, parts))}", f"{rule}_arguments: {self._json_term(schema_of(tool))}"]

    def _elements(self, rule: str, tool: Tool, tags: TagShape) -> list[str]:
        """`rule` as the tags of one call: those of required parameters in the order of the schema, then the others."""
        properties, required = _properties(tool)
        order = sorted(properties, key=lambda key: key not in required)
        names = [f"{rule}_{index}" for index in range(len(order))]
        parts = [name if key in required else f"{name}?" for name, key in zip(names, order, strict=True)]
        rules = [f"{rule}: {' '.join([*parts, _SPACE])}"]
        for name, key in zip(names, order, strict=True):
            head = f"{_SPACE} {self._terms(written(tags.head, {'key': key}))}"
            values = []
            found = variants(properties[key], tool.parameters)
            if any(_is_text(variant) and not set(variant) - _ANNOTATIONS for variant in found):
                found = [{}]  # any text is good, also one that means something else
            for index, variant in enumerate(found):
                values.append(f"{name}_{index}")
                rules += self._value(f"{name}_{index}", tool, key, variant, tags)
            rules.append(f"{name}: {head} ({' | '.join(values)})")
        return rules

    def _value(self, rule: str, tool: Tool, key: str, variant: Schema, tags: TagShape) -> list[str]:
        """`rule` as a value of one type, and what closes it."""
        tail = written(without_leading_space(tags.tail_of(key)), {})
        tail_text = next((text for start, text in texts(tail) if start == 0), "")
        closed = f"{_SPACE} {self._terms(tail)}" if tags.tail.startswith("\\s") else self._terms(tail)
        forbidden = [text for text in (tail_text, *self._closing_texts()) if text]
        if "const" in variant:
            const = variant["const"] if isinstance(variant["const"], str) else json.dumps(variant["const"], ensure_ascii=False)
            if any(text in const for text in forbidden):
                raise _unwritable(tool, f"{key}: the value {const!r} cannot be written in this model's syntax")
            return [f"{rule}: {literal(const) if const else ''} {closed}"]
        if not _is_text(variant):
            definitions = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
            return [f"{rule}: {self._json_term({**definitions, **variant})} {closed}"]
        if strange := sorted(set(variant) - _ANNOTATIONS):
            raise _unwritable(tool, f"{key}: {strange[0]!r} of a string cannot be enforced in this model's syntax")
        terminal = f"{rule}_text".upper()
        words = f"/(?s:.*)/ & ~(/(?s:.*)/ ({' | '.join(map(literal, forbidden))}) /(?s:.*)/)" if forbidden else "/(?s:.*)/"
        if next(tokens_in(tail_text, self._marks), (1, ""))[0] == 0:
            return [f"{rule}: {terminal} {self._terms(tail)}", f"{terminal}: {words}"]
        return [f"{rule}[lazy]: {terminal}", f"{terminal}: ({words}) {self._terms(tail)}"]

    def _closing_texts(self) -> Sequence[str]:
        """What ends the region also inside of a value."""
        closing = self._region.closing
        return () if closing is None else closing.literals or [first_text(closing.pattern)]

    def _terms(self, pieces: list[Atom]) -> str:
        """`pieces` of a pattern in Lark."""
        has_choice = False
        depths: list[int] = []
        depth = 0
        for piece in pieces:
            depth += (piece.kind == "open") - (piece.kind == "close")
            depths.append(depth)
            has_choice |= piece.kind == "or" and not depth
        terms: list[str] = []
        end = 0
        for start, text in texts(pieces):
            tokens = list(tokens_in(text, self._marks))
            if tokens and (has_choice or depths[start]):
                raise NotPlain(f"the token {tokens[0][1]!r} in a choice or a group")
            if not has_choice and not depths[start]:
                terms += [_expression(pieces[end:start]), *self._literals(text, tokens)]
                end = start + len(text)
        return " ".join(filter(None, [*terms, _expression(pieces[end:])]))

    def _literals(self, text: str, tokens: list[tuple[int, str]]) -> Iterator[str]:
        """A text in Lark, its tokens as such."""
        end = 0
        for at, token in tokens:
            yield literal(text[end:at]) if at > end else ""
            yield self._marks.terminal(token)
            end = at + len(token)
        yield literal(text[end:]) if text[end:] else ""


def _one_source(delimiter: Delimiter) -> str:
    return delimiter.pattern or regex.escape(delimiter.literals[0])


def _choice(rule: str, count: int) -> str:
    return f"{rule}: {' | '.join(f'{rule}_{index}' for index in range(count))}"


def _expression(run: list[Atom]) -> str:
    """Pieces without tokens as one terminal."""
    source = ""
    for atom in run:
        if atom.kind == "repeat":
            plain = atom.source if len(atom.source) == 1 else atom.source.rstrip("?+")
            after_space = source.endswith("\\s") and plain in ("*", "+")
            source += f"{{{int(plain == '+')},{_SPACE_CHARS}}}" if after_space else plain
        elif atom.kind == "text":
            source += _escaped(atom.text)
        else:
            source += "(?s:.)" if atom.source == "." else atom.source.replace("/", "\\/").replace("\n", "\\n")
    return f"/{source}/" if source else ""


def _escaped(char: str) -> str:
    """A character of a text in an expression of Lark's."""
    if char in "\n\t\r\f\v":
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\f": "\\f", "\v": "\\v"}[char]
    return "\\" + char if char.isascii() and not char.isalnum() and char not in " _<>" else char


def _properties(tool: Tool) -> tuple[Mapping[str, object], Sequence[str]]:
    """The properties of a tool's arguments, and which are required."""
    schema = tool.parameters
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object" or not isinstance(properties, Mapping) or not isinstance(required, list):
        raise _unwritable(tool, "its parameters must be an object with properties")
    if strange := sorted(set(schema) - _ANNOTATIONS - {"properties", "required", "additionalProperties", "$schema"}):
        raise _unwritable(tool, f"{strange[0]!r} of its parameters cannot be enforced in this model's syntax")
    return {**properties, **{key: {} for key in required if key not in properties}}, required


def _is_text(variant: Schema) -> bool:
    return variant.get("type", "string") == "string"


def _unwritable(tool: Tool, reason: str) -> UserError:
    return UserError(
        f"tool {tool.name!r}: {reason}; leave strict and tool_choice as they are by default, or change the schema", param="tools"
    )
