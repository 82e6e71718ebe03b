"""Responses on the wire: items, the response object, and the events of its stream.

Items are read back from the store as what they are here. Plain data: made by `items` and `writer`, encoded by `openai.wire`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

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


class Message(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """content: InputText, of an assistant OutputText."""

    id: str
    status: ItemStatus = "completed"
    role: str
    content: list[InputText | OutputText]


class Reasoning(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    id: str
    status: ItemStatus = "completed"
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: None = None


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """arguments: JSON text."""

    id: str
    status: ItemStatus = "completed"
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(msgspec.Struct, tag_field="type", tag="function_call_output", kw_only=True):
    id: str
    status: ItemStatus = "completed"
    call_id: str
    output: str | list[InputText]


Item = Message | Reasoning | FunctionCall | FunctionCallOutput
OutputItem = Message | Reasoning | FunctionCall
Part = OutputText | ReasoningText


class InputTokensDetails(msgspec.Struct):
    """cache_write_tokens: of the prompt's full blocks, those that were not in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseError(msgspec.Struct):
    code: str
    message: str


class Response(msgspec.Struct, kw_only=True):
    """What was asked is said again, with the values that hold."""

    id: str
    object: str = "response"
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
    service_tier: str = "default"
    temperature: float
    text: Mapping[str, Any]
    tool_choice: str | Mapping[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: Usage | None = None
    user: str | None


class ItemList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Item]
    first_id: str
    last_id: str
    has_more: bool


class Deleted(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class ToldAlternative(msgspec.Struct):
    token: str
    logprob: float


class ToldLogprob(msgspec.Struct):
    """A token's log probability as events tell it: without bytes, which the item has in the end."""

    token: str
    logprob: float
    top_logprobs: list[ToldAlternative]

    @classmethod
    def of(cls, token: TokenLogprob) -> ToldLogprob:
        return cls(token.token, token.logprob, [ToldAlternative(other.token, other.logprob) for other in token.top_logprobs])


class StateEvent(msgspec.Struct):
    type: str
    sequence_number: int
    response: Response


class ItemEvent(msgspec.Struct):
    type: str
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(msgspec.Struct):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: Part


class TextDelta(msgspec.Struct):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ToldLogprob]


class TextDone(msgspec.Struct):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ToldLogprob]


class ThoughtDelta(msgspec.Struct):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ThoughtDone(msgspec.Struct):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsDelta(msgspec.Struct):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(msgspec.Struct):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


class ErrorEvent(msgspec.Struct):
    type: str
    sequence_number: int
    code: str
    message: str
    param: str | None


StreamEvent = (
    StateEvent
    | ItemEvent
    | PartEvent
    | TextDelta
    | TextDone
    | ThoughtDelta
    | ThoughtDone
    | ArgumentsDelta
    | ArgumentsDone
    | ErrorEvent
)


def encode(event: StreamEvent) -> bytes:
    return to_event(event, event.type)
