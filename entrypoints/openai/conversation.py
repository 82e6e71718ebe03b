"""A conversation on its way to an answer: checked, rendered, planned, started; then read, event by event.

Every route that speaks of messages comes through here, whatever its wire form is: it says what is asked as a `ChatRequest`, and
tells the events of `AnswerReader` in its own way. Knows no form of an answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from halfbyte.engine.output_processor import SequenceDelta
from halfbyte.entrypoints.answers.events import CallArguments, CallStart, Content, Event, Reasoning
from halfbyte.entrypoints.answers.thought_tokens import ThoughtTokens
from halfbyte.entrypoints.openai import templates
from halfbyte.entrypoints.openai.choices import Tally
from halfbyte.entrypoints.openai.constraints import AnswerPlan, check_tools, plan_answer, shown_tools
from halfbyte.entrypoints.openai.frontend import Asked, Call, Frontend
from halfbyte.entrypoints.openai.prompts import Prompt, encode_prompts
from halfbyte.entrypoints.openai.protocol import ChatRequest
from halfbyte.entrypoints.openai.refused import refuse_unsupported
from halfbyte.entrypoints.openai.sampling import check_stream_fields, effective_max_tokens, operator_cap, sampling_params
from halfbyte.entrypoints.openai.streaming import Closeable, merge
from halfbyte.entrypoints.openai.tools import ToolUse, tool_use
from halfbyte.errors import UserError
from halfbyte.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Conversation:
    """One that can be answered: every refusal has come before there is one of these.

    model: the name to answer with. plan: what bounds the answer, and what reads it.
    """

    request: ChatRequest
    model: str
    prompt: Prompt
    params: SamplingParams
    plan: AnswerPlan

    @property
    def asked(self) -> Asked:
        """What the engine is to generate."""
        return Asked(self.prompt.token_ids, self.params, self.plan.grammar, self.plan.thinking, self.plan.marks)


async def prepare(frontend: Frontend, request: ChatRequest) -> Conversation:
    """Check one conversation, render and encode it, and plan its answer. Nothing is generated yet."""
    model = frontend.served_model(request.model)
    frontend.require_serving()
    refuse_unsupported(request.model_extra)
    check_stream_fields(request)
    if request.top_logprobs and not request.logprobs:
        raise UserError("top_logprobs needs logprobs=true", param="top_logprobs")
    prompt, use = await _render(frontend, request)
    params = _params(frontend, request, len(prompt.token_ids))
    plan = await plan_answer(frontend, request, use, prompt.text or "")
    return Conversation(request, model, prompt, params, plan)


async def begin(frontend: Frontend, call: Call, conversation: Conversation) -> tuple[Tally, list[Closeable]]:
    """Start to generate the answer. The tally counts what it uses."""
    request = conversation.request
    tally = Tally(call, [len(conversation.prompt.token_ids)])
    generations = await frontend.generate(
        [conversation.asked],
        frontend.adapters.of(conversation.model),
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
    )
    return tally, generations


async def count_prompt(frontend: Frontend, request: ChatRequest) -> int:
    """How many tokens the conversation's prompt has; it may be longer than what can be answered."""
    frontend.served_model(request.model)
    refuse_unsupported(request.model_extra)
    prompt, _ = await _render(frontend, request)
    return len(prompt.token_ids)


async def _render(frontend: Frontend, request: ChatRequest) -> tuple[Prompt, ToolUse]:
    """The prompt, and what the model may do with the tools. Refuses tools that this server or this request cannot have."""
    use = tool_use(request)
    check_tools(frontend, use)
    shown = shown_tools(request, use, frontend)
    text = await templates.render(frontend, request, request.messages, request.reasoning_effort, request.verbosity, tools=shown)
    special, budget = bool(request.add_special_tokens), _asked_tokens(request)
    return (await encode_prompts(frontend.engine, [text], request, special=special, budget=budget, seams=True))[0], use


def _asked_tokens(request: ChatRequest) -> int | None:
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens


def _params(frontend: Frontend, request: ChatRequest, num_prompt_tokens: int) -> SamplingParams:
    limits, defaults = frontend.engine.limits, frontend.sampling_defaults
    max_tokens = effective_max_tokens(
        limits,
        _asked_tokens(request),
        num_prompt_tokens,
        param="max_tokens" if request.max_completion_tokens is None else "max_completion_tokens",
        default=defaults.get("max_tokens"),
        cap=operator_cap(frontend.config, defaults),
    )
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return sampling_params(
        request, limits, defaults, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=request.prompt_logprobs
    )


CALL_PREFIX = "chatcmpl-tool-"


class AnswerReader:
    """Reads one choice of an answer as it is written: what the request wants to hear of, each call with an id.

    has_calls: whether a call was told. tally: counts the tokens of thoughts. call_prefix: of the ids.
    """

    def __init__(self, conversation: Conversation, tally: Tally, call_prefix: str = CALL_PREFIX) -> None:
        plan, request = conversation.plan, conversation.request
        self.has_calls = False
        self.parser = plan.parser()  # None: all of the text is content
        self._new_call_id = partial(plan.frontend.answers.new_call_id, call_prefix)
        self._shows_reasoning = request.include_reasoning is not False
        self._shows_one_call = plan.use.mode != "none" and not plan.use.parallel
        self._thoughts: ThoughtTokens | None = None
        # Where thoughts end by a pattern of text, tokens cannot be told apart.
        if plan.thinking is not None and plan.thinking.end_ids:
            self._thoughts = ThoughtTokens(plan.thinking, plan.frontend.engine.tokenizer.token_bytes)
            tally.num_reasoning_tokens = tally.num_reasoning_tokens or 0
        self._tally = tally

    def read(self, text: str, token_ids: Sequence[int], finish_reason: str | None) -> list[Event]:
        """What more text means; all that is left of it when the engine has finished."""
        if self._thoughts is not None:
            self._tally.num_reasoning_tokens = (self._tally.num_reasoning_tokens or 0) + self._thoughts.count(token_ids)
        if self.parser is None:
            return [Content(text)] if text else []
        events = self.parser.feed(text) if text else []
        if finish_reason is not None:
            events += self.parser.finish(was_cut=finish_reason != "stop")
        return list(self._shown(events))

    def _shown(self, events: Iterable[Event]) -> Iterable[Event]:
        """No thoughts, or one call only, where the request says so."""
        for event in events:
            if isinstance(event, Reasoning) and not self._shows_reasoning:
                continue
            if isinstance(event, (CallStart, CallArguments)) and self._shows_one_call and event.index > 0:
                continue
            if isinstance(event, CallStart):
                self.has_calls = True
                event = replace(event, call_id=event.call_id or self._new_call_id())
            yield event


async def read_answer(
    conversation: Conversation, tally: Tally, generations: Sequence[Closeable], call_prefix: str = CALL_PREFIX
) -> AsyncGenerator[tuple[list[Event], SequenceDelta], None]:
    """The events of each delta of an answer of one choice. Leaving early aborts it."""
    reader = AnswerReader(conversation, tally, call_prefix)
    async with aclosing(merge(generations)) as deltas:
        async for _, delta in deltas:
            tally.count(0, delta)
            yield reader.read(delta.text, delta.token_ids, delta.finish_reason), delta
