"""Every recorded answer of every syntax: whole, in pieces however cut, ended at any character, and where marks are tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers import TOOL_PARSERS
from halfbyte.entrypoints.tool_parsers.protocol import ToolSyntax
from tests.unit.growth import is_linear
from tests.unit.tool_parsers.recorded import Recorded, read, read_with

HERE = Path(__file__).parent
NEEDS_CONFIGURATION = {"hf", "regex"}


def recorded() -> Iterator[tuple[str, ToolSyntax, Recorded]]:
    """(parser, its syntax, an answer): each module with RECORDED names its PARSER or PARSERS, and may have a SYNTAX."""
    for path in sorted(HERE.glob("test_*.py")):
        if path.stem == "test_conformance":
            continue
        module = import_module(f"tests.unit.tool_parsers.{path.stem}")
        for name in getattr(module, "PARSERS", None) or [getattr(module, "PARSER", "")]:
            cases = (
                module.RECORDED[name] if isinstance(getattr(module, "RECORDED", []), dict) else getattr(module, "RECORDED", [])
            )
            for case in cases:
                syntax = getattr(module, "SYNTAX", {}).get(case.name) or make(name)
                yield name, syntax, case


def make(name: str) -> ToolSyntax:
    module, _, kind = TOOL_PARSERS[name].partition(":")
    return getattr(import_module(module), kind)(Marks())  # type: ignore[no-any-return]


ALL = list(recorded())
answers = pytest.mark.parametrize(("syntax", "case"), [a[1:] for a in ALL], ids=[f"{a[0]}: {a[2].name}" for a in ALL])


def test_there_is_an_answer_for_every_syntax() -> None:
    counts = {name: sum(parser == name for parser, _, _ in ALL) for name in TOOL_PARSERS}
    print(len(ALL), "recorded answers:", counts)
    assert len(ALL) >= 60 and min(counts.values()) >= 3, counts


@answers
def test_whole(syntax: ToolSyntax, case: Recorded) -> None:
    meaning = read_with(syntax, case, [case.text])
    assert [tuple(call) for call in meaning.calls] == list(case.calls)
    assert (meaning.content, meaning.reasoning) == (case.content, case.reasoning)
    if case.call_ids is not None:
        assert meaning.call_ids == list(case.call_ids)


@answers
def test_every_cut_into_two_and_many_into_more(syntax: ToolSyntax, case: Recorded) -> None:
    whole = read_with(syntax, case, [case.text])
    assert read_with(syntax, case, case.text) == whole
    for at in range(1, len(case.text)):
        assert read_with(syntax, case, [case.text[:at], case.text[at:]]) == whole, f"cut at {at}"
    draw = random.Random(case.text)
    for _ in range(20):
        cuts = (
            sorted(draw.sample(range(1, len(case.text)), min(draw.randint(2, 9), len(case.text) - 1)))
            if len(case.text) > 2
            else []
        )
        pieces = [case.text[a:b] for a, b in zip([0, *cuts], [*cuts, len(case.text)], strict=True)]
        assert read_with(syntax, case, pieces) == whole, pieces


@answers
def test_an_answer_that_ends_anywhere_reads_the_same_whole_and_letter_by_letter(syntax: ToolSyntax, case: Recorded) -> None:
    """And what was told before the end was no other than what is told of the whole answer."""
    whole = read_with(syntax, case, [case.text])
    for at in range(len(case.text) + 1):
        begun = case.text[:at]
        ended = read_with(syntax, case, [begun])
        assert read_with(syntax, case, begun) == ended, f"ended at {at}"
        told = read_with(syntax, case, begun, finish=False)
        assert whole.content.startswith(told.content) and whole.reasoning.startswith(told.reasoning), f"ended at {at}"
        for seen, full in zip(told.calls, whole.calls, strict=False):
            assert seen[0] == full[0] and full[1].startswith(seen[1]), f"ended at {at}"
        assert len(told.calls) <= len(whole.calls)


@pytest.mark.parametrize("name", [name for name in TOOL_PARSERS if name not in NEEDS_CONFIGURATION])
def test_texts_that_nearly_are_calls_cost_little(name: str) -> None:
    """32 kB of what looks like a beginning, whole, and in pieces of four characters; nothing of it is lost."""
    beginnings = {case.text[:count] for parser, _, case in ALL if parser == name for count in (1, 12, 25)}
    for beginning in sorted(beginnings):
        for piece in (32_000, 4):

            def tell(length: int, beginning: str = beginning, piece: int = piece) -> None:
                text = (beginning * (length // len(beginning) + 1))[:length]
                meaning = read(make(name).reader([]), [text[i : i + piece] for i in range(0, length, piece)])
                assert meaning.calls or meaning.reasoning or meaning.content.strip() == text.strip(), beginning

            assert is_linear(tell, 32_000), (beginning, piece)
