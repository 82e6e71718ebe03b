"""The answer of /v1/decisions as the OpenAI SDK (3.26 and later) types it: strict about a value's type, open for more fields."""

from __future__ import annotations

from typing import Annotated, Literal

from openai import BaseModel
from pydantic import Field, StrictBool, StrictStr


class PredicateAnswer(BaseModel):
    type: Literal["predicate"]
    name: str | None = None
    probability: float


class ValueProbability(BaseModel):
    value: StrictStr | StrictBool
    probability: float


class ChoiceAnswer(BaseModel):
    type: Literal["choice"]
    name: str | None = None
    choice: StrictStr | StrictBool
    confidence: float
    probabilities: list[ValueProbability]


class LevelProbability(BaseModel):
    label: str
    value: int
    probability: float


class ScoreAnswer(BaseModel):
    type: Literal["score"]
    name: str | None = None
    score: float
    confidence: float
    probabilities: list[LevelProbability]


class RefusalAnswer(BaseModel):
    type: Literal["refusal"]
    name: str | None = None


class InputTokensDetails(BaseModel):
    cache_write_tokens: int
    cached_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Decision(BaseModel):
    model: str
    answers: list[Annotated[PredicateAnswer | ChoiceAnswer | ScoreAnswer | RefusalAnswer, Field(discriminator="type")]]
    usage: Usage
