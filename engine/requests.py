"""From one generation with n sequences to n checked engine requests.

The one place where a prompt and its parameters meet the model's limits, and where ids and seeds of sequences are made.
Called by every front end; nothing passes to the engine in another way.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING

import msgspec

from halfbyte.engine.limits import Limits
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.errors import UserError
from halfbyte.pooling import Pooling
from halfbyte.types import Constraint, EngineInfo, EngineRequest, SamplingParams, Thinking

if TYPE_CHECKING:
    from halfbyte.engine.grammar.compile import GrammarCompiler

_SEED_MASK = 2**63 - 1


class RequestMaker:
    """Makes engine requests for one engine. `seed`: the engine-wide seed; None draws the seeds of requests from the system."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer, seed: int | None = None) -> None:
        self.limits = Limits.from_info(info)
        self._info = info
        self._tokenizer = tokenizer
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    def make(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter_id: int = 0,
        grammar: str | None = None,
        thinking: Thinking | None = None,
    ) -> list[EngineRequest]:
        """One request per sequence; UserError if the model cannot serve them.

        grammar: from `compile_grammar`; without it, `params.structured_outputs` is compiled here. thinking: how the model's
        thoughts look, where it has any. Sequence i has the seed `params.seed + i`, so that n = 4 with a seed equals four requests
        with seeds of their own.
        """
        self._require_generation()
        self._check_common(prompt_token_ids, priority, cache_salt)
        self.limits.check_sampling(params)
        max_tokens = self.limits.effective_max_tokens(params.max_tokens, len(prompt_token_ids))
        if params.min_tokens > max_tokens:
            raise UserError(f"min_tokens={params.min_tokens} is larger than the {max_tokens} tokens that fit", param="min_tokens")
        self._check_allowed(params)
        bad_words = self.limits.bad_words_token_ids(params, self._tokenizer)
        constraint = self._constraint(params, grammar, thinking)
        generation_id, arrival_s = uuid.uuid4().hex, time.monotonic()
        first_seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        return [
            EngineRequest(
                request_id=f"{generation_id}-{index}",
                prompt_token_ids=prompt_token_ids,
                sampling=params.clone(n=1, seed=(first_seed + index) & _SEED_MASK, structured_outputs=None),
                eos_token_ids=self._info.eos_token_ids,
                arrival_s=arrival_s,
                max_tokens=max_tokens,
                priority=priority,
                cache_salt=cache_salt,
                adapter_id=adapter_id,
                bad_words_token_ids=bad_words,
                constraint=constraint,
            )
            for index in range(params.n)
        ]

    def make_read(
        self,
        prompt_token_ids: list[int],
        token_ids: list[int],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter_id: int = 0,
    ) -> EngineRequest:
        """A request for the log probabilities of `token_ids` behind the prompt, which may fill the whole context."""
        self._require_generation()
        self._check_common(prompt_token_ids, priority, cache_salt)
        self.limits.check_ids(token_ids, "token_ids")
        sampling = SamplingParams(
            temperature=0.0, max_tokens=1, seed=0, ignore_eos=True, detokenize=False, logprobs=0, logprob_token_ids=token_ids
        )
        return EngineRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            eos_token_ids=self._info.eos_token_ids,
            arrival_s=time.monotonic(),
            max_tokens=0,
            priority=priority,
            cache_salt=cache_salt,
            adapter_id=adapter_id,
        )

    def make_pooling(
        self, prompt_token_ids: list[int], pooling: Pooling, *, priority: int = 0, cache_salt: str | None = None
    ) -> EngineRequest:
        """A request for vectors of the prompt, which may fill the whole context."""
        self._check_common(prompt_token_ids, priority, cache_salt)
        return EngineRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=prompt_token_ids,
            sampling=SamplingParams(temperature=0.0, max_tokens=1, seed=0, ignore_eos=True, detokenize=False),
            eos_token_ids=self._info.eos_token_ids,
            arrival_s=time.monotonic(),
            max_tokens=0,
            priority=priority,
            cache_salt=cache_salt,
            pooling=pooling,
        )

    def compile_grammar(self, make: Callable[[], str], param: str) -> str:
        """The Lark that `make` returns, if it is a grammar that engines take; UserError names `param`. May take a second."""
        grammar = make()
        self._compiler.check(grammar, param)
        return grammar

    def _require_generation(self) -> None:
        if (pooling := self._info.pooling) is not None:
            raise UserError(f"this model does not generate: it was started for {', '.join(pooling.tasks)} (--runner pooling)")

    def _check_common(self, prompt_token_ids: list[int], priority: int, cache_salt: str | None) -> None:
        if priority and self._info.scheduling_policy != "priority":
            raise UserError(f"priority={priority} needs an engine with --scheduling-policy priority", param="priority")
        self.limits.check_prompt(prompt_token_ids)
        if cache_salt is not None:
            self.limits.check_cache_salt(cache_salt)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        from halfbyte.engine.grammar.compile import GrammarCompiler

        return GrammarCompiler(self._tokenizer, self._info.vocab_size, self._info.eos_token_ids)

    def _constraint(self, params: SamplingParams, grammar: str | None, thinking: Thinking | None) -> Constraint | None:
        budget = params.thinking_token_budget
        if budget is not None:
            if thinking is None:
                raise UserError(
                    f"thinking_token_budget={budget} needs an engine that knows thoughts; start it with --reasoning-parser",
                    param="thinking_token_budget",
                )
            thinking = msgspec.structs.replace(thinking, budget=budget)
        if grammar is None and params.structured_outputs is not None:
            from halfbyte.engine.grammar.compile import GrammarOptions, lark_of

            grammar = self.compile_grammar(partial(lark_of, params.structured_outputs, GrammarOptions()), "structured_outputs")
        if grammar is None and (thinking is None or thinking.budget is None):
            return None
        return Constraint(grammar, thinking)

    def _check_allowed(self, params: SamplingParams) -> None:
        """Before min_tokens are out, the tokens that end a generation are barred: another allowed one must be left."""
        ending = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._info.eos_token_ids)}
        if params.min_tokens and params.allowed_token_ids is not None and ending.issuperset(params.allowed_token_ids):
            raise UserError(
                f"allowed_token_ids has only tokens that end the answer, which min_tokens={params.min_tokens} bars; allow more",
                param="allowed_token_ids",
            )
