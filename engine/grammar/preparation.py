"""Where a constrained request waits until its grammar is compiled, on a thread of its own; others go on meanwhile.

Knows the compiler and the order of arrival; knows no scheduler and no sockets. The engine core adds requests, and takes those
that are ready before each step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from halfbyte.engine.grammar.closing import Closing, Vocabulary, reach_of
from halfbyte.engine.grammar.constraint import RequestConstraint
from halfbyte.engine.grammar.thoughts import EndOfThought, mark_text, overlong_tokens
from halfbyte.types import EngineOutput, EngineRequest, Thinking

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from halfbyte.engine.grammar.compile import GrammarCompiler
    from halfbyte.engine.tokenizer import Tokenizer

WAIT_S = 0.05
_MAX_KNOWN_GRAMMARS = 64

log = logging.getLogger(__name__)


class Preparation:
    """Requests on their way to the scheduler. load_tokenizer is called at the first grammar, in the thread."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size, self._eos_token_ids = vocab_size, eos_token_ids
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._waiting: dict[str, tuple[EngineRequest, Future[RequestConstraint]]] = {}
        self._reach_of_grammar = lru_cache(_MAX_KNOWN_GRAMMARS)(self._measure_reach)
        self._overlong_tokens = lru_cache(1)(lambda mark: overlong_tokens(mark, self._tokenizer.token_bytes, vocab_size))

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, source: EngineRequest) -> None:
        self._waiting[source.request_id] = source, self._thread.submit(self._make, source)

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Let these go; ids that do not wait here are ignored."""
        gone = []
        for request_id in request_ids:
            if (waiting := self._waiting.pop(request_id, None)) is not None:
                waiting[1].cancel()
                gone.append(EngineOutput(request_id=request_id, new_token_ids=[], finish_reason="abort"))
        return gone

    def take(self, *, may_wait: bool) -> tuple[list[tuple[EngineRequest, RequestConstraint]], list[EngineOutput]]:
        """Those that are ready, in the order of their arrival, and the last outputs of those whose grammar failed.

        may_wait: wait for the first one, WAIT_S at most.
        """
        ready: list[tuple[EngineRequest, RequestConstraint]] = []
        failed: list[EngineOutput] = []
        if may_wait and self._waiting:
            wait([next(iter(self._waiting.values()))[1]], WAIT_S)
        while self._waiting:
            request_id, (source, future) = next(iter(self._waiting.items()))
            if not future.done():
                break
            del self._waiting[request_id]
            if (error := future.exception()) is None:
                ready.append((source, future.result()))
            else:
                log.error("request %s failed: its grammar could not be compiled", request_id, exc_info=error)
                failed.append(EngineOutput.failed(request_id, "the engine could not compile the grammar of this request"))
        return ready, failed

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make(self, source: EngineRequest) -> RequestConstraint:
        asked = source.constraint
        assert asked is not None, "only constrained requests wait here"
        end = None if asked.thinking is None else self._end_of_thought(asked.thinking)
        if asked.grammar is None:
            return RequestConstraint(asked, self._vocab_size, source.eos_token_ids, end=end)
        matcher = self._matcher(asked.grammar)
        closing = Closing(self._vocabulary, self._reach_of_grammar(asked.grammar))
        return RequestConstraint(asked, self._vocab_size, source.eos_token_ids, matcher, closing, end)

    def _end_of_thought(self, thinking: Thinking) -> EndOfThought:
        if len(thinking.end_ids) == 1:
            return EndOfThought(thinking.end_ids)
        token_bytes = self._tokenizer.token_bytes
        overlong = self._overlong_tokens(mark_text(thinking.end_ids, token_bytes))
        return EndOfThought(thinking.end_ids, token_bytes, overlong)

    def _matcher(self, grammar: str) -> LLMatcher:
        matcher = self._compiler.matcher(grammar)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def _measure_reach(self, grammar: str) -> int:
        return reach_of(self._vocabulary, self._matcher(grammar))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._load_tokenizer()

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        from halfbyte.engine.grammar.compile import GrammarCompiler

        return GrammarCompiler(self._tokenizer, self._vocab_size, self._eos_token_ids)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer, self._compiler)
