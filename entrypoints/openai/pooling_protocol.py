"""What clients may send to the routes of models that pool: the request models of embeddings, scores and classes.

Types only, strict ones, as in `protocol`, with OpenAI's, Cohere's and vLLM's names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from halfbyte.entrypoints.openai import shapes
from halfbyte.entrypoints.openai.protocol import Int64, Messages, StrictModel, Texts

Input = Annotated[Any, Field(json_schema_extra=shapes.PROMPTS)]
ScoreTexts = str | Texts


class PoolingFields(StrictModel):
    """What all of these routes share."""

    model: str | None = None
    truncate_prompt_tokens: Int64 | None = None
    truncation_side: Literal["left", "right"] | None = None
    padding: Literal["do_not_pad"] | None = None
    use_activation: bool | None = None
    priority: Int64 | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None


class PromptFields(PoolingFields):
    """Either `input` or `messages`. Only numbers as float32 in the machine's order are sent."""

    input: Input = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class VectorFields(PromptFields):
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    dimensions: Int64 | None = None


class EmbeddingRequest(VectorFields):
    """POST /v1/embeddings."""


class PoolingRequest(VectorFields):
    """POST /pooling."""

    task: Literal["embed", "token_embed", "classify"] | None = None


class ClassifyRequest(PromptFields):
    """POST /classify."""


class PairFields(PoolingFields):
    max_tokens_per_query: Int64 | None = None
    max_tokens_per_doc: Int64 | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ScoreRequest(PairFields):
    """POST /score: one of four pairs of names."""

    queries: ScoreTexts | None = None
    documents: ScoreTexts | None = None
    items: ScoreTexts | None = None
    text_1: ScoreTexts | None = None
    text_2: ScoreTexts | None = None
    data_1: ScoreTexts | None = None
    data_2: ScoreTexts | None = None


class RerankRequest(PairFields):
    """POST /rerank."""

    query: str
    documents: Texts
    top_n: Int64 | None = None
