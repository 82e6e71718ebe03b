"""An answer of /v1/messages, whole or as a stream of named events, both from the same blocks.

Order of a stream: message_start, then each block's start, deltas and stop, then message_delta and message_stop. Called by the
route; knows no request body.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from halfbyte.engine.output_processor import SequenceDelta
from halfbyte.entrypoints.anthropic.blocks import Blocks
from halfbyte.entrypoints.anthropic.errors import MessagesError
from halfbyte.entrypoints.anthropic.wire import (
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessagesUsage,
    MessageTokensDetails,
    Stop,
    StreamEvent,
)
from halfbyte.entrypoints.openai.choices import Tally
from halfbyte.entrypoints.openai.conversation import Conversation, read_answer
from halfbyte.entrypoints.openai.errors import ApiError
from halfbyte.entrypoints.openai.frontend import Call
from halfbyte.entrypoints.openai.streaming import Closeable
from halfbyte.entrypoints.openai.wire import to_event

CALL_PREFIX = "toolu_"


class MessageWriter:
    """Writes the answer to one request, once."""

    def __init__(self, call: Call, conversation: Conversation, tally: Tally) -> None:
        self._call = call
        self._conversation = conversation
        self._tally = tally
        self._blocks = Blocks()
        self._stop: Stop | None = None

    async def whole(self, generations: Sequence[Closeable]) -> Message:
        async for _ in self._told(generations):
            pass
        assert self._stop is not None, "an answer ends for a reason"
        message = self._message()
        message.content, message.stop_reason = self._blocks.content, self._stop.stop_reason
        message.stop_sequence = self._stop.stop_sequence
        return message

    async def events(self, generations: Sequence[Closeable]) -> AsyncGenerator[bytes, None]:
        """All events of a stream that nothing goes wrong with."""
        async for told in self._told(generations):
            if told:
                yield b"".join(to_event(event, name_of(event)) for event in told)

    async def _told(self, generations: Sequence[Closeable]) -> AsyncGenerator[list[StreamEvent], None]:
        has_begun = False
        async with aclosing(read_answer(self._conversation, self._tally, generations, CALL_PREFIX)) as answer:
            async for events, delta in answer:
                # Only now is it known how much of the prompt was in the cache.
                told: list[StreamEvent] = [] if has_begun else [MessageStart(self._message())]
                has_begun = True
                told += self._blocks.take(events)
                if delta.finish_reason is not None:
                    told += self._blocks.finish()
                    self._stop = self._reason(delta)
                    told += [MessageDelta(self._stop, self._usage()), MessageStop()]
                yield told

    def _reason(self, last: SequenceDelta) -> Stop:
        """A call that is complete goes before the stop sequence behind it; one that a stop sequence has cut does not."""
        if last.finish_reason == "length":
            return Stop("max_tokens", None)
        if self._blocks.has_calls and self._blocks.calls_are_complete:
            return Stop("tool_use", None)
        if isinstance(last.stop_reason, str):
            return Stop("stop_sequence", last.stop_reason)
        return Stop("tool_use" if self._blocks.has_calls else "end_turn", None)

    def _message(self) -> Message:
        """The answer's frame."""
        return Message(id=self._call.public_id, model=self._conversation.model, content=[], usage=self._usage())

    def _usage(self) -> MessagesUsage:
        call, tally = self._call, self._tally
        usage = MessagesUsage(
            input_tokens=call.num_prompt_tokens - tally.num_cached_tokens,
            cache_read_input_tokens=tally.num_cached_tokens,
            output_tokens=call.num_completion_tokens,
        )
        if tally.num_reasoning_tokens is not None:
            usage.output_tokens_details = MessageTokensDetails(tally.num_reasoning_tokens)
        return usage


def name_of(event: msgspec.Struct) -> str:
    """The event's name: the tag of its object."""
    return str(event.__struct_config__.tag)


def end_of_stream(problem: ApiError | None) -> bytes:
    """Nothing behind message_stop; an event of its own for what went wrong."""
    if problem is None:
        return b""
    told = MessagesError.of(problem)
    return to_event(told, name_of(told))
