"""A request of the Messages API as the chat request that means the same, and the chat route's complaints in Anthropic's terms.

A field is honoured or refused here; what a value may be is checked where chat checks it. Knows no answer. Called by the routes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from halfbyte.engine.limits import Limits
from halfbyte.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from halfbyte.entrypoints.anthropic.tools import read_choice, read_tools
from halfbyte.entrypoints.anthropic.turns import Turn, chat_messages, instructions, keep_thoughts, read_turns
from halfbyte.entrypoints.openai.frontend import Frontend
from halfbyte.entrypoints.openai.protocol import ChatRequest
from halfbyte.entrypoints.openai.refused import refuse_unsupported
from halfbyte.entrypoints.openai.structure import EARLIER_NAMES
from halfbyte.errors import UserError

MIN_BUDGET_TOKENS = 1024
EFFORTS = ("low", "medium", "high", "xhigh", "max")
DISPLAYS = (None, "summarized", "omitted")
# Families whose template knows no answer without thoughts: the least there is.
ALWAYS_THINKING = ("gpt_oss", "openai_gptoss")

# Fields of the chat route alone, and what they are called here where they are called something.
_CHATS = (ChatRequest.model_fields.keys() | EARLIER_NAMES.keys()) - MessagesRequest.model_fields.keys() - {"user"}
_CALLED_HERE = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}


@contextmanager
def in_anthropics_terms() -> Iterator[None]:
    """A UserError within names the fields as these routes call them."""
    try:
        yield
    except UserError as error:
        if (name := error.param) not in _CALLED_HERE:
            raise
        raise UserError(str(error).replace(name, _CALLED_HERE[name], 1), param=_CALLED_HERE[name]) from None


def to_chat(frontend: Frontend, request: CountTokensRequest) -> ChatRequest:
    """What /v1/chat/completions would be asked. UserError names the field that is wrong, or cannot be had here."""
    _refuse_others(request.model_extra or {})
    turns = read_turns(request.messages)
    _edit_context(turns, request.context_management or {})
    tools = read_tools(request.tools or [])
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": instructions(request.system) + chat_messages(turns),
        "tools": tools,
        "chat_template": request.chat_template,
        "chat_template_kwargs": request.chat_template_kwargs,
        **({} if request.tool_choice is None else read_choice(request.tool_choice, has_tools=bool(tools))),
        **_output(request),
        **_ending(turns),
    }
    if request.thinking is not None:
        fields |= _thinking(frontend, request.thinking, request.chat_template_kwargs or {})
    if isinstance(request, MessagesRequest):
        fields |= _generation(request, frontend.engine.limits.max_model_len)
    return ChatRequest.model_construct(**fields)


def _refuse_others(extra: Mapping[str, Any]) -> None:
    refuse_unsupported(extra)
    for name, value in extra.items():
        if name in _CHATS and value is not None:
            here = (
                f"here it is called {_CALLED_HERE[name]}"
                if name in _CALLED_HERE
                else "this route has no such field; leave it out"
            )
            raise UserError(f"{name} is a field of the chat route: {here}", param=name)


def _generation(request: MessagesRequest, longest: int) -> dict[str, Any]:
    """The fields that the prompt does not depend on. longest: the context, in tokens.

    Clients must send max_tokens, and send the most that the model of a name has at Anthropic, so that more than the context is
    no mistake of theirs.
    """
    stops = request.stop_sequences or []
    if len(stops) > Limits.MAX_STOP_STRINGS:
        message = f"stop_sequences takes at most {Limits.MAX_STOP_STRINGS} texts on this server, got {len(stops)}"
        raise UserError(message, param="stop_sequences")
    same = ("stream", "temperature", "top_p", "top_k", "priority", "cache_salt")
    fields = {name: getattr(request, name) for name in same}
    return {"stop": stops or None, "max_tokens": min(request.max_tokens, longest), **fields}


def _ending(turns: list[Turn]) -> dict[str, Any]:
    """An answer continues what the assistant said last."""
    if turns[-1].role != "assistant":
        return {}
    if any(block["type"] == "tool_use" for _, block in turns[-1].blocks):
        raise UserError("the last message calls a tool: its tool_result must follow in a user message", param="messages")
    return {"continue_final_message": True}


def _edit_context(turns: list[Turn], management: Mapping[str, Any]) -> None:
    """Do to the conversation what `context_management` asks."""
    edits = management.get("edits") or []
    if not isinstance(edits, list) or not all(isinstance(edit, Mapping) for edit in edits):
        raise UserError("context_management.edits must be a list of objects", param="context_management")
    for index, edit in enumerate(edits):
        place = f"context_management.edits[{index}]"
        if (kind := edit.get("type")) != "clear_thinking_20251015":
            raise UserError(
                f"{place} is {str(kind)[:60]!r}; the one edit that this server makes is clear_thinking_20251015",
                param="context_management",
            )
        match edit.get("keep", {"type": "thinking_turns", "value": 1}):
            case "all" | {"type": "all"}:
                pass
            case {"type": "thinking_turns", "value": int() as num_turns} if num_turns > 0:
                keep_thoughts(turns, num_turns)
            case _:
                form = '"all" or {"type": "thinking_turns", "value": N}'
                raise UserError(f"{place}.keep must be {form}", param="context_management")


def _output(request: CountTokensRequest) -> dict[str, Any]:
    """Effort and format."""
    config, fields = request.output_config or {}, dict[str, Any]()
    if (effort := config.get("effort")) is not None:
        if effort not in EFFORTS:
            raise UserError(f"output_config.effort must be one of {', '.join(EFFORTS)}", param="output_config")
        fields["reasoning_effort"] = effort
    if config.get("task_budget") is not None:
        raise UserError("output_config.task_budget is not supported by this server: leave it out", param="output_config")
    asked, place = config.get("format"), "output_config.format"
    if asked is None:
        asked, place = request.output_format, "output_format"
    if asked is not None:
        schema = asked.get("schema") if isinstance(asked, Mapping) else None
        if not isinstance(schema, Mapping) or asked.get("type") != "json_schema":
            form = '{"type": "json_schema", "schema": {...}}'
            raise UserError(f"{place} must be {form}", param=place.partition(".")[0])
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    return fields


def _thinking(frontend: Frontend, config: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the model thinks, for how long, and whether it is heard. `adaptive` leaves all to the model."""
    kind, budget = config.get("type"), config.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise UserError(f"thinking.type must be enabled, adaptive or disabled, got {str(kind)[:40]!r}", param="thinking")
    if config.get("display") not in DISPLAYS:
        raise UserError("thinking.display must be summarized or omitted", param="thinking")
    fields: dict[str, Any] = {"include_reasoning": False} if config.get("display") == "omitted" else {}
    if kind == "disabled":
        fields["chat_template_kwargs"] = {"enable_thinking": False, **kwargs}
        fields["reasoning_effort"] = "low" if frontend.config.reasoning_parser in ALWAYS_THINKING else "none"
    if kind == "enabled":
        if type(budget) is not int or not MIN_BUDGET_TOKENS <= budget < 2**31:
            message = f"thinking.budget_tokens must be an integer of at least {MIN_BUDGET_TOKENS} and below 2147483648"
            raise UserError(message, param="thinking")
        fields["chat_template_kwargs"] = {"enable_thinking": True, **kwargs}
        known = frontend.answers.thinking("", continues=False)
        if known is not None and known.end_ids:  # else nobody can tell when it is used up
            fields["thinking_token_budget"] = budget
    return fields
