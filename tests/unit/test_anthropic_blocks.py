"""Content blocks out of what was read of an answer: their order, their events, and calls that are cut."""

from __future__ import annotations

import json
from typing import Any

import jiter
import msgspec
import pytest

from halfbyte.entrypoints.answers.events import CallArguments, CallStart, Content, Event, Reasoning
from halfbyte.entrypoints.anthropic.blocks import Blocks, input_of, signature
from halfbyte.entrypoints.anthropic.wire import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    SignatureDelta,
    StreamEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)


def write(*feeds: list[Event]) -> tuple[Blocks, list[StreamEvent]]:
    blocks, told = Blocks(), list[StreamEvent]()
    for events in feeds:
        told += blocks.take(events)
    return blocks, told + blocks.finish()


def shown(blocks: Blocks) -> list[Any]:
    texts = {TextBlock: "text", ThinkingBlock: "thinking", ToolUseBlock: "input"}
    return [shown_block(b, _str(getattr(b, texts[type(b)]))) for b in blocks.content]


def _str(value: Any) -> str:
    return value if isinstance(value, str) else bytes(value).decode()


ANSWER: list[Event] = [
    *map(Reasoning, ("\n", "hm", " \n")), *map(Content, ("\n\n", "I look.", "\n")),
    CallStart(0, "look", "a"), CallArguments(0, '{"at"'), CallArguments(0, ": 1}"), Content("\n"),
    CallStart(1, "go", "b"), CallArguments(1, "{}"), Content("\n "), Content("Then"),
    CallStart(2, "go", "c"), CallArguments(2, "{}"),
]  # fmt: skip
BLOCKS = [("thought", "\nhm \n"), "\n\nI look.\n", ("look", {"at": 1}), ("go", {}), "\n Then", ("go", {})]


def test_blocks_come_in_order_and_white_space_alone_makes_none() -> None:
    blocks, _ = write(ANSWER)
    assert shown(blocks) == BLOCKS and blocks.has_calls and blocks.calls_are_complete
    assert isinstance(blocks.content[0], ThinkingBlock) and blocks.content[0].signature == signature("\nhm \n")


def test_events_tell_the_same_blocks_however_the_answer_is_cut() -> None:
    for size in (1, 2, 5, len(ANSWER)):
        blocks, told = write(*(ANSWER[i : i + size] for i in range(0, len(ANSWER), size)))
        assert shown(blocks) == BLOCKS
        assert replayed(told) == BLOCKS


def replayed(told: list[StreamEvent]) -> list[Any]:
    """The blocks as a client puts them together; each block starts when the one before has stopped."""
    found: list[Any] = []
    is_open = False
    for event in told:
        match event:
            case ContentBlockStart(index, block):
                assert not is_open and index == len(found)
                is_open = True
                found.append((block, ""))
            case ContentBlockDelta(index, delta):
                assert is_open and index == len(found) - 1
                block, text = found[-1]
                match delta:
                    case TextDelta(more) | ThinkingDelta(more) | InputJsonDelta(more):
                        found[-1] = (block, text + more)
                    case SignatureDelta(name):
                        assert name == signature(text)
            case ContentBlockStop(index):
                assert is_open and index == len(found) - 1
                is_open = False
    assert not is_open
    return [shown_block(block, text) for block, text in found]


def shown_block(block: Any, text: str) -> Any:
    if isinstance(block, ToolUseBlock):
        return block.name, json.loads(text)
    return text if isinstance(block, TextBlock) else ("thought", text)


def test_deltas_of_one_step_are_one() -> None:
    _, told = write([Content("a"), Content("b"), CallStart(0, "f", "x"), CallArguments(0, "{"), CallArguments(0, "}")])
    assert [e.delta for e in told if isinstance(e, ContentBlockDelta)] == [TextDelta("ab"), InputJsonDelta("{}")]


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([], [""]),
        ([Content("\n")], ["\n"]),
        ([Reasoning(" ")], [""]),
        ([Reasoning(" "), Content(" ")], [" "]),
        ([Reasoning("x")], [("thought", "x")]),
    ],
)
def test_an_answer_has_at_least_one_block(events: list[Event], told: list[Any]) -> None:
    assert shown(write(events)[0]) == told


def test_a_call_that_is_cut_is_not_complete() -> None:
    blocks, _ = write([CallStart(0, "f", "x"), CallArguments(0, "{}"), CallStart(1, "g", "y"), CallArguments(1, '{"a": "b')])
    assert shown(blocks) == [("f", {}), ("g", {})] and not blocks.calls_are_complete


ARGUMENTS = '{"city": "Oslo \\u00f8", "days": [1, 2.5, {"a": null}], "deep": {"b": true, "n": -12}, "last": "x"}'


def test_the_input_of_a_cut_call_is_what_the_official_client_makes_of_the_stream() -> None:
    for end in range(1, len(ARGUMENTS)):
        complete, told = input_of(ARGUMENTS[:end])
        assert not complete and json.loads(bytes(told)) == jiter.from_json(ARGUMENTS[:end].encode(), partial_mode=True)
    assert input_of(ARGUMENTS) == (True, msgspec.Raw(ARGUMENTS.encode()))
    for odd in ("", "[1]", '{"a": NaN}', "nonsense", '{"a": ' * 5000):
        complete, told = input_of(odd)
        assert not complete and isinstance(json.loads(bytes(told)), dict)
