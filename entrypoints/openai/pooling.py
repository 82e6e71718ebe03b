"""Jobs of a call over the engine: admitted together, some at a time, all or none. Shared by the routes of models that pool."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from halfbyte.engine.output_processor import SequenceDelta
from halfbyte.entrypoints.openai import templates
from halfbyte.entrypoints.openai.choices import Tally
from halfbyte.entrypoints.openai.errors import GenerationError
from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.pooling_protocol import PoolingFields, PromptFields
from halfbyte.entrypoints.openai.prompts import parse_prompts
from halfbyte.entrypoints.openai.reads import READS_AT_ONCE, read_each
from halfbyte.entrypoints.openai.refused import refuse_unsupported
from halfbyte.entrypoints.openai.wire import Usage
from halfbyte.entrypoints.pooling.prompts import PoolingJob, PoolingPrompts
from halfbyte.errors import UserError
from halfbyte.pooling import PoolingParams, PoolingTask


class ListAnswer(msgspec.Struct, kw_only=True):
    """What answers with one entry per prompt have in common; `data` holds the entries, in the order of the prompts."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: Usage


class _Conversation:
    """What a template is told: a conversation that is read ends where it ends, unless the request says otherwise."""

    documents: list[dict[str, Any]] | None = None

    def __init__(self, request: PromptFields) -> None:
        self.add_generation_prompt: bool | None = bool(request.add_generation_prompt)
        self.continue_final_message = request.continue_final_message
        self.chat_template = request.chat_template
        self.chat_template_kwargs = request.chat_template_kwargs


def begin(frontend: Frontend, call: Call, request: PoolingFields) -> tuple[str, PoolingPrompts]:
    """(the served name, what makes prompts), after the checks that all of these routes share."""
    call.use_body_label(request.request_id)
    model = frontend.served_model(request.model)
    frontend.require_serving()
    extra = request.model_extra or {}
    if extra.get("normalize") is not None:
        raise UserError("normalize is called use_activation here", param="normalize")
    refuse_unsupported(extra)
    return model, frontend.pooling_prompts


def pooling_params(request: PoolingFields, dimensions: int | None = None, task: PoolingTask | None = None) -> PoolingParams:
    return PoolingParams(
        task=task,
        dimensions=dimensions,
        use_activation=request.use_activation,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
    )


async def prompt_jobs(
    frontend: Frontend, prompts: PoolingPrompts, request: PromptFields, params: PoolingParams, task: PoolingTask
) -> list[PoolingJob]:
    """The jobs of `input`, or of a conversation."""
    if (request.input is None) == (request.messages is None):
        raise UserError("send either input or messages", param="input")
    prompts.info.ask(params, task)  # refused before anything is tokenised
    if request.messages is not None:
        text = await templates.render(frontend, _Conversation(request), request.messages)
        special = bool(request.add_special_tokens)
        return await frontend.beside.run(
            lambda: [prompts.of_text(text, params, task, special=special, seams=True, param="messages")], len(text)
        )
    for name in ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
        if getattr(request, name):
            raise UserError(f"{name} is for messages; leave it out", param=name)
    given = parse_prompts(request.input, None, frontend.engine.limits, "input")
    special = request.add_special_tokens is not False

    def work() -> list[PoolingJob]:
        return [
            prompts.of_text(prompt, params, task, special=special)
            if isinstance(prompt, str)
            else prompts.of_ids(prompt, params, task)
            for prompt in given
        ]

    return await frontend.beside.run(work, sum(map(len, given)))


async def pool(frontend: Frontend, call: Call, request: PoolingFields, jobs: Sequence[PoolingJob]) -> tuple[list[bytes], Usage]:
    """The vectors of all jobs, in their order, or the first error; then nothing of the call goes on."""
    lengths = [len(job.token_ids) for job in jobs]
    tally = Tally(call, lengths)
    frontend.engine.admit(min(READS_AT_ONCE, len(jobs)), max(lengths))
    start = partial(frontend.pool, priority=request.priority or 0, cache_salt=request.cache_salt)
    deltas = await read_each(start, jobs)
    for index, delta in enumerate(deltas):
        tally.count(index, delta)
    return [_vector(delta) for delta in deltas], tally.usage()


def _vector(delta: SequenceDelta) -> bytes:
    if delta.pooled is None:
        raise GenerationError("the engine could not compute this prompt")
    return delta.pooled
