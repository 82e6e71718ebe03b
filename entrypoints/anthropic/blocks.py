"""An answer's content blocks as they are written: from what was read out of it to blocks, and to the events that tell of them.

Whole answers and streams are made of the same state, so that they agree. Knows no HTTP and no request.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable

import msgspec
from pydantic_core import from_json

from halfbyte.entrypoints.answers.events import CallArguments, CallStart, Content, Event, Reasoning
from halfbyte.entrypoints.anthropic.wire import (
    ContentBlock,
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


class Blocks:
    """content: the blocks so far, the last one still without what it holds. calls_are_complete: False while one is not."""

    def __init__(self) -> None:
        self.content: list[ContentBlock] = []
        self.calls_are_complete = True
        self._pieces: list[str] = []  # of the block that is open, the last one
        self._is_open = False
        self._held: list[str] = []  # white space that becomes part of a block if more than that follows
        self._held_kind: type[ContentBlock] = TextBlock

    @property
    def has_calls(self) -> bool:
        return any(isinstance(block, ToolUseBlock) for block in self.content)

    def take(self, events: Iterable[Event]) -> list[StreamEvent]:
        """What there is to tell of more events."""
        told: list[StreamEvent] = []
        for event in events:
            match event:
                case Content():
                    self._text(TextBlock, event.text, told)
                case Reasoning():
                    self._text(ThinkingBlock, event.text, told)
                case CallStart():
                    self._begin(ToolUseBlock(event.call_id or "", event.name), told)
                case CallArguments():
                    self._grow(event.text, told)
        return told

    def finish(self) -> list[StreamEvent]:
        """What is left to tell at the end. An answer without any block has one of text."""
        told: list[StreamEvent] = []
        if not self.content:
            held = "".join(self._held) if self._held_kind is TextBlock else ""
            self._begin(TextBlock(), told)
            self._grow(held, told)
        self._close(told)
        return told

    def _text(self, kind: type[TextBlock | ThinkingBlock], text: str, told: list[StreamEvent]) -> None:
        """More of a text, or of thoughts. White space alone, such as between calls, makes no block."""
        if not self._is_open or not isinstance(self.content[-1], kind):
            if self._held_kind is not kind:
                self._held, self._held_kind = [], kind
            self._held.append(text)
            if not text or text.isspace():
                return
            text = "".join(self._held)
            self._begin(kind(), told)
        self._grow(text, told)

    def _begin(self, block: ContentBlock, told: list[StreamEvent]) -> None:
        self._close(told)
        self._held, self._pieces, self._is_open = [], [], True
        self.content.append(block)
        told.append(ContentBlockStart(len(self.content) - 1, msgspec.structs.replace(block)))
        if isinstance(block, ToolUseBlock):
            self.calls_are_complete = False

    def _grow(self, text: str, told: list[StreamEvent]) -> None:
        if not text:
            return
        self._pieces.append(text)
        delta: TextDelta | ThinkingDelta | InputJsonDelta
        match told[-1] if told else None, self.content[-1]:
            case ContentBlockDelta(_, TextDelta() as delta), TextBlock():
                delta.text += text
                return
            case ContentBlockDelta(_, ThinkingDelta() as delta), ThinkingBlock():
                delta.thinking += text
                return
            case ContentBlockDelta(_, InputJsonDelta() as delta), ToolUseBlock():
                delta.partial_json += text
                return
            case _, TextBlock():
                delta = TextDelta(text)
            case _, ThinkingBlock():
                delta = ThinkingDelta(text)
            case _:
                delta = InputJsonDelta(text)
        told.append(ContentBlockDelta(len(self.content) - 1, delta))

    def _close(self, told: list[StreamEvent]) -> None:
        """The open block has all that it will have."""
        if not self._is_open:
            return
        self._is_open = False
        index, block, text = len(self.content) - 1, self.content[-1], "".join(self._pieces)
        match block:
            case TextBlock():
                block.text = text
            case ThinkingBlock():
                block.thinking, block.signature = text, signature(text)
                told.append(ContentBlockDelta(index, SignatureDelta(block.signature)))
            case ToolUseBlock():
                self.calls_are_complete, block.input = input_of(text)
        told.append(ContentBlockStop(index))


def signature(thoughts: str) -> str:
    """What clients send back with thoughts, as they have to. It names the text and proves nothing: any is taken."""
    return base64.b64encode(hashlib.sha256(thoughts.encode(errors="surrogatepass")).digest()).decode()


def input_of(arguments: str) -> tuple[bool, msgspec.Raw]:
    """(whether a call's arguments are complete, the JSON object to show).

    Complete ones are shown to the letter. Of those that an answer's end has cut, there are the members that had come, as
    Anthropic's client makes them out of the pieces of a stream.
    """
    text = arguments.encode()
    try:
        if isinstance(msgspec.json.decode(text), dict):
            return True, msgspec.Raw(text)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        partial = from_json(text, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        partial = None
    return False, msgspec.Raw(msgspec.json.encode(partial if isinstance(partial, dict) else {}))
