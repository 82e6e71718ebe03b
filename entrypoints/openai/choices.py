"""Answers in the making: the choices of a call as they grow, and what the call used.

Collects deltas for answers that are sent whole and counts tokens for both kinds. Of the wire it knows only `Usage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from halfbyte.engine.output_processor import SequenceDelta
from halfbyte.entrypoints.openai.errors import GenerationError
from halfbyte.entrypoints.openai.frontend import Call
from halfbyte.entrypoints.openai.streaming import Closeable, merge
from halfbyte.entrypoints.openai.wire import CompletionTokensDetails, PromptTokensDetails, Usage
from halfbyte.types import TokenLogprobs


@dataclass(slots=True)
class GrowingChoice:
    """One sequence so far. `logprobs` has an entry per token if they were asked for."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def grow(self, delta: SequenceDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.token_texts += delta.token_texts
        self.logprobs += delta.logprobs or ()
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class Tally:
    """Counts what a call used. cached tokens: of each prompt's first sequence (its siblings may reuse that one's)."""

    def __init__(self, call: Call, prompt_lengths: Sequence[int]) -> None:
        call.num_prompt_tokens = sum(prompt_lengths)
        self._call = call
        self._cached = [0] * len(prompt_lengths)
        self.num_reasoning_tokens: int | None = None  # None: this model's answers are not looked at for thoughts

    @property
    def num_cached_tokens(self) -> int:
        return sum(self._cached)

    def count(self, prompt_index: int, delta: SequenceDelta) -> None:
        """GenerationError if the engine gave this sequence up."""
        if delta.index == 0:
            self._cached[prompt_index] = max(self._cached[prompt_index], delta.num_cached_tokens)
        if delta.finish_reason == "error":
            raise GenerationError(delta.error or "the engine could not finish this request")
        self._call.num_completion_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._call.finish_reasons.add(delta.finish_reason)

    def usage(self) -> Usage:
        call = self._call
        details = None
        if call.frontend.config.enable_prompt_tokens_details:
            details = PromptTokensDetails(self.num_cached_tokens)
        total = call.num_prompt_tokens + call.num_completion_tokens
        thought = self.num_reasoning_tokens
        return Usage(
            call.num_prompt_tokens,
            total,
            call.num_completion_tokens,
            details,
            None if thought is None else CompletionTokensDetails(thought),
        )


async def collect(generations: Sequence[Closeable], n: int, tally: Tally) -> list[GrowingChoice]:
    """All choices, complete: choice i of prompt p at p * n + i. Leaving early aborts all of them."""
    choices = [GrowingChoice() for _ in range(len(generations) * n)]
    async with aclosing(merge(generations)) as deltas:
        async for prompt_index, delta in deltas:
            tally.count(prompt_index, delta)
            choices[prompt_index * n + delta.index].grow(delta)
    return choices


def size_with_logprobs(choices: Iterable[GrowingChoice]) -> int:
    """The work of writing choices with log probabilities, in the characters of `Beside.run`: some dozens for each token."""
    return sum(50 * len(choice.token_ids) for choice in choices)
