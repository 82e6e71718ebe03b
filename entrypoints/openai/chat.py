"""POST /v1/chat/completions: a conversation through the model's template, n choices, whole or streamed.

`create` checks everything and starts the generation before an answer exists; what is told of it then is `chat_writer`'s.
"""

from __future__ import annotations

from functools import partial

from starlette.responses import Response

from halfbyte.entrypoints.openai import templates
from halfbyte.entrypoints.openai.chat_writer import ChatWriter
from halfbyte.entrypoints.openai.choices import Tally, collect, size_with_logprobs
from halfbyte.entrypoints.openai.constraints import check_tools, plan_answer, shown_tools
from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.prompts import encode_prompts
from halfbyte.entrypoints.openai.protocol import ChatRequest
from halfbyte.entrypoints.openai.refused import refuse_unsupported
from halfbyte.entrypoints.openai.responses import to_json
from halfbyte.entrypoints.openai.sampling import (
    check_stream_fields,
    effective_max_tokens,
    operator_cap,
    sampling_params,
)
from halfbyte.entrypoints.openai.streaming import EventStream
from halfbyte.entrypoints.openai.tools import tool_use
from halfbyte.errors import UserError
from halfbyte.types import SamplingParams


async def create(frontend: Frontend, call: Call, request: ChatRequest) -> Response:
    """Answer one chat request. Every refusal comes before the answer starts."""
    call.use_body_label(request.request_id)
    model = frontend.served_model(request.model)
    frontend.require_serving()
    refuse_unsupported(request.model_extra)
    check_stream_fields(request)
    if request.top_logprobs and not request.logprobs:
        raise UserError("top_logprobs needs logprobs=true", param="top_logprobs")
    use = tool_use(request)
    check_tools(frontend, use)
    text = await templates.render(
        frontend, request, request.messages, request.reasoning_effort, tools=shown_tools(request, use, frontend)
    )
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    special = bool(request.add_special_tokens)
    prompt = (await encode_prompts(frontend.engine, [text], request, special=special, budget=asked, seams=True))[0]
    params = _params(frontend, request, asked, len(prompt.token_ids))
    plan = await plan_answer(frontend, request, use, prompt.text or "")
    tally = Tally(call, [len(prompt.token_ids)])
    writer = ChatWriter(frontend, call, request, model, prompt, plan, tally)
    generations = await frontend.generate(
        [(prompt.token_ids, params)],
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        grammar=plan.grammar,
        thinking=plan.thinking,
        marks=writer.marks,
    )
    if request.stream:
        return EventStream(writer.events(generations), call.end, frontend.config.sse_keep_alive_interval_s)
    choices = await collect(generations, writer.n, tally)
    if request.logprobs or request.prompt_logprobs is not None:  # thousands of small objects
        return to_json(await frontend.beside.run(partial(writer.whole, choices), size_with_logprobs(choices)))
    return to_json(writer.whole(choices))


def _params(frontend: Frontend, request: ChatRequest, asked: int | None, num_prompt_tokens: int) -> SamplingParams:
    limits, defaults = frontend.engine.limits, frontend.sampling_defaults
    max_tokens = effective_max_tokens(
        limits,
        asked,
        num_prompt_tokens,
        param="max_tokens" if request.max_completion_tokens is None else "max_completion_tokens",
        default=defaults.get("max_tokens"),
        cap=operator_cap(frontend.config, defaults),
    )
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return sampling_params(
        request, limits, defaults, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=request.prompt_logprobs
    )
