"""What clients may send to /v1/messages and /v1/messages/count_tokens: the request models of both.

Types only, and strict ones, as in `halfbyte.entrypoints.openai.protocol`. What messages, tools and configurations hold is checked
by the code that reads them (`messages`, `tools`, `translation`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from halfbyte.entrypoints.anthropic import shapes
from halfbyte.entrypoints.openai.protocol import Int64, StrictModel, Texts

Message = Annotated[dict[str, Any], Field(json_schema_extra=shapes.MESSAGE)]
Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]
SystemBlock = Annotated[dict[str, Any], Field(json_schema_extra=shapes.TEXT_BLOCK)]
SystemBlocks = Annotated[list[SystemBlock], Field(fail_fast=True)]
Tool = Annotated[dict[str, Any], Field(json_schema_extra=shapes.TOOL)]
Tools = Annotated[list[Tool], Field(fail_fast=True)]
ToolChoice = Annotated[dict[str, Any], Field(json_schema_extra=shapes.TOOL_CHOICE)]
ThinkingConfig = Annotated[dict[str, Any], Field(json_schema_extra=shapes.THINKING)]
OutputConfig = Annotated[dict[str, Any], Field(json_schema_extra=shapes.OUTPUT_CONFIG)]
OutputFormat = Annotated[dict[str, Any], Field(json_schema_extra=shapes.OUTPUT_FORMAT)]
ContextManagement = Annotated[dict[str, Any], Field(json_schema_extra=shapes.CONTEXT_MANAGEMENT)]


class CountTokensRequest(StrictModel):
    """POST /v1/messages/count_tokens: what the prompt depends on."""

    model: str
    messages: Messages
    system: str | SystemBlocks | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Int64
    stop_sequences: Texts | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    priority: Int64 | None = None
    cache_salt: str | None = None
