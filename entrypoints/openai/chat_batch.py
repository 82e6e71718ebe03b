"""POST /v1/chat/completions/batch: several conversations in one request, one answer whose choice i is conversation i's.

Each is prepared as if it were alone, and all are admitted together or none is. Knows what one answer has no room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.responses import Response

from halfbyte.entrypoints.openai.chat_writer import ChatWriter
from halfbyte.entrypoints.openai.choices import GrowingChoice, Tally, collect, size_with_logprobs
from halfbyte.entrypoints.openai.conversation import Conversation, prepare
from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.protocol import BatchChatRequest, ChatRequest
from halfbyte.entrypoints.openai.wire import ChatCompletion, to_json
from halfbyte.errors import UserError

# What one answer to several conversations cannot have, and the values that do not ask for it.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "n": (1,),
    "use_beam_search": (False,),
    "tools": (),
    "tool_choice": ("none",),
    "prompt_logprobs": (),
    "return_prompt_text": (False,),
}
# Errors of these fields are about one conversation.
_OF_ONE = frozenset(("messages", "input_text", "input_tokens", "max_tokens", "max_completion_tokens"))


async def create(frontend: Frontend, call: Call, request: BatchChatRequest) -> Response:
    """Answer all conversations. Every refusal comes before anything is generated, and names the conversation that it is about."""
    call.use_body_label(request.request_id)
    _check(request, frontend.engine.limits.MAX_PROMPTS)
    conversations = [await _prepare(frontend, request, index) for index in range(len(request.messages))]
    lengths = [len(conversation.prompt.token_ids) for conversation in conversations]
    tally = Tally(call, lengths)
    writers = [ChatWriter(frontend, call, conversation, tally) for conversation in conversations]
    frontend.engine.admit(len(conversations), sum(lengths))
    generations = await frontend.generate(
        [conversation.asked for conversation in conversations],
        frontend.adapters.of(conversations[0].model),
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        is_admitted=True,
    )
    choices = await collect(generations, 1, tally)
    whole = partial(_whole, writers, choices)
    return to_json(await frontend.beside.run(whole, size_with_logprobs(choices)) if request.logprobs else whole())


def _check(request: BatchChatRequest, max_conversations: int) -> None:
    count = len(request.messages)
    if count > max_conversations:
        raise UserError(f"messages holds {count} conversations, at most {max_conversations} are allowed", param="messages")
    for name, values in _ABSENT.items():
        value = getattr(request, name)
        if value is not None and value not in values:
            raise UserError(f"{name} goes not with several conversations: leave it out, or send them one by one", param=name)


async def _prepare(frontend: Frontend, request: BatchChatRequest, index: int) -> Conversation:
    fields = {name: getattr(request, name) for name in ChatRequest.model_fields}
    one = ChatRequest.model_construct(**(fields | {"messages": request.messages[index]}), **(request.model_extra or {}))
    try:
        return await prepare(frontend, one)
    except UserError as error:
        if error.param not in _OF_ONE:
            raise
        raise UserError(f"messages[{index}]: {error}", param=error.param) from None


def _whole(writers: Sequence[ChatWriter], choices: Sequence[GrowingChoice]) -> ChatCompletion:
    answers = [writer.whole([choice]) for writer, choice in zip(writers, choices, strict=True)]
    answer = answers[-1]  # its usage was counted behind all others
    answer.choices = [part.choices[0] for part in answers]
    for index, choice in enumerate(answer.choices):
        choice.index = index
    answer.prompt_token_ids = None
    return answer
