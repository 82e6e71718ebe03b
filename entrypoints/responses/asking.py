"""A Responses request as a chat request: fields and formats in the other words, and errors in these. `tools` does the tools.

What of these has no counterpart here is refused by name, never dropped. Generates nothing; called by `handlers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from halfbyte.entrypoints.openai.conversation import Conversation, prepare
from halfbyte.entrypoints.openai.frontend import Frontend
from halfbyte.entrypoints.openai.protocol import ChatRequest
from halfbyte.entrypoints.openai.refused import refuse_unsupported
from halfbyte.entrypoints.responses.items import ChatMessage, num_turns, without_oldest
from halfbyte.entrypoints.responses.protocol import LOGPROBS, ResponsesRequest
from halfbyte.entrypoints.responses.tools import RequestTools, read_choice
from halfbyte.errors import PromptTooLongError, UserError

# the chat's field -> what it is called here
RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
# Known elsewhere, not here: refused with any value but these.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "conversation": (None,),
    "context_management": (None, []),
    "moderation": (None,),
    "prompt": (None,),
    "prompt_cache_options": (None, {}),
    "prompt_cache_retention": (None, "in_memory"),
    "stream_options": (None, {}, {"include_obfuscation": False}, {"include_usage": True}),
    "enable_response_messages": (None, False),
    "previous_input_messages": (None, []),
}
SAME = tuple(name for name in ChatRequest.model_fields if name in ResponsesRequest.model_fields and name != "stream")
# With truncation="auto" an answer of this part of the context must have room.
ROOM = 8


@contextmanager
def own_words() -> Iterator[None]:
    """Errors of the chat's fields, told with the names that these have here."""
    try:
        yield
    except UserError as error:
        own = RENAMED.get(error.param or "")
        if own is None:
            raise
        raise type(error)(str(error).replace(error.param or "", own), param=own) from None


def refuse_foreign(request: ResponsesRequest) -> None:
    """UserError for fields that are known, and not here, and for values that ask for what is not made here."""
    extra = request.model_extra or {}
    for name, value in extra.items():
        if name in ChatRequest.model_fields and value is not None and name not in NEUTRAL:
            hint = f"; it is called {RENAMED[name]} here" if name in RENAMED else ""
            raise UserError(f"{name} is no field of responses{hint}", param=name)
    refuse_unsupported(extra, NEUTRAL)
    reasoning = request.reasoning
    if reasoning is not None and reasoning.summary not in (None, "auto"):
        raise UserError(
            f'reasoning.summary {reasoning.summary!r}: thoughts are returned whole, not summarised; leave it out, or send "auto"',
            param="reasoning.summary",
        )
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
        raise UserError(f'top_logprobs needs include: ["{LOGPROBS}"]', param="top_logprobs")


def chat_request(request: ResponsesRequest, tools: RequestTools, messages: list[ChatMessage]) -> ChatRequest:
    """The chat request that asks the same of these messages."""
    extra = {name: value for name, value in (request.model_extra or {}).items() if name not in NEUTRAL}
    same = {name: value for name in SAME if (value := getattr(request, name)) is not None}
    logprobs = LOGPROBS in (request.include or ())
    asked = {
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "tools": tools.offered or None,
        "tool_choice": read_choice(request.tool_choice, has_tools=bool(tools.offered)),
        "response_format": _response_format(None if request.text is None else request.text.format),
        "verbosity": None if request.text is None else request.text.verbosity,
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "logprobs": logprobs or None,
        "top_logprobs": request.top_logprobs if logprobs else None,
    }
    return ChatRequest.model_validate(extra | same | asked)


def _response_format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("type") == "text":
        return None
    kind = given.get("type")
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise UserError(f"text.format.type must be text, json_object or json_schema, got {str(kind)[:40]!r}", param="text.format")
    if not isinstance(given.get("name"), str) or not isinstance(given.get("schema"), (Mapping, bool)):
        raise UserError("text.format of type json_schema needs a name and a schema, an object", param="text.format")
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


async def fit(
    frontend: Frontend, make: Callable[[list[ChatMessage]], ChatRequest], messages: list[ChatMessage], *, truncate: bool
) -> Conversation:
    """The conversation, prepared. truncate: without as few of its oldest turns as leave room for an answer.

    Where dropping all but the last turn leaves little room, that is what is answered; PromptTooLongError where there is none.
    """
    if not truncate:
        return await prepare(frontend, make(messages))
    limit = frontend.engine.limits.max_model_len

    async def attempt(num_dropped: int) -> Conversation | PromptTooLongError:
        try:
            return await prepare(frontend, make(without_oldest(messages, num_dropped)))
        except PromptTooLongError as error:
            return error

    def has_room(tried: Conversation | PromptTooLongError) -> bool:
        if isinstance(tried, PromptTooLongError):
            return False
        wanted = min(tried.request.max_completion_tokens or limit, limit // ROOM)
        return limit - len(tried.prompt.token_ids) >= wanted

    tried = await attempt(0)
    chosen = tried if has_room(tried) else None
    low, high = 1, 0 if chosen else num_turns(messages) - 1
    while low <= high:
        middle = (low + high) // 2
        tried = await attempt(middle)
        if has_room(tried):
            chosen, high = tried, middle - 1
        else:
            low = middle + 1
    best = chosen or tried  # without any that has room, the last one tried is the shortest
    if isinstance(best, PromptTooLongError):
        raise best
    return best
