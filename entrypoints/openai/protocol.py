"""What clients may send: the request models of the routes, with OpenAI's and vLLM's field names.

Types only, and strict ones: no bool for an integer, no 1.0 for 1, no text for a number. A null means "not given". Ranges are
checked by SamplingParams, what depends on the model by Limits, what this server cannot do yet by `refused`. Unknown fields
are kept (`model_extra`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from halfbyte.entrypoints.openai import shapes

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

Int64 = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
TokenIds = Annotated[list[Int64], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True, max_length=65536)]
# What the code checks that reads them; their shapes are told to those who read the API's schema.
Message = Annotated[dict[str, Any], Field(json_schema_extra=shapes.MESSAGE)]
Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]
# What a message looks like is told with one conversation only: told twice, it doubles the time of whoever makes requests of it.
Conversation = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
Conversations = Annotated[list[Conversation], Field(min_length=1, fail_fast=True)]
Tool = Annotated[dict[str, Any], Field(json_schema_extra=shapes.TOOL)]
Tools = Annotated[list[Tool], Field(fail_fast=True)]
ToolChoiceName = Annotated[str, Field(json_schema_extra=shapes.TOOL_CHOICE_NAME)]
ToolChoice = Annotated[dict[str, Any], Field(json_schema_extra=shapes.TOOL_CHOICE)]
ResponseFormat = Annotated[dict[str, Any], Field(json_schema_extra=shapes.RESPONSE_FORMAT)]
StructuredOutputs = Annotated[dict[str, Any], Field(json_schema_extra=shapes.STRUCTURED_OUTPUTS)]
TokenBiases = Annotated[dict[str, float], Field(json_schema_extra=shapes.TOKEN_BIASES)]
Prompts = Annotated[Any, Field(json_schema_extra=shapes.PROMPTS)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Verbosity = Literal["low", "medium", "high"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(StrictModel):
    """What /v1/completions and /v1/chat/completions share."""

    model: str | None = None
    n: Int64 | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: TokenBiases | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    prompt_logprobs: Int64 | None = None
    logprob_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int64 | None = None
    truncation_side: Literal["left", "right"] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: Int64 | None = None
    priority: Int64 | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None


class CompletionRequest(GenerationFields):
    """POST /v1/completions. `prompt`: a text, a list of texts, a list of token ids, or a list of such lists."""

    prompt: Prompts = None
    logprobs: Int64 | None = None


class ChatFields(GenerationFields):
    """What requests with conversations share beside these."""

    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceName | ToolChoice | None = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None
    include_reasoning: bool | None = None
    parallel_tool_calls: bool | None = None
    return_prompt_text: bool | None = None


class ChatRequest(ChatFields):
    """POST /v1/chat/completions."""

    messages: Messages


class BatchChatRequest(ChatFields):
    """POST /v1/chat/completions/batch."""

    messages: Conversations


class TokenizeRequest(StrictModel):
    """POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None
    tools: Tools | None = None
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
