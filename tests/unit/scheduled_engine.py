"""A scheduler with a runner that needs no model (tests/conftest.py), step by step."""

from __future__ import annotations

from typing import Any

from halfbyte.config import SchedulerConfig
from halfbyte.engine.scheduler import Scheduler
from halfbyte.kvcache.manager import KVCacheManager
from halfbyte.kvcache.spec import KVCacheSpec, make_layout
from halfbyte.types import EngineOutput, EngineRequest, SamplingParams, SchedulerOutput

Outputs = dict[str, list[EngineOutput]]


class Engine:
    """A scheduler, a fake runner and what has come out so far."""

    def __init__(
        self, runner_class: Any, *, max_model_len: int = 512, num_blocks: int = 100, caching: bool = True, **config: Any
    ):
        defaults: dict[str, Any] = {
            "max_num_seqs": 64,
            "max_num_batched_tokens": 64,
            "max_num_queued_reqs": None,
            "max_num_queued_tokens": None,
            "long_prefill_token_threshold": 0,
            "enable_chunked_prefill": True,
            "policy": "fcfs",
            "max_logprobs": 20,
            "logprobs_mode": "raw_logprobs",
        }
        settings = SchedulerConfig(**(defaults | config))
        layout = make_layout([KVCacheSpec(1, 8, 8, 4, None, "float32")], lambda spec: 64)
        batched = settings.max_num_batched_tokens
        self.manager = KVCacheManager(layout, num_blocks, enable_prefix_caching=caching, max_num_batched_tokens=batched)
        self.scheduler = Scheduler(settings, self.manager, max_model_len=max_model_len, worth_waiting_tokens=64)
        self.runner = runner_class(layout, self.manager.pool, settings.max_num_seqs)
        self.outputs: Outputs = {}

    def add(self, request_id: str, prompt: list[int] | int, max_tokens: int = 4, **fields: Any) -> EngineOutput | None:
        """`prompt` as a number: so many tokens that no other request has."""
        tokens = [1000 + len(self.runner.salts)] * prompt if isinstance(prompt, int) else prompt
        sampling = SamplingParams(**{"max_tokens": max_tokens, **fields.pop("sampling", {})})
        self.runner.salts[request_id] = fields.get("cache_salt")
        request = EngineRequest(
            request_id, tokens, sampling, fields.pop("eos", []), fields.pop("arrival_s", 0.0), max_tokens, **fields
        )
        return self.scheduler.add(request)

    def hear(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        return outputs

    def step(self) -> SchedulerOutput:
        scheduled = self.scheduler.schedule()
        self.runner.execute(scheduled)
        if scheduled.num_scheduled_tokens:
            self.hear(self.scheduler.update(self.runner.sample().result()))
        self.manager.check()
        return scheduled

    def run(self, limit: int = 1000) -> list[SchedulerOutput]:
        steps = []
        while self.scheduler.has_work():
            steps.append(self.step())
            assert len(steps) < limit
        return steps

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def last(self, request_id: str) -> EngineOutput:
        assert [bool(o.finish_reason) for o in self.outputs[request_id]].count(True) == 1
        assert self.outputs[request_id][-1].finish_reason
        return self.outputs[request_id][-1]
