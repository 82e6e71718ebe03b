"""Beam search: which continuations of a prompt are kept, step by step, by the log probabilities that a model gives them.

Pure bookkeeping with vLLM's definitions: it says which prompts to ask about next and is told what was found. Must not know
engines and HTTP; `LLM` and the routes each ask in their own way, with requests of one token.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from halfbyte.errors import UserError
from halfbyte.types import EngineInfo, SamplingParams, TokenLogprobs

# The largest power of a length whose value a double holds, for contexts of up to 2**31 tokens.
MAX_LENGTH_PENALTY = 32.0


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """What to search for. Names and defaults are vLLM's. UserError names a field that is wrong.

    beam_width: beams that are kept, and returned. length_penalty: scores are divided by the length to this power; above 0 it
    favours long beams, below 0 short ones. temperature: 0, since nothing is drawn. include_stop_str_in_output: show the end of
    text.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UserError(f"{name} must be at least 1, got {value!r}", param=name)
        if self.temperature != 0:
            raise UserError(f"temperature must be 0: beam search draws nothing, got {self.temperature!r}", param="temperature")
        check_length_penalty(self.length_penalty)


def check_length_penalty(value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_LENGTH_PENALTY:
        raise UserError(
            f"length_penalty must be from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}, got {value!r}",
            param="length_penalty",
        )


def step_params(info: EngineInfo, beam_width: int, param: str) -> SamplingParams:
    """The parameters of one step of one beam. UserError names `param` when the engine does not tell so many log probabilities."""
    if info.logprobs_mode != "raw_logprobs":
        raise UserError(
            f"beam search needs an engine that reports raw_logprobs; --logprobs-mode is {info.logprobs_mode}", param=param
        )
    num_candidates = min(2 * beam_width, info.vocab_size)
    if beam_width > info.vocab_size:
        raise UserError(f"{param}={beam_width} is more than the vocabulary's {info.vocab_size} tokens", param=param)
    if num_candidates > info.max_logprobs != -1:
        raise UserError(
            f"{param}={beam_width} needs the {num_candidates} best log probabilities of each step, at most"
            f" {info.max_logprobs} are possible (--max-logprobs)",
            param=param,
        )
    return SamplingParams(temperature=0.0, max_tokens=1, seed=0, ignore_eos=True, detokenize=False, logprobs=num_candidates)


@dataclass(slots=True)
class Beam:
    """One continuation. token_ids holds the token that ended it; logprobs: where each token was found among its alternatives."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cum_logprob: float = 0.0
    has_ended: bool = False


class _Candidate(NamedTuple):
    cum_logprob: float
    beam: Beam
    place: int  # among the alternatives
    found: TokenLogprobs

    def grown(self, has_ended: bool) -> Beam:
        beam, found, token_id = self.beam, self.found, self.found.top_token_ids[self.place]
        logprob = found.top_logprobs[self.place]
        entry = TokenLogprobs(token_id, logprob, self.place + 1, found.top_token_ids, found.top_logprobs)
        return Beam([*beam.token_ids, token_id], [*beam.logprobs, entry], self.cum_logprob, has_ended)


class BeamSearch:
    """The search for one prompt. While `is_open`: ask what follows each of `prompts`, and tell `advance`.

    max_tokens: what fits behind the prompt, at most the parameters'. end_token_ids: tokens that end a beam.
    """

    def __init__(
        self, prompt_token_ids: list[int], beam_width: int, max_tokens: int, length_penalty: float, end_token_ids: Collection[int]
    ) -> None:
        self._prompt = prompt_token_ids
        self._width = beam_width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._ends = frozenset(end_token_ids)
        self._beams = [Beam()]
        self._ended: list[Beam] = []
        self._num_steps = 0

    @property
    def is_open(self) -> bool:
        return bool(self._beams) and self._num_steps < self._max_tokens and not self._is_decided()

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids, of each beam that goes on."""
        return [self.tokens(beam) for beam in self._beams]

    def tokens(self, beam: Beam) -> list[int]:
        """Prompt and beam."""
        return self._prompt + beam.token_ids

    def advance(self, found: Sequence[TokenLogprobs]) -> None:
        """What follows each of `prompts`: its most likely tokens, at least twice as many as beams are kept."""
        candidates = []
        for beam, entry in zip(self._beams, found, strict=True):
            for place, (token_id, logprob) in enumerate(self._alternatives(entry)):
                if logprob == -math.inf:
                    continue
                candidate = _Candidate(beam.cum_logprob + logprob, beam, place, entry)
                if token_id in self._ends:
                    self._ended.append(candidate.grown(has_ended=True))
                else:
                    candidates.append(candidate)
        candidates.sort(key=lambda candidate: candidate.cum_logprob, reverse=True)  # all of one length; equals keep their order
        self._beams = [candidate.grown(has_ended=False) for candidate in candidates[: self._width]]
        self._num_steps += 1
        self._ended = self._ranked(self._ended)

    def _alternatives(self, entry: TokenLogprobs) -> Iterable[tuple[int, float]]:
        return islice(zip(entry.top_token_ids, entry.top_logprobs, strict=True), 2 * self._width)

    def best(self) -> list[Beam]:
        """The best beams, best first: at most as many as the width."""
        return self._ranked([*self._ended, *self._beams])

    def score(self, beam: Beam) -> float:
        """The sum of log probabilities over the length to the power of the penalty: with the prompt, without the end of text."""
        return self._scored(beam.cum_logprob, len(beam.token_ids) - beam.has_ended)

    def _ranked(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=self.score, reverse=True)[: self._width]

    def _scored(self, cum_logprob: float, num_tokens: int) -> float:
        return cum_logprob / float(len(self._prompt) + num_tokens) ** self._length_penalty

    def _is_decided(self) -> bool:
        """Whether no open beam can still get among the best: a sum only falls, and a score moves one way with the length."""
        if len(self._ended) < self._width:
            return False
        best = max(beam.cum_logprob for beam in self._beams)
        most = max(self._scored(best, self._num_steps), self._scored(best, self._max_tokens))
        return self.score(self._ended[-1]) >= most
