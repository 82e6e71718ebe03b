"""The engine's heart: one step is schedule, execute, sample, update.

With asynchronous scheduling the next step is launched before the result of the one before it is taken, so that the device
need not wait for the scheduler. Knows the scheduler and a `Runner`; knows nothing of devices, text or sockets. Called by the
in-process client and by the engine process, from one thread. A request that fails, fails alone: a refusal at the door,
non-finite logits, and a step that raises, after which the batch is computed again one request at a time, so that only the
culprit is lost.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from halfbyte.engine.adapters import EngineAdapters
from halfbyte.engine.grammar.constraint import RequestConstraint, fill_masks
from halfbyte.engine.grammar.preparation import Preparation
from halfbyte.engine.scheduler import Scheduler
from halfbyte.types import EngineOutput, EngineRequest, PendingOutput, Runner, SchedulerOutput, StepOutput

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Step:
    """A step that the runner has begun. pending: None until it is asked to sample."""

    scheduled: SchedulerOutput
    pending: PendingOutput | None = None


class EngineCore:
    """Owns one scheduler and one runner. `add` and `abort` take effect at the next `step`.

    preparation: where constrained requests wait for their grammars; without one there may be none. adapters: those that requests
    may name, None: none. is_paused, sleep_level: while either is set, requests wait (`engine.controls`).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        preparation: Preparation | None = None,
        adapters: EngineAdapters | None = None,
        *,
        async_scheduling: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.adapters = adapters
        self._preparation = preparation
        self._num_ahead = 1 if async_scheduling else 0
        self._in_flight: deque[_Step] = deque()
        self._outputs: list[EngineOutput] = []
        self.is_paused = False
        self.sleep_level: int | None = None

    def add(self, requests: Iterable[EngineRequest]) -> None:
        for request in requests:
            if error := self._refuse_adapter(request):
                self._outputs.append(EngineOutput.failed(request.request_id, error))
            elif request.constraint is None:
                self._enqueue(request)
            else:
                assert self._preparation is not None, "this engine takes constraints"
                self._preparation.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        self._outputs += self.scheduler.abort(request_ids)
        if self._preparation is not None:
            self._outputs += self._preparation.abort(request_ids)

    def has_work(self) -> bool:
        return self._can_compute() or bool(self._preparation)

    def step(self) -> StepOutput:
        """Return what one batch made, with what was refused or aborted since the last step.

        With asynchronous scheduling the batch after it is launched first, if there is anything to schedule.
        """
        if self._preparation:
            self._take_prepared(self._preparation)
        while len(self._in_flight) <= self._num_ahead and self._launch():
            pass
        if self._in_flight:
            self._take()
        if self._in_flight:
            self._sample(self._in_flight[-1])
        outputs, self._outputs = self._outputs, []
        if self.adapters is not None:
            for output in outputs:
                if output.finish_reason is not None:
                    self.adapters.end(output.request_id)
        stats = self.scheduler.stats()
        stats.num_waiting += len(self._preparation or ())
        return StepOutput(outputs=outputs, stats=stats, timestamp_s=time.monotonic())

    def hold(self) -> None:
        """Schedule something, or nothing, as `is_paused` and `sleep_level` say."""
        self.scheduler.is_held = self.is_paused or self.sleep_level is not None

    def settle(self) -> None:
        """Take the results of all steps in flight; the next `step` returns them."""
        while self._in_flight:
            self._sample(self._in_flight[0])
            if self._in_flight:  # it did not raise
                self._take()

    def release_rows(self) -> None:
        """Have the runner release the rows of requests that ended or gave way, as the next step would. For a held engine."""
        assert self.scheduler.is_held
        self._launch()

    def reset_prefix_cache(self, *, preempt: bool) -> bool:
        """Forget all cached prefixes. preempt: running requests give up their blocks for it, and are computed again; otherwise
        nothing is forgotten, and the answer is False, while one holds any."""
        if preempt:
            self.settle()
            self.scheduler.preempt_all()
        return self.scheduler.manager.reset_prefix_cache()

    def close(self) -> None:
        if self._preparation is not None:
            self._preparation.close()
        self.runner.close()

    def _can_compute(self) -> bool:
        return bool(self._outputs or self._in_flight) or self.scheduler.has_work()

    def _refuse_adapter(self, request: EngineRequest) -> str | None:
        if not request.adapter_id:
            return None
        return "this engine has no adapters" if self.adapters is None else self.adapters.begin(request)

    def _enqueue(self, request: EngineRequest, constraint: RequestConstraint | None = None) -> None:
        if refusal := self.scheduler.add(request, constraint):
            self._outputs.append(refusal)

    def _take_prepared(self, preparation: Preparation) -> None:
        """Queue those whose grammar is compiled; with nothing else to do, wait a while for the first."""
        ready, failed = preparation.take(may_wait=not self._can_compute())
        self._outputs += failed
        for request, constraint in ready:
            self._enqueue(request, constraint)

    def _launch(self) -> bool:
        """Begin the next step. False when there is nothing to compute (then rows are released at most), or it raised."""
        step = _Step(self.scheduler.schedule())
        if step.scheduled.is_empty:
            return False
        if step.scheduled.num_scheduled_tokens:
            self._in_flight.append(step)
        with self._recovering(step):
            self.runner.execute(step.scheduled)
        if step in self._in_flight and (self._in_flight[0] is step or not step.scheduled.needs_grammar_mask):
            self._sample(step)
        return step in self._in_flight

    def _sample(self, step: _Step) -> None:
        """Have the runner sample the step if it did not yet.

        A grammar's mask follows from the values of all tokens before it: sampling waits for them, the forward pass does not.
        """
        if step.pending is None:
            with self._recovering(step):
                mask = fill_masks(self.scheduler.constraints()) if step.scheduled.needs_grammar_mask else None
                step.pending = self.runner.sample(mask)

    def _take(self) -> None:
        """Wait for the oldest step in flight, and update the scheduler with its result."""
        step = self._in_flight[0]
        assert step.pending is not None, "only a step that others are in flight before may wait to be sampled"
        with self._recovering(step):
            self._outputs += self.scheduler.update(step.pending.result())
            self._in_flight.popleft()

    @contextmanager
    def _recovering(self, step: _Step) -> Iterator[None]:
        """When the step raises: take what was launched before it, and have it computed again, with what was launched after it,
        one request at a time; a lone request is the culprit and fails.

        A step without requests cannot be blamed on any: then the device is broken, and the engine with it.
        """
        try:
            yield
        except Exception as error:
            num_requests = len(step.scheduled.num_scheduled_tokens)
            if not num_requests:
                raise
            log.error("step with %d requests failed: %s", num_requests, error, exc_info=error)
            while self._in_flight and self._in_flight[0] is not step:
                self._take()
            if self._in_flight:  # else one before it failed, too, and took it along
                self._in_flight.clear()
                self._outputs += self.scheduler.recover("the engine could not compute this request")
