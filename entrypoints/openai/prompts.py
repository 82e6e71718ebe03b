"""Prompts: the four forms that `prompt` may have, and their way to token ids.

Counts before it converts; texts are tokenised beside the event loop (`engine.encode`). Used by the routes that take text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfbyte.engine.limits import Limits
from halfbyte.engine.tokenizer import SEAM
from halfbyte.entrypoints.openai.frontend import Engine
from halfbyte.entrypoints.openai.protocol import GenerationFields
from halfbyte.errors import UserError
from halfbyte.types import SamplingParams

_FORMS = "a text, a list of texts, a list of token ids, or a list of lists of token ids"


@dataclass(slots=True)
class Prompt:
    """text: as the client wrote it, None when it sent token ids."""

    text: str | None
    token_ids: list[int]


def parse_prompts(value: Any, n: int | None, limits: Limits, param: str = "prompt") -> list[str | list[int]]:
    """The prompts of a request, each a text or token ids. UserError when one is empty or there are too many.

    param: how the request calls them.
    """
    if value is None:
        raise UserError(f"{param} is required: {_FORMS}", param=param)
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list) or not value:
        raise UserError(f"{param} must be {_FORMS}, and not empty", param=param)
    count = len(value)
    if count > limits.MAX_PROMPTS:
        raise UserError(f"{param} holds {count} prompts, at most {limits.MAX_PROMPTS} are allowed", param=param)
    if n is not None and n * count > limits.MAX_N:
        raise UserError(f"{count} prompts x n={n} is {n * count} sequences, at most {limits.MAX_N} are allowed", param="n")
    kind = type(value[0])
    if kind not in (str, list) or any(type(item) is not kind for item in value):
        raise UserError(f"{param} must be {_FORMS}", param=param)
    for index, item in enumerate(value):
        if not item:
            raise UserError(f"{param} {index} is empty", param=param)
        if kind is list and not all(type(token_id) is int for token_id in item):
            raise UserError(f"{param} {index} must hold token ids: integers only", param=param)
    return value


async def encode_prompts(
    engine: Engine,
    prompts: list[str | list[int]],
    request: GenerationFields,
    *,
    special: bool,
    budget: int | None,
    seams: bool = False,
) -> list[Prompt]:
    """Token ids of each prompt, truncated as the request asks. budget: its max_tokens, None when it leaves that open.

    seams: the texts are rendered conversations, in which what clients wrote is set apart from control tokens.
    """
    cut = _truncation(request, budget)
    encoded = []
    for prompt in prompts:
        text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        if text is not None:
            token_ids = await engine.encode(text, special, seams=seams)
            text = text.replace(SEAM, "") if seams else text
        assert token_ids is not None
        encoded.append(Prompt(text, engine.limits.truncate(token_ids, cut) if cut is not None else token_ids))
    return encoded


def _truncation(request: GenerationFields, budget: int | None) -> SamplingParams | None:
    """The parameters that `Limits.truncate` reads; None when the request asks for no truncation."""
    if request.truncate_prompt_tokens is None:
        return None
    return SamplingParams(
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
        max_tokens=max(1, budget) if budget else None,
    )
