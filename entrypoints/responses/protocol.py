"""What clients may send to /v1/responses: OpenAI's fields, and vLLM's beside them.

Types only, as in `openai.protocol`; what items, tools and formats may hold is checked by the code that reads them (`items`,
`asking`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from halfbyte.entrypoints.openai import shapes
from halfbyte.entrypoints.openai.protocol import (
    Int64,
    ReasoningEffort,
    StrictModel,
    StructuredOutputs,
    Texts,
    TokenBiases,
    TokenIds,
    Verbosity,
)

MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512

InputItem = Annotated[dict[str, Any], Field(json_schema_extra=shapes.INPUT_ITEM)]
InputItems = Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
FlatTools = Annotated[list[Annotated[dict[str, Any], Field(json_schema_extra=shapes.FLAT_TOOL)]], Field(fail_fast=True)]
ToolChoiceName = Annotated[str, Field(json_schema_extra=shapes.TOOL_CHOICE_NAME)]
FlatToolChoice = Annotated[dict[str, Any], Field(json_schema_extra=shapes.FLAT_TOOL_CHOICE)]
TextFormat = Annotated[dict[str, Any], Field(json_schema_extra=shapes.TEXT_FORMAT)]
Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARS)],
        Annotated[str, Field(max_length=MAX_METADATA_CHARS)],
    ],
    Field(max_length=MAX_METADATA),
]
LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ClosedModel(StrictModel):
    model_config = ConfigDict(extra="forbid")


class ReasoningFields(ClosedModel):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFields(ClosedModel):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ResponsesRequest(StrictModel):
    """POST /v1/responses."""

    input: Annotated[str, Field(min_length=1)] | InputItems
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    max_output_tokens: Int64 | None = None
    max_tool_calls: Annotated[Int64, Field(ge=1)] | None = None
    tools: FlatTools | None = None
    tool_choice: ToolChoiceName | FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    include: list[Includable] | None = None
    top_logprobs: Annotated[Int64, Field(ge=0)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: Annotated[str, Field(max_length=64)] | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    min_tokens: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: TokenBiases | None = None
    skip_special_tokens: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Int64 | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: Int64 | None = None
    request_id: str | None = None
    session_id: str | None = None
