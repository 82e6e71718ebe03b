"""Calls as elements, `<function=NAME>` around its parameters: Qwen3-Coder, Seed-OSS, MiniMax-M2, Step3, DeepSeek-V3.2 and V4.

Their languages differ in the marks alone. A call that stands in no section counts if it names a tool of the request: models
forget the section's mark, and also write about their own syntax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.reading import NotACall, Reader, Steps, Text
from halfbyte.entrypoints.tool_parsers.element_grammar import ParameterRules
from halfbyte.entrypoints.tool_parsers.element_reading import ParameterReader, is_name
from halfbyte.entrypoints.tool_parsers.element_shapes import ParameterShape, sign
from halfbyte.entrypoints.tool_parsers.grammars import literal
from halfbyte.entrypoints.tool_parsers.protocol import CallGrammar, CallReader, JsonTerm
from halfbyte.entrypoints.tool_parsers.typed import ArgumentsWriter

_NOT_STRINGS = ("integer", "number", "boolean", "null", "array", "object")


@dataclass(frozen=True, slots=True)
class Family:
    """The marks of a family; those of a call in pieces that are tokens or texts.

    section: around each call, or around all calls of an answer (one_section). call: before and behind a function's name, and the
    end. parameter: before its name, and the end. key_ends: behind its name -> the types of a value, None where the schema tells
    them. pad: around a value. required: tokens without which a vocabulary is not of this family.
    """

    parser: str
    section: tuple[str, str]
    call: tuple[tuple[str, ...], str, tuple[str, ...]]
    parameter: tuple[str, str]
    key_ends: Mapping[str, tuple[str, ...] | None]
    pad: str = ""
    one_section: bool = False
    required: tuple[str, ...] = ()


class Elements:
    """The syntax of a family."""

    family: ClassVar[Family]

    def __init__(self, marks: Marks) -> None:
        family = self.family
        marks.require(f"--tool-call-parser {family.parser}", *family.required)
        self._section, self._section_end = (sign(marks, text) for text in family.section)
        opening, self._head_end, end = family.call
        self._call, self._call_end = sign(marks, *opening), sign(marks, *end)
        key_ends = {sign(marks, text): types for text, types in family.key_ends.items()}
        before, close = (sign(marks, text) for text in family.parameter)
        shape = ParameterShape(before, key_ends, close, pad=family.pad, gap="\n")
        others = (self._section_end, self._section, self._call)
        call_ends = {self._call_end: others, **dict.fromkeys(others, ())}
        self._parameters = ParameterReader(shape, call_ends)
        self._rules = ParameterRules(shape, list(call_ends))

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        by_name = {tool.name: tool for tool in tools}
        return Reader(lambda text: self._read(text, by_name))

    def grammar(self, tools: Sequence[Tool], json_term: JsonTerm, *, parallel: bool) -> CallGrammar:
        opening, end = self._section.term, self._section_end.term
        if not parallel:
            calls = f'calls: "\\n" call "\\n" {end}'
        elif self.family.one_section:
            calls = f'calls: "\\n" (call "\\n")+ {end}'
        else:
            calls = f'calls: "\\n" call "\\n" {end} ("\\n" {opening} "\\n" call "\\n" {end})*'
        rules = [calls, f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
        for index, tool in enumerate(tools):
            head = literal(tool.name + self._head_end + "\n")
            rules.append(f"call_{index}: {self._call.term} {head} parameters_{index} {self._call_end.term}")
            rules.append(self._rules.rules(f"parameters_{index}", tool, json_term))
        return CallGrammar("\n".join([*rules, self._rules.shared]), self.family.section[0], others=self.family.call[0])

    def _read(self, text: Text, tools: Mapping[str, Tool]) -> Steps[None]:
        section, section_end, call, call_end = (s.read for s in (self._section, self._section_end, self._call, self._call_end))
        in_section = False
        mark = call_end
        while True:
            if mark == call_end:
                if in_section:
                    yield from text.skip_space()
                known = (section, call, section_end) if in_section else (section, call)
                mark = yield from text.until(*known, sink=text.content, drops_cut=in_section)
            if mark == section_end:
                in_section, mark = False, call_end
                continue
            text.open_call(mark)
            is_alone = mark == call and not in_section
            if mark == section:
                yield from text.skip_space()
                yield from text.expect(call)
            name, _ = yield from text.word(self._head_end)
            if not is_name(name) or (is_alone and name not in tools):
                raise NotACall
            text.start_call(name)
            in_section = True  # also where its mark was forgotten, so that the end mark is known
            mark = yield from self._parameters.read(text, ArgumentsWriter(tools.get(name), text.arguments))
            text.end_call()


class Qwen3Coder(Elements):
    """Qwen3-Coder, Qwen3.5, and others of their template."""

    family = Family(
        "qwen3_coder",
        section=("<tool_call>", "</tool_call>"),
        call=(("<function=",), ">", ("</function>",)),
        parameter=("<parameter=", "</parameter>"),
        key_ends={">": None},
        pad="\n",
        required=("<tool_call>", "</tool_call>"),
    )


class Step3p5(Elements):
    """Step-3.5, which writes as Qwen3-Coder does."""

    family = replace(Qwen3Coder.family, parser="step3p5", required=())


class SeedOss(Elements):
    family = Family(
        "seed_oss",
        section=("<seed:tool_call>", "</seed:tool_call>"),
        call=(("<function=",), ">", ("</function>",)),
        parameter=("<parameter=", "</parameter>"),
        key_ends={">": None},
        required=("<seed:tool_call>", "</seed:tool_call>"),
    )


class MiniMaxM2(Elements):
    family = Family(
        "minimax_m2",
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        call=(('<invoke name="',), '">', ("</invoke>",)),
        parameter=('<parameter name="', "</parameter>"),
        key_ends={'">': None},
        one_section=True,
        required=("<minimax:tool_call>", "</minimax:tool_call>"),
    )


class Step3(Elements):
    family = Family(
        "step3",
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        call=(
            ("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", '<steptml:invoke name="'),
            '">',
            ("</steptml:invoke>", "<｜tool_call_end｜>"),
        ),
        parameter=('<steptml:parameter name="', "</steptml:parameter>"),
        key_ends={'">': None},
        one_section=True,
        required=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>"),
    )


class DeepseekV32(Elements):
    """Its parameters say themselves whether they are strings or JSON."""

    family = Family(
        "deepseek_v32",
        section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        call=(('<｜DSML｜invoke name="',), '">', ("</｜DSML｜invoke>",)),
        parameter=('<｜DSML｜parameter name="', "</｜DSML｜parameter>"),
        key_ends={'" string="true">': ("string",), '" string="false">': _NOT_STRINGS, '">': None},
        one_section=True,
    )


class DeepseekV4(Elements):
    family = replace(DeepseekV32.family, parser="deepseek_v4", section=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"))
