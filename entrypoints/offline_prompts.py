"""Prompts as Python callers write them: texts, token ids, or dicts, one or several. Called by `LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfbyte.errors import UserError

Prompt = str | list[int] | dict[str, Any]
# text, token ids, cache salt
ParsedPrompt = tuple[str | None, list[int] | None, str | None]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """What may be one prompt, as a list of them."""
    return [prompts] if isinstance(prompts, (str, dict)) or is_token_ids(prompts) else list(prompts)


def parse_prompts(prompts: Prompt | Sequence[Prompt]) -> list[ParsedPrompt]:
    return [parse_prompt(prompt) for prompt in as_prompts(prompts)]


def is_token_ids(prompts: Any) -> bool:
    return isinstance(prompts, list) and bool(prompts) and all(type(item) is int for item in prompts)


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """(text, token ids, cache salt) of a prompt in any of its forms; UserError for another."""
    if isinstance(prompt, str):
        return prompt, None, None
    if isinstance(prompt, list):
        return None, list(prompt), None
    if isinstance(prompt, dict) and ("prompt" in prompt or "prompt_token_ids" in prompt):
        if unknown := set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}:
            raise UserError(f"a prompt takes prompt, prompt_token_ids and cache_salt, not {sorted(unknown)}", param="prompts")
        ids = prompt.get("prompt_token_ids")
        return prompt.get("prompt"), None if ids is None else list(ids), prompt.get("cache_salt")
    raise UserError("a prompt is a text, a list of token ids, or a dict with prompt or prompt_token_ids", param="prompts")
