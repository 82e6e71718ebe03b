"""/metrics: the names and types that dashboards read, exact counts, labels that no client can choose."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from halfbyte.config import SchedulerConfig
from halfbyte.engine.core import EngineCore
from halfbyte.engine.metrics import NON_FINITE, EngineMetrics, buckets_1_2_5
from halfbyte.engine.scheduler import Scheduler
from halfbyte.kvcache.manager import KVCacheManager
from halfbyte.kvcache.spec import KVCacheSpec, make_layout
from halfbyte.types import EngineInfo, EngineOutput, EngineRequest, SamplingParams, SchedulerStats, StepOutput

EXPECTED_TYPES = {
    **dict.fromkeys(("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"), "gauge"),
    **dict.fromkeys(("kv_cache_usage_perc", "cache_config_info", "engine_sleep_state"), "gauge"),
    **dict.fromkeys(("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "corrupted_requests"), "counter"),
    **dict.fromkeys(("prompt_tokens", "prompt_tokens_cached", "generation_tokens"), "counter"),
    **dict.fromkeys(("request_success", "admission_rejections"), "counter"),
    **dict.fromkeys(("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"), "histogram"),
    **dict.fromkeys(("request_params_max_tokens", "request_prefill_kv_computed_tokens", "request_params_n"), "histogram"),
    **dict.fromkeys(("iteration_tokens_total", "request_num_preemptions"), "histogram"),
    **dict.fromkeys(("time_to_first_token_seconds", "inter_token_latency_seconds"), "histogram"),
    **dict.fromkeys(("request_time_per_output_token_seconds", "e2e_request_latency_seconds"), "histogram"),
    **dict.fromkeys(("request_queue_time_seconds", "request_inference_time_seconds"), "histogram"),
    **dict.fromkeys(("request_prefill_time_seconds", "request_decode_time_seconds"), "histogram"),
}


def info(**changes: Any) -> EngineInfo:
    numbers = dict.fromkeys(("vocab_size", "max_logprobs", "max_num_seqs", "max_num_batched_tokens", "kv_cache_tokens"), 1)
    words = dict.fromkeys(("model", "architecture", "dtype"), "x")
    sizes = {"max_model_len": 3000, "block_size": 16, "num_blocks": 9, "kv_cache_bytes": 4096, "kv_cache_dtype": "float32"}
    others = {"eos_token_ids": [], "max_concurrency": 1.0, "enable_prefix_caching": True}
    return EngineInfo(**{**words, **numbers, **sizes, **others, **changes})


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics(info(), 'my "model"')


def samples(metrics: EngineMetrics) -> dict[str, float]:
    """name{extra labels} -> value, for everything that is not a bucket."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            extra = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
            if not sample.name.endswith("_bucket") and sample.name.startswith("vllm:"):
                found[":".join([sample.name.removeprefix("vllm:"), *extra])] = sample.value
    return found


def test_names_types_and_labels(metrics: EngineMetrics) -> None:
    families = list(text_string_to_metric_families(metrics.render().decode()))
    ours = {family.name.removeprefix("vllm:"): family for family in families if family.name.startswith("vllm:")}
    assert {name: family.type for name, family in ours.items()} == EXPECTED_TYPES
    for name, family in ours.items():
        assert family.samples, f"{name} exists before anything happens"
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter") or name == "iteration_tokens_total"
            if name != "cache_config_info":
                assert sample.labels["model_name"] == 'my "model"'
            if name != "admission_rejections":
                assert sample.labels["engine"] == "0"
    assert all(name.startswith(("vllm:", "process_")) for name in (family.name for family in families))
    assert not any("_created" in sample.name for family in families for sample in family.samples)


def test_cache_config_info(metrics: EngineMetrics) -> None:
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    (sample,) = families["vllm:cache_config_info"].samples
    assert sample.value == 1
    assert sample.labels["num_gpu_blocks"] == "9" and sample.labels["block_size"] == "16"
    assert sample.labels["cache_dtype"] == "float32"
    assert int(sample.labels["kv_cache_size_tokens"]) > 0 and float(sample.labels["kv_cache_max_concurrency"]) > 0


def bounds(metrics: EngineMetrics, name: str) -> list[float]:
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    return [float(s.labels["le"]) for s in families[f"vllm:{name}"].samples if s.name.endswith("_bucket")][:-1]


def test_buckets(metrics: EngineMetrics) -> None:
    assert buckets_1_2_5(5000) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]
    assert buckets_1_2_5(4999)[-1] == 2000
    assert bounds(metrics, "request_prompt_tokens") == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    steps = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    assert bounds(metrics, "iteration_tokens_total") == steps
    assert bounds(metrics, "time_to_first_token_seconds")[:3] == [0.001, 0.005, 0.01]
    assert len(bounds(metrics, "inter_token_latency_seconds")) == 19
    assert bounds(metrics, "e2e_request_latency_seconds")[-1] == 7680
    assert bounds(metrics, "request_params_n") == [1, 2, 5, 10, 20]


def test_a_step(metrics: EngineMetrics) -> None:
    stats = SchedulerStats(2, 3, 0.25, 1, 100, 64, 40)
    outputs = [EngineOutput("a", [1, 2]), EngineOutput.failed("b", f"the model computed {NON_FINITE} logits")]
    metrics.record_step(StepOutput([*outputs, EngineOutput.failed("c", "other")], stats))
    metrics.record_step(StepOutput([EngineOutput("a", [1])], SchedulerStats(prefix_cache_queries_tokens=10)))
    found = samples(metrics)
    assert found["num_requests_running"] == found["num_requests_waiting"] == found["kv_cache_usage_perc"] == 0
    assert found["num_requests_waiting_by_reason:capacity"] == found["num_requests_waiting_by_reason:deferred"] == 0
    assert found["prefix_cache_queries_total"] == 110 and found["prefix_cache_hits_total"] == 64
    assert found["num_preemptions_total"] == 1 and found["generation_tokens_total"] == 3
    assert found["corrupted_requests_total"] == 1
    assert (found["iteration_tokens_total_count"], found["iteration_tokens_total_sum"]) == (1, 40)


def test_gauges_show_the_last_step(metrics: EngineMetrics) -> None:
    metrics.record_step(StepOutput([], SchedulerStats(2, 3, 0.25)))
    found = samples(metrics)
    assert (found["num_requests_running"], found["num_requests_waiting"], found["kv_cache_usage_perc"]) == (2, 3, 0.25)
    assert found["num_requests_waiting_by_reason:capacity"] == 3


def test_the_times_of_a_request(metrics: EngineMetrics) -> None:
    request = metrics.request_added(50, 100.0, max_tokens=16)
    request.scheduled(0, 101.0)
    request.scheduled(0, 999.0)  # again after a preemption: only the first counts
    request.tokens(0, 103.0, 1, num_cached_tokens=32)
    request.tokens(0, 104.0, 2, 32, num_preemptions=1)
    request.tokens(0, 107.0, 1, 32, num_preemptions=1)
    request.finished(0, 108.0, "stop")
    request.finished(0, 200.0, "abort")  # the engine's answer to our own abort
    request.abandoned(300.0)
    found = samples(metrics)
    sums = {
        "request_queue_time_seconds": 1.0,
        "time_to_first_token_seconds": 3.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 4.0,
        "request_inference_time_seconds": 6.0,
        "e2e_request_latency_seconds": 8.0,
        "request_time_per_output_token_seconds": 4.0 / 3,
        "request_prompt_tokens": 50,
        "request_generation_tokens": 4,
        "request_max_num_generation_tokens": 4,
        "request_params_max_tokens": 16,
        "request_prefill_kv_computed_tokens": 18,
        "request_params_n": 1,
        "request_num_preemptions": 1,
    }
    for name, value in sums.items():
        assert found[f"{name}_count"] == 1 and found[f"{name}_sum"] == pytest.approx(value), name
    assert (found["inter_token_latency_seconds_count"], found["inter_token_latency_seconds_sum"]) == (2, 4.0)
    assert found["prompt_tokens_total"] == 50 and found["prompt_tokens_cached_total"] == 32
    assert found["request_success_total:stop"] == 1 and found["request_success_total:abort"] == 0


def test_a_request_of_several_sequences(metrics: EngineMetrics) -> None:
    request = metrics.request_added(10, 0.0, num_sequences=3)
    for index, count in enumerate((2, 5, 1)):
        output = EngineOutput(str(index), [7] * count, scheduled_s=1.0, num_cached_tokens=4)
        request.output(index, 2.0, output, num_tokens=count)
    request.finished(0, 3.0, "length")
    assert samples(metrics)["request_params_n_count"] == 0
    request.abandoned(4.0)
    found = samples(metrics)
    assert found["request_params_n_sum"] == 3 and found["request_max_num_generation_tokens_sum"] == 5
    assert found["request_success_total:length"] == 1 and found["request_success_total:abort"] == 2
    assert found["request_generation_tokens_sum"] == 8 and found["prompt_tokens_total"] == 30


def test_a_request_that_never_ran(metrics: EngineMetrics) -> None:
    metrics.request_added(10, 0.0).finished(0, 1.0, "abort")
    found = samples(metrics)
    assert found["request_success_total:abort"] == 1 and found["time_to_first_token_seconds_count"] == 0
    assert found["prompt_tokens_total"] == 0


def test_admission(metrics: EngineMetrics) -> None:
    metrics.admission_rejected("max_num_queued_tokens")
    found = samples(metrics)
    assert found["admission_rejections_total:max_num_queued_tokens"] == 1
    assert found["admission_rejections_total:max_num_queued_reqs"] == 0


def test_labels_are_a_fixed_set(metrics: EngineMetrics) -> None:
    request = metrics.request_added(10, 0.0)
    with pytest.raises(KeyError):
        request.finished(0, 1.0, "whatever a client sent")
    with pytest.raises(KeyError):
        metrics.admission_rejected("other")  # type: ignore[arg-type]


def test_two_engines_do_not_share_a_registry(metrics: EngineMetrics) -> None:
    metrics.admission_rejected("max_num_queued_reqs")
    assert samples(EngineMetrics(info(), "other"))["admission_rejections_total:max_num_queued_reqs"] == 0


def test_the_scheduler_says_non_finite(metrics: EngineMetrics, fake_runner: Any) -> None:
    """The engine's own message is what the counter of corrupted requests looks for."""
    layout = make_layout([KVCacheSpec(1, 4, 4, 4, None, "float32")], lambda spec: 64)
    manager = KVCacheManager(layout, 8, enable_prefix_caching=False, max_num_batched_tokens=8)
    config = SchedulerConfig(
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_num_queued_reqs=None,
        max_num_queued_tokens=None,
        long_prefill_token_threshold=0,
        enable_chunked_prefill=True,
        policy="fcfs",
        max_logprobs=20,
        logprobs_mode="raw_logprobs",
    )
    core = EngineCore(Scheduler(config, manager, max_model_len=16), fake_runner(layout, manager.pool, 2, bad={"a"}))
    core.add([EngineRequest("a", [1, 2], SamplingParams(), [], 0.0, 4)])
    metrics.record_step(core.step())
    assert samples(metrics)["corrupted_requests_total"] == 1
