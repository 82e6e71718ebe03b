"""POST /v1/messages and /v1/messages/count_tokens: conversations in Anthropic's form.

Both translate their request and go the way of chat, so that they refuse and count the same.
"""

from __future__ import annotations

from functools import partial

from starlette.responses import Response

from halfbyte.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from halfbyte.entrypoints.anthropic.translation import in_anthropics_terms, to_chat
from halfbyte.entrypoints.anthropic.turns import num_blocks
from halfbyte.entrypoints.anthropic.wire import TokenCount
from halfbyte.entrypoints.anthropic.writer import MessageWriter, end_of_stream
from halfbyte.entrypoints.openai.conversation import begin, count_prompt, prepare
from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.protocol import ChatRequest
from halfbyte.entrypoints.openai.streaming import EventStream
from halfbyte.entrypoints.openai.wire import to_json

CHARS_PER_BLOCK = 100  # the work of translating one, in the characters of `Beside.run`


async def create(frontend: Frontend, call: Call, request: MessagesRequest) -> Response:
    """Answer one request. Every refusal comes before the answer starts."""
    chat = await _translated(frontend, request)
    with in_anthropics_terms():
        conversation = await prepare(frontend, chat)
        tally, generations = await begin(frontend, call, conversation)
    writer = MessageWriter(call, conversation, tally)
    if request.stream:
        return EventStream(writer.events(generations), call.end, frontend.config.sse_keep_alive_interval_s, end_of_stream)
    return to_json(await writer.whole(generations))


async def count_tokens(frontend: Frontend, call: Call, request: CountTokensRequest) -> Response:
    """How many tokens the prompt of the same request would have; also where it is too long to be answered."""
    chat = await _translated(frontend, request)
    with in_anthropics_terms():
        call.num_prompt_tokens = await count_prompt(frontend, chat)
    return to_json(TokenCount(call.num_prompt_tokens))


async def _translated(frontend: Frontend, request: CountTokensRequest) -> ChatRequest:
    """Beside the event loop: a body may hold some hundred thousand blocks."""
    return await frontend.beside.run(partial(to_chat, frontend, request), CHARS_PER_BLOCK * num_blocks(request.messages))
