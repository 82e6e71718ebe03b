"""The engine's heart: one step is schedule, execute, sample, update.

Knows the scheduler and a `Runner`; knows nothing of devices, text or sockets. Called by the in-process client and by the
engine process, from one thread. A request that fails, fails alone: a refusal at the door, non-finite logits, and a step
that raises, after which the batch is computed again one request at a time, so that only the culprit is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from halfbyte.engine.scheduler import Scheduler
from halfbyte.types import EngineOutput, EngineRequest, ModelRunnerOutput, Runner, SchedulerOutput, StepOutput

log = logging.getLogger(__name__)


class EngineCore:
    """Owns one scheduler and one runner. `add` and `abort` take effect at the next `step`."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._early_outputs: list[EngineOutput] = []

    def add(self, requests: Iterable[EngineRequest]) -> None:
        for request in requests:
            if refusal := self.scheduler.add(request):
                self._early_outputs.append(refusal)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._early_outputs += self.scheduler.abort(request_ids)

    def has_work(self) -> bool:
        return bool(self._early_outputs) or self.scheduler.has_work()

    def step(self) -> StepOutput:
        """Compute one batch and return what it did, with what was refused or aborted since the last step."""
        scheduled = self.scheduler.schedule()
        outputs, self._early_outputs = self._early_outputs, []
        try:
            outputs += self.scheduler.update(scheduled, self._run(scheduled))
        except Exception as error:
            outputs += self._isolate(scheduled, error)
        return StepOutput(outputs=outputs, stats=self.scheduler.stats(), timestamp_s=time.monotonic())

    def close(self) -> None:
        self.runner.close()

    def _run(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        self.runner.execute(scheduled)
        return self.runner.sample()

    def _isolate(self, scheduled: SchedulerOutput, error: Exception) -> list[EngineOutput]:
        """A step raised. A lone request is the culprit and fails; a batch is recomputed one request at a time.

        A step without requests cannot be blamed on any: then the device is broken, and the engine with it.
        """
        suspects = list(scheduled.num_scheduled_tokens)
        if not suspects:
            raise error
        log.error("step with %d requests failed: %s", len(suspects), error, exc_info=error)
        if len(suspects) == 1:
            return self.scheduler.fail(suspects, "the engine could not compute this request")
        self.scheduler.isolate(suspects)
        return []
