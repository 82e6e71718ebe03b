"""The engine's process with a device that only takes its time: what is left is all that Halfbyte itself does in a step.

Started by `benchmarks/api_overhead.py` in place of `halfbyte.engine.process`; the first argument is the seconds of a step, the
second a file for what was measured. Scheduler, cache manager, sockets and process are the real ones, of the model that is served.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from halfbyte.engine import process  # noqa: E402
from halfbyte.engine.build import build_engine  # noqa: E402
from halfbyte.types import ModelRunnerOutput, SchedulerOutput  # noqa: E402

# Tokens of ordinary words.
FIRST_TOKEN, NUM_TOKENS = 1000, 500


class StubRunner:
    """A device whose steps take `step_s`, whatever is in them, one after the other. busy: begin, end and rows of each."""

    def __init__(self, step_s: float, result: Path) -> None:
        self._step_s = step_s
        self._result = result
        self._num_tokens: dict[str, int] = {}
        self._num_computed: dict[str, int] = {}
        self._step: SchedulerOutput | None = None
        self.busy: list[tuple[float, float, int]] = []

    def execute(self, scheduled: SchedulerOutput) -> None:
        for request_id in (*scheduled.finished_request_ids, *scheduled.preempted_request_ids):
            self._num_tokens.pop(request_id, None)
        for new in scheduled.new_rows:
            self._num_tokens[new.request_id], self._num_computed[new.request_id] = len(new.token_ids), new.num_computed_tokens
        for grown in scheduled.grown_rows:
            self._num_computed[grown.request_id] = grown.num_computed_tokens
        self._step = scheduled
        if scheduled.num_scheduled_tokens:
            free_s = self.busy[-1][1] if self.busy else 0.0
            begin_s = max(time.monotonic(), free_s)
            self.busy.append((begin_s, begin_s + self._step_s, len(scheduled.num_scheduled_tokens)))

    def sample(self, grammar_mask: Any = None) -> StubOutput:
        assert self._step is not None
        ids = list(self._step.num_scheduled_tokens)
        tokens = [self._sampled(request_id) for request_id in ids]
        return StubOutput(self.busy[-1][1], ModelRunnerOutput(ids, tokens, [None] * len(ids)))

    def close(self) -> None:
        self._result.write_text(json.dumps(self.busy))

    def _sampled(self, request_id: str) -> list[int]:
        assert self._step is not None
        end = self._num_computed[request_id] + self._step.num_scheduled_tokens[request_id]
        if end < self._num_tokens[request_id]:
            return []
        self._num_tokens[request_id] += 1
        return [FIRST_TOKEN + end % NUM_TOKENS]


@dataclass
class StubOutput:
    """What a step made, there when the device is done with it."""

    done_s: float
    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        time.sleep(max(0.0, self.done_s - time.monotonic()))
        return self.output


def build_stub(*arguments: Any, **options: Any) -> Any:
    core, info = build_engine(*arguments, **options)
    core.runner.close()
    core.runner = StubRunner(float(sys.argv[1]), Path(sys.argv[2]))
    return core, info


if __name__ == "__main__":
    process.build_engine = build_stub
    code = process.main()
    os._exit(code)  # as the real one: a thread still reads standard input
