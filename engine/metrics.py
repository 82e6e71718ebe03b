"""Prometheus metrics of one engine, with the names, types, labels and buckets that dashboards and autoscalers know.

Knows counts and times; knows no text and no request ids: label values come from fixed sets and from the operator, never from
clients. `AsyncEngine` reports each step (`record_step`), and each request through the `RequestMetrics` that `request_added`
gives it. Only what the engine really measures is here. Times are `time.monotonic` seconds, which engine and API process share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from halfbyte.types import EngineInfo, EngineOutput, StepOutput

AdaptersInUse = Callable[[], tuple[Set[str], Set[str]]]

# The client library would add a `_created` series to each counter and histogram; no dashboard knows them.
disable_created_metrics()

NON_FINITE: Final = "non-finite"  # in the error of a request whose logits were

FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
AdmissionReason = Literal["max_num_queued_reqs", "max_num_queued_tokens"]
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")
SLEEP_STATES = {"awake": None, "weights_offloaded": 1, "discard_all": 2}  # and the level of the sleep
WAITING_REASONS = ("capacity", "deferred")

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS_BUCKETS = (1, *(2**power for power in range(3, 15)))
PARAMS_N_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTIONS_BUCKETS = (1, 2, 3, 4, 5, 10, 20)

_Metric = TypeVar("_Metric", bound=MetricWrapperBase)


def buckets_1_2_5(largest: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`."""
    buckets: list[int] = []
    power = 1
    while power <= largest:
        buckets += [power * mantissa for mantissa in (1, 2, 5) if power * mantissa <= largest]
        power *= 10
    return buckets


class EngineMetrics:
    """The collectors of one engine in a registry of their own. `served_name` is the value of the label model_name.

    adapters_in_use: names of the adapters of requests that run, and of those that wait; asked when metrics are.
    """

    def __init__(
        self, info: EngineInfo, served_name: str, adapters_in_use: AdaptersInUse = lambda: (frozenset(), frozenset())
    ) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": served_name, "engine": "0"}
        ProcessCollector(registry=self._registry)
        self._make_step_metrics()
        self._make_request_metrics(info)
        self._make_sleep()
        self._make_info(info)
        if info.max_loras:
            self._registry.register(_AdapterInfo(info.max_loras, adapters_in_use))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)

    def record_step(self, step: StepOutput) -> None:
        """Take the gauges and the counts of one step."""
        stats = step.stats
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._waiting_by_reason["capacity"].set(stats.num_waiting)
        self._kv_usage.set(stats.kv_cache_usage)
        self._preemptions.inc(stats.num_preemptions)
        self._cache_queries.inc(stats.prefix_cache_queries_tokens)
        self._cache_hits.inc(stats.prefix_cache_hits_tokens)
        if stats.num_scheduled_tokens:
            self._step_tokens.observe(stats.num_scheduled_tokens)
        for output in step.outputs:
            if output.new_token_ids:
                self._generation_tokens.inc(len(output.new_token_ids))
            if output.finish_reason == "error" and NON_FINITE in (output.error or ""):
                self._corrupted.inc()

    def record_sleep(self, level: int | None) -> None:
        """level: None while awake."""
        for state, its_level in SLEEP_STATES.items():
            self._sleep[state].set(level == its_level)

    def admission_rejected(self, reason: AdmissionReason) -> None:
        """A request was turned away because the queue is full."""
        self._rejections[reason].inc()

    def request_added(
        self, num_prompt_tokens: int, arrival_s: float, *, num_sequences: int = 1, max_tokens: int | None = None
    ) -> RequestMetrics:
        """A request entered. The result takes the news of its `num_sequences` sequences."""
        return RequestMetrics(self, num_prompt_tokens, arrival_s, num_sequences, max_tokens)

    def _counter(self, name: str, text: str) -> Counter:
        return _one(Counter(f"vllm:{name}", text, list(self._labels), registry=self._registry), self._labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        return _one(Gauge(f"vllm:{name}", text, list(self._labels), registry=self._registry), self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(f"vllm:{name}", text, list(self._labels), buckets=buckets, registry=self._registry)
        return _one(metric, self._labels)

    def _make_step_metrics(self) -> None:
        names = [*self._labels, "reason"]
        self._running = self._gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait to be scheduled.")
        waiting = Gauge("vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", names, registry=self._registry)
        self._waiting_by_reason = {reason: _one(waiting, {**self._labels, "reason": reason}) for reason in WAITING_REASONS}
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Used part of the KV blocks, 1 is all of them.")
        self._cache_queries = self._counter("prefix_cache_queries", "Tokens that were looked up in the prefix cache.")
        self._cache_hits = self._counter("prefix_cache_hits", "Tokens that were found in the prefix cache.")
        self._preemptions = self._counter("num_preemptions", "Times that a request lost its blocks to another.")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self._corrupted = self._counter("corrupted_requests", "Requests that failed because their logits were not finite.")
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens computed in one step.", STEP_TOKENS_BUCKETS)
        rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused by an admission limit.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        model_name = self._labels["model_name"]
        self._rejections = {
            reason: _one(rejections, {"model_name": model_name, "reason": reason}) for reason in REJECTION_REASONS
        }

    def _make_request_metrics(self, info: EngineInfo) -> None:
        tokens = buckets_1_2_5(info.max_model_len)
        success = Counter(
            "vllm:request_success", "Ended requests by reason.", [*self._labels, "finished_reason"], registry=self._registry
        )
        self.success = {r: _one(success, {**self._labels, "finished_reason": r}) for r in FINISHED_REASONS}
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", "Prompt tokens whose KV was in the prefix cache.")
        self.num_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self.num_generation_tokens = self._histogram("request_generation_tokens", "Generated tokens of a request.", tokens)
        self.max_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Generated tokens of a request's longest sequence.", tokens
        )
        self.params_max_tokens = self._histogram("request_params_max_tokens", "The max_tokens of a request.", tokens)
        self.computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request whose KV was computed.", tokens
        )
        self.params_n = self._histogram("request_params_n", "The n of a request.", PARAMS_N_BUCKETS)
        self.num_preemptions = self._histogram("request_num_preemptions", "Preemptions of a request.", PREEMPTIONS_BUCKETS)
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S)
        self.itl = self._histogram("inter_token_latency_seconds", "Time between two tokens.", ITL_BUCKETS_S)
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token of a request after its first.", ITL_BUCKETS_S
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end.", REQUEST_BUCKETS_S)
        self.queue = self._histogram("request_queue_time_seconds", "Arrival to first scheduling.", REQUEST_BUCKETS_S)
        self.inference = self._histogram("request_inference_time_seconds", "First scheduling to last token.", REQUEST_BUCKETS_S)
        self.prefill = self._histogram("request_prefill_time_seconds", "First scheduling to first token.", REQUEST_BUCKETS_S)
        self.decode = self._histogram("request_decode_time_seconds", "First token to last token.", REQUEST_BUCKETS_S)

    def _make_sleep(self) -> None:
        gauge = Gauge(
            "vllm:engine_sleep_state",
            "Whether the engine is awake, or what it has given back to sleep.",
            [*self._labels, "sleep_state"],
            registry=self._registry,
        )
        self._sleep = {state: _one(gauge, {**self._labels, "sleep_state": state}) for state in SLEEP_STATES}
        self.record_sleep(None)

    def _make_info(self, info: EngineInfo) -> None:
        labels = {
            "block_size": str(info.block_size),
            "cache_dtype": info.kv_cache_dtype,
            "enable_prefix_caching": str(info.enable_prefix_caching),
            "engine": self._labels["engine"],
            "kv_cache_max_concurrency": f"{info.max_concurrency:.2f}",
            "kv_cache_memory_bytes": str(info.kv_cache_bytes),
            "kv_cache_size_tokens": str(info.kv_cache_tokens),
            "num_gpu_blocks": str(info.num_blocks),
        }
        gauge = Gauge("vllm:cache_config_info", "How the KV cache is set up.", list(labels), registry=self._registry)
        _one(gauge, labels).set(1)


class _AdapterInfo(Collector):
    """Which adapters are in use, as labels; the value is the time at which that was so."""

    def __init__(self, max_loras: int, adapters_in_use: AdaptersInUse) -> None:
        self._max_loras, self._adapters_in_use = max_loras, adapters_in_use

    def collect(self) -> Iterator[Metric]:
        running, waiting = (",".join(sorted(names)) for names in self._adapters_in_use())
        labels = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters that requests run with or wait for.", labels=labels)
        family.add_metric([str(self._max_loras), waiting, running], time.time())
        yield family


@dataclass(slots=True)
class _SequenceTimes:
    """When things happened to one sequence; None: not yet."""

    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    has_ended: bool = False


@dataclass(slots=True)
class RequestMetrics:
    """One request of n sequences on its way; observes into the histograms as its sequences move and end.

    Report, per sequence: `scheduled` once, `tokens` for each step that gave it some, `finished` once.
    """

    metrics: EngineMetrics
    num_prompt_tokens: int
    arrival_s: float
    num_sequences: int = 1
    max_tokens: int | None = None
    _sequences: list[_SequenceTimes] = field(default_factory=list)
    _num_open: int = 0

    def __post_init__(self) -> None:
        self._num_open = self.num_sequences
        self._sequences = [_SequenceTimes() for _ in range(self.num_sequences)]

    def output(self, index: int, now_s: float, output: EngineOutput, num_tokens: int | None = None) -> None:
        """What a step did for sequence `index`. num_tokens: how many of its tokens count, if a stop string cut them."""
        if output.scheduled_s is not None:
            self.scheduled(index, output.scheduled_s)
        count = len(output.new_token_ids) if num_tokens is None else num_tokens
        self.tokens(index, now_s, count, output.num_cached_tokens, output.num_preemptions)
        if output.pooled is not None:  # a vector is to its request what a first token is to others
            sequence = self._sequences[index]
            self._first_token(sequence, now_s, output.num_cached_tokens)
            sequence.last_token_s = now_s

    def scheduled(self, index: int, now_s: float) -> None:
        """Sequence `index` entered a batch for the first time."""
        sequence = self._sequences[index]
        if sequence.scheduled_s is None:
            sequence.scheduled_s = now_s
            self.metrics.queue.observe(_span(self.arrival_s, now_s))

    def tokens(self, index: int, now_s: float, count: int, num_cached_tokens: int = 0, num_preemptions: int = 0) -> None:
        """Sequence `index` got `count` tokens in one step. The last two are totals of the sequence so far."""
        sequence = self._sequences[index]
        sequence.num_preemptions = num_preemptions
        if sequence.has_ended or count < 1:
            return
        if sequence.first_token_s is None:
            self._first_token(sequence, now_s, num_cached_tokens)
        else:
            self.metrics.itl.observe(_span(sequence.last_token_s, now_s))
        sequence.last_token_s = now_s
        sequence.num_tokens += count

    def finished(self, index: int, now_s: float, reason: str) -> None:
        """Sequence `index` ended: stop, length, abort or error. A second call changes nothing."""
        sequence, metrics = self._sequences[index], self.metrics
        if sequence.has_ended:
            return
        sequence.has_ended = True
        self._num_open -= 1
        metrics.success[reason].inc()
        metrics.e2e.observe(_span(self.arrival_s, now_s))
        metrics.num_prompt_tokens.observe(self.num_prompt_tokens)
        metrics.num_generation_tokens.observe(sequence.num_tokens)
        metrics.num_preemptions.observe(sequence.num_preemptions)
        if self.max_tokens is not None:
            metrics.params_max_tokens.observe(self.max_tokens)
        if sequence.first_token_s is not None:
            metrics.decode.observe(_span(sequence.first_token_s, sequence.last_token_s))
            if sequence.scheduled_s is not None:
                metrics.inference.observe(_span(sequence.scheduled_s, sequence.last_token_s))
            if sequence.num_tokens > 1:
                metrics.tpot.observe(_span(sequence.first_token_s, sequence.last_token_s) / (sequence.num_tokens - 1))
        if not self._num_open:
            metrics.params_n.observe(self.num_sequences)
            metrics.max_generation_tokens.observe(max(s.num_tokens for s in self._sequences))

    def abandoned(self, now_s: float) -> None:
        """The client left: every sequence that still runs ends as aborted."""
        for index in self._open():
            self.finished(index, now_s, "abort")

    def _open(self) -> Iterator[int]:
        return (index for index, sequence in enumerate(self._sequences) if not sequence.has_ended)

    def _first_token(self, sequence: _SequenceTimes, now_s: float, num_cached_tokens: int) -> None:
        metrics = self.metrics
        sequence.first_token_s = now_s
        metrics.ttft.observe(_span(self.arrival_s, now_s))
        if sequence.scheduled_s is not None:
            metrics.prefill.observe(_span(sequence.scheduled_s, now_s))
        metrics.prompt_tokens.inc(self.num_prompt_tokens)
        metrics.prompt_tokens_cached.inc(num_cached_tokens)
        metrics.computed_tokens.observe(max(0, self.num_prompt_tokens - num_cached_tokens))


def _one(metric: _Metric, labels: dict[str, str]) -> _Metric:
    """The child of a metric with these labels: it exists, at zero, before anything happens."""
    return metric.labels(**labels)


def _span(start_s: float, end_s: float) -> float:
    return max(0.0, end_s - start_s)
