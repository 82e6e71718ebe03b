"""Which tokens of which requests are computed in the next step, and what becomes of a step's tokens.

There is no prefill or decode phase: a request has known tokens and computed tokens, and each step spends one token budget,
on running requests first, then on waiting ones in the order of their rank. A prefix that several requests have in common is
computed by the first; the others wait for it. When blocks run out, the request that would be served last gives its blocks back
and is recomputed later. Knows counts, token ids and the KV cache manager; knows no device,
text or socket. Called by the engine core from one thread: `schedule`, then `update` with what the runner made of it.

A step may be scheduled while the one before it is in flight, its result unknown. Each of that step's tokens is counted then,
and scheduled by its place: its value is on the device. Only the end by a stop token comes as a surprise, one step late, and
what that step made of the request is dropped. Blocks may be given away while a step in flight still reads and writes them:
the device runs steps in their order, so that their next owner comes later. What is published has been heard of: the values
of its tokens, and that the model computed numbers.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from halfbyte.config import SchedulerConfig
from halfbyte.engine.grammar.constraint import RequestConstraint
from halfbyte.engine.request import Request, RequestStatus, WaitingQueue
from halfbyte.kvcache.manager import KVCacheManager
from halfbyte.kvcache.prefix_hash import extend_hashes
from halfbyte.types import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    GrownRow,
    ModelRunnerOutput,
    NewRow,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)

log = logging.getLogger(__name__)

# A prefix that another request is computing is waited for when it is at least so long. On an accelerator a shorter one costs less
# than a step's delay (reckoned, not measured); on a CPU, whose steps take as long as their tokens do, every block is worth it.
WORTH_WAITING_TOKENS = 256


@dataclass(slots=True)
class _Step:
    """A step while it is put together. `has_victims`: a request was preempted in it, so that none is admitted."""

    budget: int
    prompt_budget: int
    new_rows: list[NewRow] = field(default_factory=list)
    grown_rows: dict[str, GrownRow] = field(default_factory=dict)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_ids: list[str] = field(default_factory=list)
    has_victims: bool = False

    def spend(self, num_tokens: int, num_open_tokens: int) -> None:
        """Take a request's tokens off the budgets; one that has more than one token open is at its prompt."""
        self.budget -= num_tokens
        if num_open_tokens > 1:
            self.prompt_budget -= num_tokens


@dataclass(slots=True)
class _Share:
    """A request's part of a step in flight: how many of its tokens, up to which one, and whether that gives it another."""

    request: Request
    num_tokens: int
    end: int
    samples: bool


class Scheduler:
    """All requests of the engine. Each one that `add` takes ends with exactly one output that has a finish reason.

    is_held: nothing is scheduled; requests wait where they are, and may be aborted.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        *,
        max_model_len: int,
        worth_waiting_tokens: int = WORTH_WAITING_TOKENS,
    ) -> None:
        self.config = config
        self._worth_waiting_tokens = worth_waiting_tokens
        self.manager = manager
        self.max_model_len = max_model_len
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[list[_Share]] = deque()  # of steps that were scheduled and not updated, the oldest first
        self._isolated: dict[Request, None] = {}  # in the order in which they are computed again
        self._finished_ids: list[str] = []
        self._preempted_ids: list[str] = []
        self._num_added = 0
        self._stats = SchedulerStats()
        self.is_held = False
        self._max_computed = manager.max_request_tokens
        if not config.enable_chunked_prefill:
            self._max_computed = min(self._max_computed, config.max_num_batched_tokens)

    def add(self, source: EngineRequest, constraint: RequestConstraint | None = None) -> EngineOutput | None:
        """Queue a request; one that could never run is refused at once: then its only output is returned.

        constraint: what its tokens must keep to, made of `source.constraint`.
        """
        assert source.request_id not in self._requests, "request ids are unique"
        max_len = self._max_len(source)
        if error := self._refuse(source, max_len):
            return _failed(source.request_id, error)
        self._num_added += 1
        by_priority = self.config.policy == "priority"
        request = Request(
            source=source,
            rank=(source.priority, source.arrival_s, self._num_added) if by_priority else (0, 0.0, self._num_added),
            token_ids=list(source.prompt_token_ids),
            max_len=min(len(source.prompt_token_ids) + max(1, source.max_tokens), max_len),
            stop_token_ids=source.stop_token_ids,
            constraint=constraint,
        )
        if constraint is not None:
            constraint.start(request.max_len - request.num_prompt_tokens)
        self._extend_hashes(request)
        self._requests[request.request_id] = request
        self.waiting.push(request)
        return None

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """End requests in whatever state; ids that are unknown or already ended are ignored."""
        return [self._end(request, request.report([], finish_reason="abort")) for request in self._live(request_ids)]

    def fail(self, request_ids: Iterable[str], error: str) -> list[EngineOutput]:
        """End requests with an error that is safe to show to the client. Nothing of their KV stays matchable."""
        requests = self._live(request_ids)
        for request in requests:
            self.manager.forget(request)
        return [self._end(request, _failed(request.request_id, error)) for request in requests]

    def recover(self, error: str) -> list[EngineOutput]:
        """The oldest step in flight raised, and those after it, which build upon it, have no results either.

        Its request, if it had only one, fails with `error`. All others are computed again from their start, each alone in its
        steps until it has a token. The runner is told to release their rows, which it may not have (the step may have failed
        before they entered).
        """
        suspects = [share.request for share in self._in_flight[0]]
        requests = dict.fromkeys(share.request for step in self._in_flight for share in step)
        self._in_flight.clear()
        alone = suspects[0] if len(suspects) == 1 else None
        outputs = self.fail([alone.request_id], error) if alone and alone.status is not RequestStatus.FINISHED else []
        for request in requests:
            if request.status is not RequestStatus.FINISHED:
                self._isolate(request)
        return outputs

    def preempt_all(self) -> None:
        """Take the blocks of all running requests; they are computed again. Nothing may be in flight."""
        assert not self._in_flight, "a request resumes when its last token is known"
        for request in tuple(self.running):
            self._requeue(request)
            request.num_preemptions += 1
            self._stats.num_preemptions += 1
            self._preempted_ids.append(request.request_id)

    def has_work(self) -> bool:
        return bool(self._requests) and not self.is_held

    def stats(self) -> SchedulerStats:
        """Gauges as of now, counters since the last call."""
        stats, self._stats = self._stats, SchedulerStats()
        stats.num_running, stats.num_waiting = len(self.running), len(self.waiting)
        stats.kv_cache_usage = self.manager.usage
        return stats

    def schedule(self) -> SchedulerOutput:
        """Put the next step together. Costs O(running requests), whatever their lengths."""
        step = _Step(self.config.max_num_batched_tokens, self._prompt_budget(), preempted_ids=self._preempted_ids)
        if self.is_held:
            pass
        elif self._isolated:
            self._schedule_alone(step, next(iter(self._isolated)))
        else:
            self._schedule_running(step)
            if not step.has_victims:
                self._schedule_waiting(step)
        output = SchedulerOutput(
            new_rows=step.new_rows,
            grown_rows=list(step.grown_rows.values()),
            num_scheduled_tokens=step.num_scheduled_tokens,
            finished_request_ids=self._finished_ids,
            preempted_request_ids=step.preempted_ids,
        )
        self._finished_ids, self._preempted_ids = [], []
        if step.num_scheduled_tokens:
            shares = [self._launch(*share) for share in step.num_scheduled_tokens.items()]
            self._in_flight.append(shares)
            output.needs_grammar_mask = any(
                share.samples and share.request.constraint is not None and share.request.constraint.may_need_mask
                for share in shares
            )
        return output

    def constraints(self) -> list[RequestConstraint | None]:
        """What bounds the tokens that the oldest step in flight samples, in its order: now that those before it are known."""
        return [
            share.request.constraint if share.samples and share.request.status is not RequestStatus.FINISHED else None
            for share in self._in_flight[0]
        ]

    def update(self, output: ModelRunnerOutput) -> list[EngineOutput]:
        """Take the tokens of the oldest step in flight: append them, end what is done, publish full blocks.

        One output per request with news. A step without tokens has no result.
        """
        shares, outputs = self._in_flight[0], []
        asked = [share.request.request_id for share in shares]
        assert output.request_ids == asked, "the runner answers for the batch, in its order"
        for share, tokens, logprobs in zip(shares, output.token_ids, output.logprobs, strict=True):
            request = share.request
            if request.status is RequestStatus.FINISHED:
                continue  # it ended while this was computed
            self._stats.num_scheduled_tokens += share.num_tokens
            request.num_in_flight_tokens -= share.samples
            if request.request_id in output.bad_rows:
                outputs += self.fail([request.request_id], "the model computed non-finite numbers for this request")
                continue
            if (constraint := request.constraint) is not None and not all(map(constraint.accept, tokens)):
                outputs += self.fail([request.request_id], str(constraint.error))
                continue
            is_running = request.status is RequestStatus.RUNNING  # else it was preempted: its blocks are not its own any more
            if not request.num_output_tokens and (is_running or share.samples):
                request.prompt_logprobs += output.prompt_logprobs.get(request.request_id, ())
                request.pooled += output.pooled.get(request.request_id, b"")
            if share.samples and request.source.pooling is not None:
                news: EngineOutput | None = request.report([], finish_reason="stop", pooled=request.pooled)
            else:
                news = self._append(request, tokens, logprobs)
            outputs += [news] if news else []
            self._extend_hashes(request)
            if is_running:
                self.manager.publish(request, share.end)
            if news and news.finish_reason:
                self._end(request, news)
        self._in_flight.popleft()
        return outputs

    def _live(self, request_ids: Iterable[str]) -> list[Request]:
        return [self._requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._requests]

    def _max_len(self, source: EngineRequest) -> int:
        """How many tokens the request may come to. Its last is delivered, never computed: hence one more than can be computed;
        what a read says takes no place in the context."""
        return min(self.max_model_len + source.is_read, self._max_computed + 1)

    def _refuse(self, source: EngineRequest, max_len: int) -> str | None:
        """Why its prompt can never run, with the numbers; None when it can."""
        num_prompt_tokens = len(source.prompt_token_ids)
        if num_prompt_tokens < 1:
            return "the prompt is empty; at least one token is needed"
        if num_prompt_tokens < max_len:
            return None
        if num_prompt_tokens >= self.max_model_len + source.is_read:
            needs = "it" if source.is_read else "at least one output token"
            return (
                f"the prompt has {num_prompt_tokens} tokens, and {needs} must fit into"
                f" max_model_len={self.max_model_len}; shorten the prompt"
            )
        if not self.manager.can_ever_fit(num_prompt_tokens):
            return (
                f"the prompt of {num_prompt_tokens} tokens needs {self.manager.blocks_needed(num_prompt_tokens)} KV blocks,"
                f" the cache has {self.manager.pool.num_blocks - 1} (at most {self.manager.max_request_tokens} tokens per"
                f" request); shorten the prompt or raise --kv-cache-memory-bytes"
            )
        return (
            f"the prompt has {num_prompt_tokens} tokens, and without chunked prefill one step must hold it:"
            f" --max-num-batched-tokens is {self.config.max_num_batched_tokens}"
        )

    def _prompt_budget(self) -> int:
        """How many prompt tokens the step may take: fewer when a request waits for its next token, where that is configured."""
        limit = self.config.max_num_mixed_tokens
        if limit and any(request.num_open_tokens == 1 for request in self.running):
            return limit
        return self.config.max_num_batched_tokens

    def _schedule_running(self, step: _Step) -> None:
        for request in tuple(self.running):
            if step.budget == 0:
                break
            if request.status is RequestStatus.RUNNING:  # not preempted by one before it
                self._grow(step, request)

    def _schedule_waiting(self, step: _Step) -> None:
        """Admit in order of rank; the first that does not fit holds the others back, or it would never fit. Those whose prefix
        is being computed wait for it, and let others pass."""
        passed: list[Request] = []
        while step.budget and self.waiting and len(self.running) + len(passed) < self.config.max_num_seqs:
            request = self.waiting.first()
            if not self.manager.may_fit(request):
                break
            if self._awaits_prefix(request):
                self.waiting.remove(request)
                passed.append(request)
            elif not self._admit(step, request):
                break
        for request in passed:
            self.waiting.push(request)

    def _awaits_prefix(self, request: Request) -> bool:
        """Whether a running request is computing enough of this one's prefix."""
        if request.awaited_unit is None or not self.manager.is_awaitable(request.awaited_unit):
            awaited = self.manager.awaited_prefix(request)
            is_worth_it = awaited is not None and awaited[0] >= self._worth_waiting_tokens
            request.awaited_unit = awaited[1] if awaited is not None and is_worth_it else None
        return request.awaited_unit is not None

    def _schedule_alone(self, step: _Step, request: Request) -> None:
        """A step for one suspect; others give way when it needs their blocks."""
        if request.status is RequestStatus.RUNNING:
            self._grow(step, request)
            return
        while not self._admit(step, request):
            self._preempt(step, max(self.running, key=_rank))

    def _num_tokens(self, step: _Step, num_open_tokens: int) -> int:
        """How many of a request's tokens that are not computed yet go into this step."""
        threshold = self.config.long_prefill_token_threshold
        if threshold and self.config.enable_chunked_prefill and len(self._requests) > 1:
            num_open_tokens = min(num_open_tokens, threshold)
        if num_open_tokens > 1:
            num_open_tokens = min(num_open_tokens, step.prompt_budget)
        return min(num_open_tokens, step.budget)

    def _grow(self, step: _Step, request: Request) -> None:
        """Schedule a running request, at the cost of those of the highest rank, which may be itself.

        None pays while one that needs no more steps is about to give its blocks back.
        """
        num_open_tokens = request.num_open_tokens
        num_tokens = self._num_tokens(step, num_open_tokens)
        if num_tokens == 0:
            return
        while (blocks := self.manager.allocate(request, num_tokens)) is None:
            if any(other.num_open_tokens == 0 for other in self.running):
                return
            victim = max(self.running, key=_rank)
            self._preempt(step, victim)
            if victim is request:
                return
        step.spend(num_tokens, num_open_tokens)
        step.num_scheduled_tokens[request.request_id] = num_tokens
        step.grown_rows[request.request_id] = GrownRow(request.request_id, request.num_computed_tokens, blocks)

    def _admit(self, step: _Step, request: Request) -> bool:
        """Schedule a waiting request. False, and nothing changed, when all that is known of it does not fit now."""
        match = self.manager.match_prefix(request)
        num_open_tokens = len(request.token_ids) - match.num_tokens
        if not self.config.enable_chunked_prefill and num_open_tokens > step.budget:
            return False
        num_tokens = self._num_tokens(step, num_open_tokens)
        if num_tokens == 0:
            return False
        blocks = self.manager.allocate(request, num_tokens, match)
        if blocks is None:
            return False
        assert not request.num_in_flight_tokens, "what was in flight when it was preempted has arrived"
        self.waiting.remove(request)
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = match.num_tokens
        if request.scheduled_s is None:
            request.scheduled_s = time.monotonic()
            request.num_cached_tokens = match.num_tokens
            if self.manager.enable_prefix_caching and not request.skip_prefix_cache:
                self._stats.prefix_cache_queries_tokens += len(request.token_ids)
                self._stats.prefix_cache_hits_tokens += match.num_tokens
        step.spend(num_tokens, num_open_tokens)
        step.num_scheduled_tokens[request.request_id] = num_tokens
        step.new_rows.append(
            NewRow(
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=match.num_tokens,
                block_ids=blocks,
                sampling=request.source.sampling,
                stop_token_ids=request.stop_token_ids,
                bad_words_token_ids=request.source.bad_words_token_ids,
                adapter_id=request.source.adapter_id,
                pooling=request.source.pooling,
            )
        )
        return True

    def _preempt(self, step: _Step, victim: Request) -> None:
        """Take a running request out of the step and out of the cache; its full blocks stay matchable while they last."""
        self._requeue(victim)
        victim.num_preemptions += 1
        self._stats.num_preemptions += 1
        step.budget += step.num_scheduled_tokens.pop(victim.request_id, 0)
        step.grown_rows.pop(victim.request_id, None)
        step.preempted_ids.append(victim.request_id)
        step.has_victims = True

    def _requeue(self, request: Request) -> None:
        self.manager.free(request)
        self.running.remove(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        if not request.num_in_flight_tokens:
            request.drop_undelivered()
        self.waiting.push(request)

    def _isolate(self, request: Request) -> None:
        """Begin again, in steps of its own until there is a token."""
        request.num_in_flight_tokens = 0
        if request.status is RequestStatus.RUNNING:
            self._requeue(request)
            self._preempted_ids.append(request.request_id)
        request.drop_undelivered()
        self._isolated[request] = None

    def _launch(self, request_id: str, num_tokens: int) -> _Share:
        """Count a request's tokens of the step that is scheduled now as computed, and the token that it samples as in flight."""
        request = self._requests[request_id]
        request.num_computed_tokens += num_tokens
        samples = request.num_computed_tokens == request.num_tokens
        request.num_in_flight_tokens += samples
        return _Share(request, num_tokens, request.num_computed_tokens, samples)

    def _append(self, request: Request, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> EngineOutput | None:
        """Append sampled tokens up to the first that ends the request; None when there were none."""
        if not tokens:
            return None
        is_first = not request.num_output_tokens
        finish_reason, stop_token_id, count = None, None, 0
        while count < len(tokens) and finish_reason is None:
            request.token_ids.append(tokens[count])
            finish_reason, stop_token_id = self._stop(request)
            count += 1
        news = request.report(tokens[:count], finish_reason=finish_reason)
        news.stop_token_id = stop_token_id
        if finish_reason == "stop":
            last = request.token_ids[-1]
            news.ends_in_text = last not in request.stop_token_ids and last not in request.source.eos_token_ids
        news.logprobs = None if logprobs is None else logprobs[:count]
        if is_first and request.source.sampling.prompt_logprobs is not None:
            news.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
        self._isolated.pop(request, None)
        return news

    def _stop(self, request: Request) -> tuple[FinishReason | None, int | None]:
        """Whether the last token ends the request: (finish reason, the user's stop token). EOS is nobody's stop token."""
        source, token = request.source, request.token_ids[-1]
        if token in request.stop_token_ids and request.num_output_tokens >= source.sampling.min_tokens:
            is_eos = token in source.eos_token_ids and not source.sampling.ignore_eos
            return "stop", None if is_eos else token
        if request.constraint is not None and request.constraint.is_complete:
            return "stop", None
        if len(request.token_ids) >= request.max_len:
            return "length", None
        return None, None

    def _extend_hashes(self, request: Request) -> None:
        manager = self.manager
        if manager.enable_prefix_caching:
            root = request.cache_salt, manager.content, request.source.adapter_id
            extend_hashes(request.block_hashes, request.token_ids, manager.block_size, *root)

    def _end(self, request: Request, last: EngineOutput) -> EngineOutput:
        """Release all that a request holds; its row is released by the runner in the next step."""
        self.manager.free(request)
        self._isolated.pop(request, None)
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._finished_ids.append(request.request_id)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]
        return last


def _rank(request: Request) -> tuple[int, float, int]:
    return request.rank


def _failed(request_id: str, error: str) -> EngineOutput:
    log.warning("request %s failed: %s", request_id, error)
    return EngineOutput.failed(request_id, error)
