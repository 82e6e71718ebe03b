"""An answer's events as output items, and as the events of a response's stream: one state makes both, so that they agree.

An item is open while it grows, and in `response.output` when it is done. Knows no HTTP and no engine; `handlers` feeds it with
what `openai.conversation.read_answer` yields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from halfbyte.engine.output_processor import SequenceDelta
from halfbyte.entrypoints.answers.events import CallArguments, CallStart, Content, Event, Reasoning
from halfbyte.entrypoints.openai.errors import ApiError
from halfbyte.entrypoints.openai.wire import TokenLogprob
from halfbyte.entrypoints.responses.custom_input import CustomInput
from halfbyte.entrypoints.responses.items import ItemIds
from halfbyte.entrypoints.responses.token_trail import TokenTrail
from halfbyte.entrypoints.responses.tools import RequestTools
from halfbyte.entrypoints.responses.wire import (
    LAST_EVENT,
    CallArgumentsDelta,
    CallArgumentsDone,
    ContentPartEvent,
    CustomInputDelta,
    CustomInputDone,
    CustomToolCallItem,
    EventLogprob,
    FailureEvent,
    FunctionCallItem,
    IncompleteDetails,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputItemEvent,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    Part,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    Response,
    ResponseError,
    ResponseUsage,
    StateEvent,
    StateName,
    Status,
    StreamEvent,
)
from halfbyte.entrypoints.scrub import scrub


@dataclass
class _Growing:
    """The item that grows, as it was when it began, and what came of it since. custom: reads arguments of a custom tool."""

    item: OutputItem
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    custom: CustomInput | None = None


class ResponseWriter:
    """Writes one response. Every method returns the events that tell what it did, numbered without gaps from 0.

    response: as it is now; its output holds what is done. trail: None where no log probabilities were asked for.
    """

    def __init__(self, response: Response, ids: ItemIds, tools: RequestTools, trail: TokenTrail | None = None) -> None:
        self.response = response
        self._ids = ids
        self._tools = tools
        self._trail = trail
        self._open: _Growing | None = None
        self._blank = ""  # white space that may come before a message, or between items, where it is nothing
        self._num_events = 0
        self._begun = False

    @property
    def has_ended(self) -> bool:
        return self.response.status in LAST_EVENT

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
                case Reasoning():
                    told += self._thought(event.text)
                case CallStart():
                    told += self._close("completed")
                    told += self._begin_call(event)
                case CallArguments():
                    told += self._arguments(event.text)
        return told

    def finish(self, finish_reason: str | None, usage: ResponseUsage) -> list[StreamEvent]:
        """The answer is over: told whole, or cut by its length."""
        was_cut = finish_reason == "length"
        status: ItemStatus = "incomplete" if was_cut else "completed"
        told = self._close(status)
        if not self.response.output:  # clients look for one
            told += [*self._begin_message(), *self._grow_message(self._blank), *self._close(status)]
        if was_cut:
            self.response.incomplete_details = IncompleteDetails("max_output_tokens")
        return [*told, self._end("incomplete" if was_cut else "completed", usage)]

    def cancel(self, usage: ResponseUsage) -> list[StreamEvent]:
        """Nothing to tell where it has ended."""
        if self.has_ended:
            return []
        return [*self.begin(), *self._close("incomplete"), self._end("cancelled", usage)]

    def fail(self, problem: ApiError, usage: ResponseUsage) -> list[StreamEvent]:
        """Nothing to tell where it has ended."""
        if self.has_ended:
            return []
        told = [*self.begin(), *self._close("incomplete")]
        message = scrub(problem.message)
        self.response.error = ResponseError("server_error", message)
        told.append(FailureEvent(self._next(), "server_error", message, problem.param))
        return [*told, self._end("failed", usage)]

    def _content(self, text: str) -> list[StreamEvent]:
        told: list[StreamEvent] = []
        if self._open is None or not isinstance(self._open.item, MessageItem):
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return []
            told = [*self._close("completed"), *self._begin_message()]
        return [*told, *self._grow_message(text)]

    def _begin_message(self) -> list[StreamEvent]:
        self._open = _Growing(MessageItem(id=self._ids.new(MessageItem), status="in_progress", role="assistant", content=[]))
        return [self._item("response.output_item.added"), self._part("response.content_part.added", OutputText(""))]

    def _grow_message(self, text: str) -> list[StreamEvent]:
        self._blank = ""
        if not text:
            return []
        growing = self._growing
        logprobs = [] if self._trail is None else self._trail.take(text)
        growing.texts.append(text)
        growing.logprobs += logprobs
        told = [EventLogprob.of(token) for token in logprobs]
        return [OutputTextDelta(self._next(), growing.item.id, self._index, 0, text, told)]

    def _thought(self, text: str) -> list[StreamEvent]:
        if self._trail is not None:
            self._trail.take(text)
        told: list[StreamEvent] = []
        if self._open is None or not isinstance(self._open.item, ReasoningItem):
            told = self._close("completed")
            self._open = _Growing(ReasoningItem(id=self._ids.new(ReasoningItem), status="in_progress"))
            told += [self._item("response.output_item.added"), self._part("response.content_part.added", ReasoningText(""))]
        growing = self._growing
        growing.texts.append(text)
        told.append(ReasoningTextDelta(self._next(), growing.item.id, self._index, 0, text))
        return told

    def _begin_call(self, event: CallStart) -> list[StreamEvent]:
        self._blank = ""
        tool, call_id = self._tools.called(event.name), event.call_id or ""
        namespace = tool.namespace or msgspec.UNSET
        if tool.is_custom:
            item_id = self._ids.new(CustomToolCallItem)
            custom = CustomToolCallItem(id=item_id, call_id=call_id, name=tool.name, input="", namespace=namespace)
            self._open = _Growing(custom, custom=CustomInput())
        else:
            item_id = self._ids.new(FunctionCallItem)
            call = FunctionCallItem(
                id=item_id, status="in_progress", call_id=call_id, name=tool.name, arguments="", namespace=namespace
            )
            self._open = _Growing(call)
        return [self._item("response.output_item.added")]

    def _arguments(self, text: str) -> list[StreamEvent]:
        if self._trail is not None:
            self._trail.take(text)
        growing = self._growing
        if growing.custom is not None:
            return self._grow_input(growing.custom.feed(text))
        growing.texts.append(text)
        return [CallArgumentsDelta(self._next(), growing.item.id, self._index, text)]

    def _grow_input(self, text: str) -> list[StreamEvent]:
        if not text:
            return []
        growing = self._growing
        growing.texts.append(text)
        return [CustomInputDelta(self._next(), growing.item.id, self._index, text)]

    def _close(self, status: ItemStatus) -> list[StreamEvent]:
        """The open item is done, if there is one."""
        growing = self._open
        if growing is None:
            return []
        told = [] if growing.custom is None else self._grow_input(growing.custom.finish())
        text, index, item_id = "".join(growing.texts), self._index, growing.item.id
        match growing.item:
            case MessageItem():
                part = OutputText(text, logprobs=growing.logprobs)
                logprobs = [EventLogprob.of(token) for token in growing.logprobs]
                told.append(OutputTextDone(self._next(), item_id, index, 0, text, logprobs))
                told.append(self._part("response.content_part.done", part))
                done: OutputItem = msgspec.structs.replace(growing.item, status=status, content=[part])
            case ReasoningItem():
                thought = ReasoningText(text)
                told.append(ReasoningTextDone(self._next(), item_id, index, 0, text))
                told.append(self._part("response.content_part.done", thought))
                done = msgspec.structs.replace(growing.item, status=status, content=[thought])
            case FunctionCallItem():
                told.append(CallArgumentsDone(self._next(), item_id, index, growing.item.name, text))
                done = msgspec.structs.replace(growing.item, status=status, arguments=text)
            case CustomToolCallItem():
                told.append(CustomInputDone(self._next(), item_id, index, text))
                done = msgspec.structs.replace(growing.item, input=text)
        growing.item = done
        told.append(self._item("response.output_item.done"))
        self.response.output.append(done)
        self._open = None
        return told

    def _end(self, status: Status, usage: ResponseUsage) -> StateEvent:
        self.response.status, self.response.usage = status, usage
        return self._state(LAST_EVENT[status])

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

    def _item(self, name: Literal["response.output_item.added", "response.output_item.done"]) -> OutputItemEvent:
        return OutputItemEvent(name, self._next(), self._index, self._growing.item)

    def _part(self, name: Literal["response.content_part.added", "response.content_part.done"], part: Part) -> ContentPartEvent:
        return ContentPartEvent(name, self._next(), self._growing.item.id, self._index, 0, part)

    def _state(self, name: StateName) -> StateEvent:
        """A picture of now: what comes later does not change it."""
        return StateEvent(name, self._next(), msgspec.structs.replace(self.response, output=list(self.response.output)))
