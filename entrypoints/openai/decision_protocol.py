"""What clients may send to /v1/systemone and /v1/decisions: the request models of both.

Types only, as in `protocol`; what a question may hold is the matter of `halfbyte.entrypoints.decisions.questions`. /v1/decisions
takes no field that it does not know, at any depth.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from halfbyte.entrypoints.openai import shapes
from halfbyte.entrypoints.openai.protocol import Int64, StrictModel

Questions = Annotated[dict[str, Any], Field(json_schema_extra=shapes.QUESTIONS)]
State = Annotated[Any, Field(json_schema_extra=shapes.STATE)]
Media = list[str]
OrderName = Annotated[str, Field(json_schema_extra=shapes.ORDER)]
Mass = Annotated[float, Field(ge=0.0, le=1.0)]


class SystemOneRequest(StrictModel):
    """POST /v1/systemone."""

    model: str | None = None
    state: State
    questions: Questions
    instructions: str | None = None
    images: Media | None = None
    audio: Media | None = None
    videos: Media | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    order: OrderName | None = None
    min_label_mass: Mass | None = None
    return_prompt: bool | None = None
    priority: Int64 | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class _Closed(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class TextPart(_Closed):
    type: Literal["input_text", "output_text"]
    text: str


class JsonPart(_Closed):
    type: Literal["input_json"]
    data: dict[str, Any] | list[dict[str, Any]]


Parts = Annotated[list[Annotated[TextPart | JsonPart, Field(discriminator="type")]], Field(max_length=16_384, fail_fast=True)]
Instructions = str | Parts


class InputMessage(_Closed):
    type: Literal["message"] = "message"
    role: Literal["user", "developer", "system", "assistant"]
    content: str | Parts


class _Asked(_Closed):
    """name: a text where it is given at all."""

    instructions: Instructions
    name: str = Field(default=None)  # type: ignore[assignment]  # absent, which null is not


class Predicate(_Asked):
    type: Literal["predicate"]


class ChoiceOption(_Closed):
    value: StrictBool | StrictStr
    description: str = ""


class Choice(_Asked):
    type: Literal["choice"]
    choices: Annotated[list[ChoiceOption], Field(min_length=2)]


class ScoreLevel(_Closed):
    label: str
    description: str = ""


class Score(_Asked):
    type: Literal["score"]
    levels: list[ScoreLevel]


DecisionQuestion = Annotated[Predicate | Choice | Score, Field(discriminator="type")]


class DecisionsRequest(_Closed):
    """POST /v1/decisions. order, min_label_mass and return_prompt are Halfbyte's own."""

    model: Annotated[str, Field(max_length=1_048_576)]
    input: (
        Annotated[str, Field(max_length=10_485_760)]
        | Annotated[list[InputMessage], Field(min_length=1, max_length=131_072, fail_fast=True)]
    )
    questions: Annotated[list[DecisionQuestion], Field(min_length=1, fail_fast=True)]
    safety_identifier: Annotated[str, Field(max_length=128)] | None = None
    prompt_cache_key: str | None = None
    order: OrderName | None = None
    min_label_mass: Mass | None = None
    return_prompt: bool | None = None
