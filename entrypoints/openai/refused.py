"""Fields that we know and cannot honour yet: accepted at the value that means "off", refused with any other.

One table for all routes, so that a field leaves it when its feature arrives; a route that has a field of its own never asks for
it here. A setting is honoured or refused, never dropped; only fields that nobody knows pass silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfbyte.errors import UserError

_OFF: tuple[Any, ...] = (None,)
_EMPTY: tuple[Any, ...] = (None, {}, [])

# field -> the values that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "prompt_embeds": _EMPTY,
    "guided_decoding_backend": (None, "auto", "guidance"),
    "tools": _OFF,
    "tool_choice": (None, "none"),
    "functions": _EMPTY,
    "function_call": (None, "none"),
    "container": _OFF,
    "mcp_servers": _EMPTY,
    "speed": (None, "standard"),
    "inference_geo": _OFF,
    "modalities": (None, [], ["text"]),
    "audio": _OFF,
    "mm_processor_kwargs": _EMPTY,
    "media_io_kwargs": _EMPTY,
    "repetition_detection": _OFF,
    "stream_interval": (None, 1),
    "watermarking": (None, False),
    "vllm_xargs": _EMPTY,
    "kv_transfer_params": _EMPTY,
    "ec_transfer_params": _EMPTY,
    "prompt_logprob_token_ids": _OFF,
    "prompt_logprob_start": _OFF,
    "logits_processors": _EMPTY,
    "skip_reading_prefix_cache": (None, False),
}


def refuse_unsupported(extra: Mapping[str, Any] | None, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL) -> None:
    """UserError naming the first field in `extra` that asks for something this server cannot do. neutral: a route's own table."""
    for name, value in (extra or {}).items():
        allowed = neutral.get(name)
        if allowed is not None and not any(type(value) is type(off) and value == off for off in allowed):
            spare = " or ".join(str(off).lower() if isinstance(off, bool) else repr(off) for off in allowed[1:])
            hint = f"leave it out{f' or send {spare}' if spare else ''}"
            raise UserError(f"{name} is not supported by this server yet: {hint}", param=name)
