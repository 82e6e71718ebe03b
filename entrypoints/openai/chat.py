"""POST /v1/chat/completions: a conversation through the model's template, n choices, whole or streamed."""

from __future__ import annotations

from functools import partial

from starlette.responses import Response

from halfbyte.entrypoints.openai.beams import find_beams
from halfbyte.entrypoints.openai.chat_writer import ChatWriter
from halfbyte.entrypoints.openai.choices import Tally, collect, size_with_logprobs
from halfbyte.entrypoints.openai.conversation import begin, prepare
from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.protocol import ChatRequest
from halfbyte.entrypoints.openai.streaming import EventStream
from halfbyte.entrypoints.openai.wire import to_json


async def create(frontend: Frontend, call: Call, request: ChatRequest) -> Response:
    """Answer one chat request. Every refusal comes before the answer starts."""
    call.use_body_label(request.request_id)
    conversation = await prepare(frontend, request)
    if request.use_beam_search:
        tally = Tally(call, [len(conversation.prompt.token_ids)])
        writer = ChatWriter(frontend, call, conversation, tally)
        choices = await find_beams(frontend, [conversation.asked], frontend.adapters.of(conversation.model), request, tally)
    else:
        tally, generations = await begin(frontend, call, conversation)
        writer = ChatWriter(frontend, call, conversation, tally)
        if request.stream:
            return EventStream(writer.events(generations), call.end, frontend.config.sse_keep_alive_interval_s)
        choices = await collect(generations, writer.n, tally)
    if request.logprobs or request.prompt_logprobs is not None:  # thousands of small objects
        return to_json(await frontend.beside.run(partial(writer.whole, choices), size_with_logprobs(choices)))
    return to_json(writer.whole(choices))
