"""The API process's half of the engine: requests in, text deltas out, on one asyncio loop.

Owns the client's receiving thread, the output processor, admission and the request metrics. Knows no HTTP. Every check is
made before a stream exists, so that a wrong request is an error and never half an answer.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from halfbyte.adapters import LoadedAdapter
from halfbyte.engine.client import EngineClient
from halfbyte.engine.generation import Generation
from halfbyte.engine.messages import Answer, EngineState, Order
from halfbyte.engine.metrics import EngineMetrics
from halfbyte.engine.output_processor import OutputProcessor
from halfbyte.engine.requests import RequestMaker
from halfbyte.engine.stats_log import StatsLog
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.engine.totals import Totals
from halfbyte.errors import EngineDeadError, OverloadedError, UserError
from halfbyte.pooling import Pooling
from halfbyte.types import EngineInfo, EngineRequest, SamplingParams, StepOutput, Thinking

LONG_TEXT_CHARS = 20_000
GRAMMAR_LIMIT_S = 5.0
_RECEIVE_S = 0.5

log = logging.getLogger(__name__)


class AsyncEngine:
    """One engine as the front end sees it. Make it inside a running loop; `close` when done.

    dead: why the engine is gone, None while it lives; `died` is set with it. state: whether it computes. default_sampling:
    SamplingParams fields that the model's generation_config sets.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        *,
        default_sampling: dict[str, Any] | None = None,
        served_name: str = "",
        seed: int | None = None,
        log_stats: bool = False,
    ) -> None:
        self.info: EngineInfo = client.info
        self._maker = RequestMaker(client.info, tokenizer, seed)
        self.limits = self._maker.limits
        self.tokenizer = tokenizer
        self.default_sampling = default_sampling or {}
        self.metrics = EngineMetrics(client.info, served_name or client.info.model, self._adapters_in_use)
        self.totals = Totals()
        self.dead: str | None = None
        self.died = asyncio.Event()
        self.state = EngineState()
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._stats_log = StatsLog(self._loop.call_later) if log_stats else None
        self._processor = OutputProcessor(tokenizer)
        self._generation_of: dict[str, Generation] = {}
        self._generations: dict[Generation, None] = {}
        self._short_texts = ThreadPoolExecutor(1, thread_name_prefix="encode-short")
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="encode-long")
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._grammar_turn = asyncio.Lock()
        self._closing = False
        self._receiver = threading.Thread(target=self._receive, name="engine-outputs", daemon=True)
        self._receiver.start()

    async def encode(self, text: str, add_special_tokens: bool = True, *, seams: bool = False) -> list[int]:
        """Token ids of `text`, off the event loop; seams: as `Tokenizer.encode` has it.

        Long texts have a thread of their own, so that short ones pass them. UserError when the text is longer than any that
        could fit into the context.
        """
        self.limits.check_text(text, self.tokenizer.max_chars_per_token)
        pool = self._long_texts if len(text) > LONG_TEXT_CHARS else self._short_texts
        return await self._loop.run_in_executor(pool, partial(self.tokenizer.encode, text, add_special_tokens, seams=seams))

    async def compile_grammar(self, make: Callable[[], str], param: str) -> str:
        """The Lark that `make` returns, checked, as a grammar for `generate`: off the event loop, one at a time.

        UserError names `param` when it cannot be a grammar, or takes longer than GRAMMAR_LIMIT_S: its thread is left to itself.
        """
        async with self._grammar_turn:
            work = self._loop.run_in_executor(self._grammars, self._maker.compile_grammar, make, param)
            try:
                return await asyncio.wait_for(work, GRAMMAR_LIMIT_S)
            except TimeoutError:
                self._grammars.shutdown(wait=False)
                self._grammars = ThreadPoolExecutor(1, thread_name_prefix="grammars")
                raise UserError(f"{param} takes longer than {GRAMMAR_LIMIT_S:g} s to compile; simplify it", param=param) from None

    def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: LoadedAdapter | None = None,
        grammar: str | None = None,
        thinking: Thinking | None = None,
        marks: Mapping[int, str] | None = None,
        is_admitted: bool = False,
    ) -> Generation:
        """Start a generation of `params.n` sequences. Raises UserError, OverloadedError or EngineDeadError at once, or never.

        grammar: from `compile_grammar`. thinking: how the model's thoughts look. marks: as `OutputProcessor.add` has it.
        is_admitted: whoever makes many requests for one call admits them together.
        """
        self._require_alive()
        requests = self._maker.make(
            prompt_token_ids,
            params,
            priority=priority,
            cache_salt=cache_salt,
            adapter_id=_id_of(adapter),
            grammar=grammar,
            thinking=thinking,
        )
        if not is_admitted:
            self.admit(params.n, len(prompt_token_ids))
        return self._start(requests, params, marks, adapter)

    def read(
        self,
        prompt_token_ids: list[int],
        token_ids: list[int],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: LoadedAdapter | None = None,
    ) -> Generation:
        """Start to read the log probabilities of `token_ids` behind the prompt, which may fill the whole context: one delta, with
        them as the alternatives of the most likely token. Errors as `generate`; whoever makes many reads for one call admits
        them together."""
        self._require_alive()
        of_call: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "adapter_id": _id_of(adapter)}
        request = self._maker.make_read(prompt_token_ids, token_ids, **of_call)
        return self._start([request], request.sampling, None, adapter)

    def pool(
        self, prompt_token_ids: list[int], pooling: Pooling, *, priority: int = 0, cache_salt: str | None = None
    ) -> Generation:
        """Start to compute vectors of the prompt: one delta, with them. Errors and admission as `read`."""
        self._require_alive()
        request = self._maker.make_pooling(prompt_token_ids, pooling, priority=priority, cache_salt=cache_salt)
        return self._start([request], request.sampling, None, adapter=None)

    async def control(self, action: Order[Answer]) -> Answer:
        """Have the engine carry out an action, between two steps. Raises the HalfbyteError that it raised there; EngineDeadError
        when the engine is gone, or ends before it has answered. Whoever stops waiting does not stop the action."""
        self._require_alive()
        answered = asyncio.wrap_future(self._client.control(action))
        answered.add_done_callback(self._note)
        died = asyncio.ensure_future(self.died.wait())
        try:
            await asyncio.wait((answered, died), return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                self._require_alive()
            return answered.result()
        finally:
            died.cancel()

    async def close(self) -> None:
        """Stop the engine. Open generations end with EngineDeadError."""
        self._closing = True
        await asyncio.to_thread(self._receiver.join)
        self._die("the server is shutting down")
        await asyncio.to_thread(self._client.close)
        self._short_texts.shutdown(wait=False)
        self._long_texts.shutdown(wait=False)
        self._grammars.shutdown(wait=False)

    def abort_all(self, error: Exception) -> None:
        """End every open generation with `error`: what is done that may not wait for them."""
        self._client.abort(list(self._generation_of))
        self._fail_all(error)

    def _note(self, answered: asyncio.Future[Any]) -> None:
        """What the engine said, whether or not somebody still waits for it."""
        if not answered.cancelled() and answered.exception() is None and isinstance(state := answered.result(), EngineState):
            self.state = state
            self.metrics.record_sleep(state.sleep_level)

    def _adapters_in_use(self) -> tuple[set[str], set[str]]:
        """Names of the adapters of requests that run, and of those that wait."""
        names: tuple[set[str], set[str]] = set(), set()
        for generation in self._generations:
            if generation.adapter is not None:
                names[0 if generation.started else 1].add(generation.adapter.name)
        return names

    def _require_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead)

    def _start(
        self,
        requests: list[EngineRequest],
        params: SamplingParams,
        marks: Mapping[int, str] | None,
        adapter: LoadedAdapter | None,
    ) -> Generation:
        """Hand over the sequences of one prompt."""
        first = requests[0]
        metrics = self.metrics.request_added(
            len(first.prompt_token_ids), first.arrival_s, num_sequences=len(requests), max_tokens=max(1, first.max_tokens)
        )
        generation = Generation([r.request_id for r in requests], metrics, self._abandon, adapter)
        for index, request in enumerate(requests):
            self._processor.add(request.request_id, index, first.prompt_token_ids, params, marks=marks)
            self._generation_of[request.request_id] = generation
        self._generations[generation] = None
        self._client.add(requests)
        return generation

    def admit(self, num_sequences: int, num_prompt_tokens: int) -> None:
        """Bound the queue: sequences (n counts as n) and prompt tokens that are open beyond what can run. OverloadedError when it
        is full."""
        limit = self.info.max_num_queued_reqs
        would_wait = len(self._generation_of) + num_sequences - self.info.max_num_seqs
        if limit is not None and would_wait > limit:
            self.metrics.admission_rejected("max_num_queued_reqs")
            raise OverloadedError(f"the queue is full: {would_wait} requests would wait, limit {limit} (--max-num-queued-reqs)")
        token_limit = self.info.max_num_queued_tokens
        if token_limit is None:
            return
        waiting_tokens = sum(g.metrics.num_prompt_tokens for g in self._generations if not g.started)
        if waiting_tokens + num_prompt_tokens > token_limit:
            self.metrics.admission_rejected("max_num_queued_tokens")
            raise OverloadedError(
                f"the queue is full: {waiting_tokens} prompt tokens wait, limit {token_limit} (--max-num-queued-tokens)"
            )

    def _receive(self) -> None:
        """Thread: hand each step's output to the loop until the engine dies or closes."""
        try:
            while not self._closing:
                if (output := self._client.receive(_RECEIVE_S)) is not None:
                    self._loop.call_soon_threadsafe(self._dispatch, output)
        except Exception as error:
            if not isinstance(error, EngineDeadError):
                log.exception("the engine failed")
            if not self._closing:
                reason = str(error) if isinstance(error, EngineDeadError) else "the engine failed"
                self._loop.call_soon_threadsafe(self._die, reason)

    def _dispatch(self, step: StepOutput) -> None:
        self.metrics.record_step(step)
        self.totals.add(step)
        if self._stats_log is not None:
            self._stats_log.record(step)
        stopped: list[str] = []
        for output in step.outputs:
            generation = self._generation_of.get(output.request_id)
            if generation is None:
                continue
            delta, needs_abort = self._processor.process(output)
            if needs_abort:
                stopped.append(output.request_id)
            if delta is None:
                continue
            generation.metrics.output(delta.index, step.timestamp_s, output, len(delta.token_ids))
            if delta.finish_reason is not None:
                generation.metrics.finished(delta.index, step.timestamp_s, delta.finish_reason)
                del self._generation_of[output.request_id]
                self._processor.remove(output.request_id)
            generation.deliver(delta)
            if generation.finished:
                self._generations.pop(generation, None)
        if stopped:
            self._client.abort(stopped)

    def _die(self, reason: str) -> None:
        if self.dead is None:
            self.dead = reason
            if not self._closing:
                log.error("engine dead: %s; %d open sequences end with an error", reason, len(self._generation_of))
        self._fail_all(EngineDeadError(self.dead))
        self.died.set()

    def _fail_all(self, error: Exception) -> None:
        for generation in list(self._generations):
            self._forget(generation)
            generation.metrics.abandoned(time.monotonic())
            generation.fail(error)

    def _forget(self, generation: Generation) -> list[str]:
        """Drop a generation's sequences; the ids of those that were still open."""
        self._generations.pop(generation, None)
        open_ids = [i for i in generation.request_ids if self._generation_of.pop(i, None) is not None]
        for request_id in open_ids:
            self._processor.remove(request_id)
        return open_ids

    def _abandon(self, generation: Generation) -> None:
        if open_ids := self._forget(generation):
            self._client.abort(open_ids)
            generation.metrics.abandoned(time.monotonic())


def _id_of(adapter: LoadedAdapter | None) -> int:
    return 0 if adapter is None else adapter.adapter_id
