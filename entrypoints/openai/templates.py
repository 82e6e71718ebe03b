"""Chat messages to prompt text: which template, with which arguments, rendered beside the event loop.

Decides what a request may change about the template; the rendering itself is `halfbyte.entrypoints.chat_template`'s. Shared by
/v1/chat/completions and /tokenize, so that both refuse the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from halfbyte.entrypoints.chat_template import ChatTemplate
from halfbyte.entrypoints.openai.frontend import Frontend
from halfbyte.errors import UserError


class TemplatedRequest(Protocol):
    """The fields that /v1/chat/completions and /tokenize share."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None


async def render(
    frontend: Frontend,
    request: TemplatedRequest,
    messages: list[dict[str, Any]],
    reasoning_effort: str | None = None,
    verbosity: str | None = None,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
) -> str:
    """The prompt text of a conversation.

    tools: what the template shows of the request's tools; None where they stay out of the prompt. UserError when the request
    asks for what it may not, or the template refuses it.
    """
    arguments = _arguments(frontend, request, reasoning_effort, verbosity)

    def work() -> str:
        own = request.chat_template
        if own is None:
            template = frontend.chat_template
        else:
            template = ChatTemplate.for_tokenizer(frontend.engine.tokenizer, own, from_request=True)
        return template.render(
            messages,
            tools=tools,
            documents=request.documents,
            add_generation_prompt=adds_generation_prompt(request),
            continue_final_message=bool(request.continue_final_message),
            chat_template_kwargs=arguments,
        )

    if request.chat_template is None:
        return await frontend.beside.run(work, sum(map(_size, messages)))
    async with frontend.foreign_templates:  # this thread only waits for the template's own process
        return await asyncio.to_thread(work)


def _size(message: object) -> int:
    """How many characters a message has, about; what is neither a text nor parts counts little."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return 100 + sum(len(text) for text in texts if isinstance(text, str))


def adds_generation_prompt(request: TemplatedRequest) -> bool:
    """Whether the prompt ends with the start of a new answer: yes, unless the request says no or continues a message."""
    if request.add_generation_prompt is None:
        return not request.continue_final_message
    return request.add_generation_prompt


def _arguments(
    frontend: Frontend, request: TemplatedRequest, reasoning_effort: str | None, verbosity: str | None
) -> dict[str, Any]:
    given = request.chat_template_kwargs or {}
    config = frontend.config
    if request.chat_template is not None and not config.trust_request_chat_template:
        raise UserError(
            "chat_template: templates of requests are not trusted here; start the server with --trust-request-chat-template",
            param="chat_template",
        )
    arguments = {**config.default_chat_template_kwargs, **given}
    if reasoning_effort is not None:
        arguments["reasoning_effort"] = reasoning_effort
        arguments.setdefault("enable_thinking", reasoning_effort != "none")
    if verbosity is not None:
        arguments["verbosity"] = verbosity
    return arguments
