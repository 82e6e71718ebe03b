"""Responses on the wire: items, the response object, and the events of its stream.

Items are read back from the store as what they are here. Plain data: made by `items` and `writer`, encoded by `openai.wire`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from halfbyte.entrypoints.decisions.results import InputTokensDetails, OutputTokensDetails
from halfbyte.entrypoints.openai.wire import TokenLogprob, to_event

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """content: InputText, of an assistant OutputText."""

    id: str
    status: ItemStatus = "completed"
    role: str
    content: list[InputText | OutputText]


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    id: str
    status: ItemStatus = "completed"
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: None = None


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """arguments: JSON text. namespace: told where the tool has one."""

    id: str
    status: ItemStatus = "completed"
    call_id: str
    name: str
    arguments: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class FunctionCallOutputItem(msgspec.Struct, tag_field="type", tag="function_call_output", kw_only=True):
    id: str
    status: ItemStatus = "completed"
    call_id: str
    output: str | list[InputText]


class CustomToolCallItem(msgspec.Struct, tag_field="type", tag="custom_tool_call", kw_only=True):
    """input: any text. These have no status."""

    id: str
    call_id: str
    name: str
    input: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class CustomToolCallOutputItem(msgspec.Struct, tag_field="type", tag="custom_tool_call_output", kw_only=True):
    id: str
    call_id: str
    output: str | list[InputText]


CallItem = FunctionCallItem | CustomToolCallItem
CallOutputItem = FunctionCallOutputItem | CustomToolCallOutputItem
OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem
Item = OutputItem | FunctionCallOutputItem | CustomToolCallOutputItem
Part = OutputText | ReasoningText


class ResponseUsage(msgspec.Struct, kw_only=True):
    """cache_write_tokens of the input: of its full blocks, what was not in the prefix cache."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct):
    code: Literal["server_error"]
    message: str


class Response(msgspec.Struct, kw_only=True):
    """What was asked is said again, with the values that hold."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: Mapping[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Mapping[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    temperature: float
    text: Mapping[str, Any]
    tool_choice: str | Mapping[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None


class InputItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str
    last_id: str
    has_more: bool


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class EventAlternative(msgspec.Struct):
    token: str
    logprob: float


class EventLogprob(msgspec.Struct):
    """A token's log probability as events tell it: without bytes, which the item has in the end."""

    token: str
    logprob: float
    top_logprobs: list[EventAlternative]

    @classmethod
    def of(cls, token: TokenLogprob) -> EventLogprob:
        return cls(token.token, token.logprob, [EventAlternative(other.token, other.logprob) for other in token.top_logprobs])


StateName = Literal[
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
]
# The last event of a response by its status; no event is called cancelled.
LAST_EVENT: dict[Status, StateName] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}


class StateEvent(msgspec.Struct):
    type: StateName
    sequence_number: int
    response: Response


class OutputItemEvent(msgspec.Struct):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class ContentPartEvent(msgspec.Struct):
    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: Part


class OutputTextDelta(msgspec.Struct, tag_field="type", tag="response.output_text.delta"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[EventLogprob]


class OutputTextDone(msgspec.Struct, tag_field="type", tag="response.output_text.done"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[EventLogprob]


class ReasoningTextDelta(msgspec.Struct, tag_field="type", tag="response.reasoning_text.delta"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningTextDone(msgspec.Struct, tag_field="type", tag="response.reasoning_text.done"):
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str


class CallArgumentsDelta(msgspec.Struct, tag_field="type", tag="response.function_call_arguments.delta"):
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class CallArgumentsDone(msgspec.Struct, tag_field="type", tag="response.function_call_arguments.done"):
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


class CustomInputDelta(msgspec.Struct, tag_field="type", tag="response.custom_tool_call_input.delta"):
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class CustomInputDone(msgspec.Struct, tag_field="type", tag="response.custom_tool_call_input.done"):
    sequence_number: int
    item_id: str
    output_index: int
    input: str


class FailureEvent(msgspec.Struct, tag_field="type", tag="error"):
    sequence_number: int
    code: str
    message: str
    param: str | None


StreamEvent = (
    StateEvent
    | OutputItemEvent
    | ContentPartEvent
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | CallArgumentsDelta
    | CallArgumentsDone
    | CustomInputDelta
    | CustomInputDone
    | FailureEvent
)
EVENTS: tuple[type, ...] = get_args(StreamEvent)


def encode(event: StreamEvent) -> bytes:
    """As a stream has it, under the event's own name."""
    if isinstance(event, StateEvent | OutputItemEvent | ContentPartEvent):
        return to_event(event, event.type)
    return to_event(event, str(event.__struct_config__.tag))
