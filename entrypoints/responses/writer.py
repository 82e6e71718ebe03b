"""An answer's events as output items, and as the events of a response's stream: one state makes both, so that they agree.

An item is open while it grows, and in `response.output` when it is done. Knows no HTTP and no engine; `handlers` feeds it with
what `openai.conversation.read_answer` yields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from halfbyte.engine.output_processor import SequenceDelta
from halfbyte.entrypoints.answers.events import CallArguments, CallStart, Content, Event
from halfbyte.entrypoints.answers.events import Reasoning as Thought
from halfbyte.entrypoints.openai.errors import ApiError
from halfbyte.entrypoints.openai.wire import TokenLogprob
from halfbyte.entrypoints.responses.items import ItemIds
from halfbyte.entrypoints.responses.token_trail import TokenTrail
from halfbyte.entrypoints.responses.wire import (
    ArgumentsDelta,
    ArgumentsDone,
    ErrorEvent,
    FunctionCall,
    IncompleteDetails,
    ItemEvent,
    ItemStatus,
    Message,
    OutputItem,
    OutputText,
    PartEvent,
    Reasoning,
    ReasoningText,
    Response,
    ResponseError,
    StateEvent,
    Status,
    StreamEvent,
    TextDelta,
    TextDone,
    ThoughtDelta,
    ThoughtDone,
    ToldLogprob,
    Usage,
)
from halfbyte.entrypoints.scrub import scrub


@dataclass
class _Growing:
    """The item that grows, as it was when it began, and what came of it since."""

    item: OutputItem
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class ResponseWriter:
    """Writes one response. Every method returns the events that tell what it did, numbered without gaps from 0.

    response: as it is now; its output holds what is done. trail: None where no log probabilities were asked for.
    """

    def __init__(self, response: Response, ids: ItemIds, trail: TokenTrail | None = None) -> None:
        self.response = response
        self._ids = ids
        self._trail = trail
        self._open: _Growing | None = None
        self._blank = ""  # white space that may come before a message, or between items, where it is nothing
        self._num_events = 0
        self._begun = False

    def queue(self) -> list[StreamEvent]:
        """The response waits for its turn."""
        self._begun = True
        self.response.status = "queued"
        return [self._state("response.created"), self._state("response.queued")]

    def begin(self) -> list[StreamEvent]:
        """It is being answered. Nothing to tell the second time."""
        told: list[StreamEvent] = []
        if not self._begun:
            self._begun = True
            told.append(self._state("response.created"))
        elif self.response.status != "queued":
            return []
        self.response.status = "in_progress"
        return [*told, self._state("response.in_progress")]

    def read(self, events: Sequence[Event], delta: SequenceDelta) -> list[StreamEvent]:
        """More of the answer."""
        if self._trail is not None:
            self._trail.add(delta)
        told = self.begin()
        for event in events:
            match event:
                case Content():
                    told += self._content(event.text)
                case Thought():
                    told += self._thought(event.text)
                case CallStart():
                    told += self._close("completed")
                    told += self._begin_call(event)
                case CallArguments():
                    told += self._arguments(event.text)
        return told

    def finish(self, finish_reason: str | None, usage: Usage) -> list[StreamEvent]:
        """The answer is over: told whole, or cut by its length."""
        was_cut = finish_reason == "length"
        status: ItemStatus = "incomplete" if was_cut else "completed"
        told = self._close(status)
        if not self.response.output:  # clients look for one
            told += [*self._begin_message(), *self._grow_message(self._blank), *self._close(status)]
        if was_cut:
            self.response.incomplete_details = IncompleteDetails("max_output_tokens")
        return [*told, self._end("incomplete" if was_cut else "completed", usage)]

    def cancel(self, usage: Usage) -> list[StreamEvent]:
        return [*self.begin(), *self._close("incomplete"), self._end("cancelled", usage)]

    def fail(self, problem: ApiError, usage: Usage | None = None) -> list[StreamEvent]:
        told = [*self.begin(), *self._close("incomplete")]
        message = scrub(problem.message)
        self.response.error = ResponseError("server_error", message)
        told.append(ErrorEvent("error", self._next(), "server_error", message, problem.param))
        return [*told, self._end("failed", usage)]

    def _content(self, text: str) -> list[StreamEvent]:
        told: list[StreamEvent] = []
        if self._open is None or not isinstance(self._open.item, Message):
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return []
            told = [*self._close("completed"), *self._begin_message()]
        return [*told, *self._grow_message(text)]

    def _begin_message(self) -> list[StreamEvent]:
        self._open = _Growing(Message(id=self._ids.new(Message), status="in_progress", role="assistant", content=[]))
        return [self._item("added"), self._part("added", OutputText(""))]

    def _grow_message(self, text: str) -> list[StreamEvent]:
        self._blank = ""
        if not text:
            return []
        growing = self._growing
        logprobs = [] if self._trail is None else self._trail.take(text)
        growing.texts.append(text)
        growing.logprobs += logprobs
        told = [ToldLogprob.of(token) for token in logprobs]
        return [TextDelta("response.output_text.delta", self._next(), growing.item.id, self._index, 0, text, told)]

    def _thought(self, text: str) -> list[StreamEvent]:
        if self._trail is not None:
            self._trail.take(text)
        told: list[StreamEvent] = []
        if self._open is None or not isinstance(self._open.item, Reasoning):
            told = self._close("completed")
            self._open = _Growing(Reasoning(id=self._ids.new(Reasoning), status="in_progress"))
            told += [self._item("added"), self._part("added", ReasoningText(""))]
        growing = self._growing
        growing.texts.append(text)
        told.append(ThoughtDelta("response.reasoning_text.delta", self._next(), growing.item.id, self._index, 0, text))
        return told

    def _begin_call(self, event: CallStart) -> list[StreamEvent]:
        self._blank = ""
        call = FunctionCall(
            id=self._ids.new(FunctionCall), status="in_progress", call_id=event.call_id or "", name=event.name, arguments=""
        )
        self._open = _Growing(call)
        return [self._item("added")]

    def _arguments(self, text: str) -> list[StreamEvent]:
        if self._trail is not None:
            self._trail.take(text)
        growing = self._growing
        growing.texts.append(text)
        return [ArgumentsDelta("response.function_call_arguments.delta", self._next(), growing.item.id, self._index, text)]

    def _close(self, status: ItemStatus) -> list[StreamEvent]:
        """The open item is done, if there is one."""
        growing = self._open
        if growing is None:
            return []
        text, index, item_id = "".join(growing.texts), self._index, growing.item.id
        told: list[StreamEvent] = []
        match growing.item:
            case Message():
                part = OutputText(text, logprobs=growing.logprobs)
                logprobs = [ToldLogprob.of(token) for token in growing.logprobs]
                told.append(TextDone("response.output_text.done", self._next(), item_id, index, 0, text, logprobs))
                told.append(self._part("done", part))
                done: OutputItem = msgspec.structs.replace(growing.item, status=status, content=[part])
            case Reasoning():
                thought = ReasoningText(text)
                told.append(ThoughtDone("response.reasoning_text.done", self._next(), item_id, index, 0, text))
                told.append(self._part("done", thought))
                done = msgspec.structs.replace(growing.item, status=status, content=[thought])
            case FunctionCall():
                name, kind = growing.item.name, "response.function_call_arguments.done"
                told.append(ArgumentsDone(kind, self._next(), item_id, index, name, text))
                done = msgspec.structs.replace(growing.item, status=status, arguments=text)
        growing.item = done
        told.append(self._item("done"))
        self.response.output.append(done)
        self._open = None
        return told

    def _end(self, status: Status, usage: Usage | None) -> StateEvent:
        self.response.status, self.response.usage = status, usage
        return self._state(f"response.{'incomplete' if status == 'cancelled' else status}")  # no event is called cancelled

    @property
    def _growing(self) -> _Growing:
        growing = self._open
        assert growing is not None, "an item grows after it began"
        return growing

    @property
    def _index(self) -> int:
        return len(self.response.output)

    def _next(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _item(self, what: str) -> ItemEvent:
        return ItemEvent(f"response.output_item.{what}", self._next(), self._index, self._growing.item)

    def _part(self, what: str, part: OutputText | ReasoningText) -> PartEvent:
        return PartEvent(f"response.content_part.{what}", self._next(), self._growing.item.id, self._index, 0, part)

    def _state(self, kind: str) -> StateEvent:
        """A picture of now: what comes later does not change it."""
        return StateEvent(kind, self._next(), msgspec.structs.replace(self.response, output=list(self.response.output)))
