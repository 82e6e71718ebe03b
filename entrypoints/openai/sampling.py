"""From a request's fields to SamplingParams: what was given, else the model's recommendation, else neutral.

Merges and converts; ranges are SamplingParams' to check, what depends on the model is Limits'. Used by both generation routes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from halfbyte.config import ServerConfig
from halfbyte.engine.limits import Limits
from halfbyte.entrypoints.openai.protocol import GenerationFields
from halfbyte.errors import UserError
from halfbyte.types import SamplingParams

# What a model's generation_config, or the operator, may recommend.
WITH_MODEL_DEFAULT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_PLAIN = (
    "n",
    "seed",
    "stop",
    "min_tokens",
    "include_stop_str_in_output",
    "ignore_eos",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "thinking_token_budget",
)
# What asks for nothing of fields that beam search cannot honour: it draws nothing, and its steps are those of the model alone.
_OFF_FOR_BEAMS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "thinking_token_budget": (-1,),
}
_TOKEN_ID_KEY = re.compile(r"-?\d{1,19}")


def check_stream_fields(request: GenerationFields) -> None:
    """Fields that only make sense together with `stream`, or without it."""
    options = request.stream_options
    if options is not None and not request.stream:
        raise UserError("stream_options needs stream=true", param="stream_options")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise UserError("stream_options.continuous_usage_stats needs include_usage=true", param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise UserError("prompt_logprobs cannot be streamed: leave it out, or send stream=false", param="prompt_logprobs")


def wants_usage(request: GenerationFields, config: ServerConfig) -> tuple[bool, bool]:
    """(a usage chunk at the end, usage on every chunk) of a stream."""
    options = request.stream_options
    if config.enable_force_include_usage:
        return True, True
    return bool(options and options.include_usage), bool(options and options.continuous_usage_stats)


def sampling_params(
    request: GenerationFields,
    limits: Limits,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The parameters of one prompt. max_tokens: the effective bound. UserError names the field that is wrong.

    Of a request for beams it is how the best ones are told; they have other steps.
    """
    if request.use_beam_search:
        _check_beams(request, prompt_logprobs)
    elif request.length_penalty not in (None, 1):
        raise UserError("length_penalty needs use_beam_search=true", param="length_penalty")
    fields: dict[str, Any] = {}
    for name in WITH_MODEL_DEFAULT:
        value = getattr(request, name)
        if value is None:
            value = defaults.get(name)
        if value is not None:
            fields[name] = value
    for name in _PLAIN:
        if (value := getattr(request, name)) is not None and not (name == "n" and request.use_beam_search):
            fields[name] = value
    fields["stop_token_ids"] = [*(request.stop_token_ids or ()), *(defaults.get("stop_token_ids") or ())]
    fields["logit_bias"] = _logit_bias(request.logit_bias)
    _check_counts(request, limits)
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **fields)


def _check_beams(request: GenerationFields, prompt_logprobs: int | None) -> None:
    for name, off in _OFF_FOR_BEAMS.items():
        value = getattr(request, name)
        if value is not None and value not in off:
            spare = "".join(f" or send {json.dumps(value)}" for value in off[:1])
            raise UserError(f"{name} goes not with use_beam_search: leave it out{spare}", param=name)
    if prompt_logprobs is not None:
        raise UserError("echo with logprobs goes not with use_beam_search: leave one of them out", param="echo")


def effective_max_tokens(
    limits: Limits, requested: int | None, num_prompt_tokens: int, *, param: str, default: int | None, cap: int | None
) -> int:
    """How many tokens may come: what was asked (else `default`), what fits, and what the operator allows at most (`cap`)."""
    bound = limits.effective_max_tokens(requested, num_prompt_tokens, param, default)
    return bound if cap is None else min(bound, cap)


def operator_cap(config: ServerConfig, defaults: Mapping[str, Any]) -> int | None:
    """The operator's own max_new_tokens bounds every request; the model's recommendation is only a default."""
    chosen_by_operator = "max_new_tokens" in config.override_generation_config or config.generation_config not in ("auto", "vllm")
    return defaults.get("max_tokens") if chosen_by_operator else None


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    for key in given:
        if not _TOKEN_ID_KEY.fullmatch(key):
            raise UserError(f"logit_bias maps token ids to numbers, got the key {key[:40]!r}", param="logit_bias")
    return {int(key): bias for key, bias in given.items()}


def _check_counts(request: GenerationFields, limits: Limits) -> None:
    """Cap the lists by length before anything walks through them."""
    if isinstance(request.stop, list) and len(request.stop) > limits.MAX_STOP_STRINGS:
        raise UserError(f"stop takes at most {limits.MAX_STOP_STRINGS} strings, got {len(request.stop)}", param="stop")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        value = getattr(request, name)
        if value is not None and len(value) > limits.vocab_size:
            raise UserError(f"{name} has {len(value)} entries, the vocabulary has {limits.vocab_size}", param=name)
