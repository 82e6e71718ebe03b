"""What the records of a run mean: latencies, throughputs, peaks and goodput, under vLLM's names.

Knows times and token counts; it must not know HTTP, flags or files. Times of one run are seconds of one monotonic clock. Called
by `bench serve`, for its JSON and for its printed report.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from halfbyte.entrypoints.bench.results import summary


@dataclass(slots=True)
class Record:
    """One request as its client saw it.

    arrivals_s: when each chunk that carries output arrived; a chunk may hold several tokens. last_s: when the last chunk of the
    answer arrived, which may only say why it ended. num_output_tokens: what the server's usage says, else the number of chunks.
    error: why the request failed, "" when it did not.
    """

    started_s: float
    ended_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    last_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    texts: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.started_s

    @property
    def e2el_s(self) -> float:
        return self.last_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """The mean time of a token, the first one left out; None for an answer of one token."""
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None

    @property
    def itls_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.arrivals_s)]


# name -> (title of its block in the report, the values that one request contributes)
METRICS: Mapping[str, tuple[str, Callable[[Record], Sequence[float]]]] = {
    "ttft": ("Time to First Token", lambda record: [record.ttft_s]),
    "tpot": ("Time per Output Token (excl. 1st token)", lambda record: [] if record.tpot_s is None else [record.tpot_s]),
    "itl": ("Inter-token Latency", lambda record: record.itls_s),
    "e2el": ("End-to-end Latency", lambda record: [record.e2el_s]),
}
# The limits that --goodput may set: each is one number per request.
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def values_ms(records: Sequence[Record], metric: str) -> list[float]:
    """The metric's values over the requests that succeeded."""
    of_record = METRICS[metric][1]
    return [value_s * 1e3 for record in records if not record.error for value_s in of_record(record)]


def measure(
    records: Sequence[Record],
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput_ms: Mapping[str, float],
) -> dict[str, Any]:
    """The result of one run. Tokens and latencies are those of the requests that succeeded."""
    good = [record for record in records if not record.error]
    duration_s = max(record.ended_s for record in records) - min(record.started_s for record in records)
    num_input_tokens = sum(record.num_prompt_tokens for record in good)
    num_output_tokens = sum(record.num_output_tokens for record in good)
    cached = [record.num_cached_tokens for record in good if record.num_cached_tokens is not None]
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(records) - len(good),
        "failure_reasons": dict(Counter(record.error for record in records if record.error).most_common()),
        "total_input_tokens": num_input_tokens,
        "total_output_tokens": num_output_tokens,
        "total_cached_tokens": sum(cached) if cached else None,
        "request_throughput": len(good) / duration_s,
        "request_goodput": num_within(good, goodput_ms) / duration_s if goodput_ms else None,
        "output_throughput": num_output_tokens / duration_s,
        "total_token_throughput": (num_input_tokens + num_output_tokens) / duration_s,
        "max_output_tokens_per_s": peak_tokens_per_s(good),
        "max_concurrent_requests": peak_concurrency(records),
    }
    for metric in metrics:
        if values := values_ms(records, metric):
            result |= {f"{name}_{metric}_ms": value for name, value in summary(values, percentiles).items()}
    return result


def detail(records: Sequence[Record]) -> dict[str, list[Any]]:
    """What --save-detailed adds: one entry per request in the order of the dataset, times in seconds."""
    began_s = min(record.started_s for record in records)
    return {
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens for record in records],
        "start_times": [record.started_s - began_s for record in records],
        "ttfts": [record.ttft_s if record.arrivals_s else 0.0 for record in records],
        "itls": [record.itls_s for record in records],
        "generated_texts": ["".join(record.texts) for record in records],
        "errors": [record.error for record in records],
    }


def num_within(records: Sequence[Record], limits_ms: Mapping[str, float]) -> int:
    """How many requests met every limit. An answer of one token has no TPOT to exceed."""
    return sum(
        all(value_s * 1e3 <= limit_ms for metric, limit_ms in limits_ms.items() for value_s in METRICS[metric][1](record))
        for record in records
    )


def peak_tokens_per_s(records: Sequence[Record]) -> float:
    """The most output tokens in one of the seconds counted from the first start. A chunk counts as its share of the answer."""
    if not records:
        return 0.0
    began_s = min(record.started_s for record in records)
    tokens_of_second: defaultdict[int, float] = defaultdict(float)
    for record in records:
        for arrival_s in record.arrivals_s:
            tokens_of_second[int(arrival_s - began_s)] += record.num_output_tokens / len(record.arrivals_s)
    return max(tokens_of_second.values())


def peak_concurrency(records: Sequence[Record]) -> int:
    """The most requests in flight at one time, failed ones too. One that starts as another ends does not overlap it."""
    changes = sorted([(record.started_s, 1) for record in records] + [(record.ended_s, -1) for record in records])
    peak = in_flight = 0
    for _, change in changes:
        in_flight += change
        peak = max(peak, in_flight)
    return peak


# key of the result -> how the report calls it
_ROWS = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "request_rate": "Request rate configured (RPS):",
    "max_concurrency": "Maximum request concurrency:",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "prefix_share": "Prefix share of the prompts:",
    "total_cached_tokens": "Input tokens cached by the server:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
}
_WIDTH = 58
_STATISTICS = {"mean": "Mean", "median": "Median", "std": "Std"}


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The lines that a run prints. What was not measured or not configured has no line."""
    yield " Serving Benchmark Result ".center(_WIDTH, "=")
    for key, title in _ROWS.items():
        if result.get(key) is not None:
            yield _row(title, result[key])
    for metric, (title, _) in METRICS.items():
        names = [key.split("_")[0] for key in result if key.endswith(f"_{metric}_ms")]
        if names:
            yield title.center(_WIDTH, "-")
        for name in names:
            yield _row(f"{_STATISTICS.get(name, name.upper())} {metric.upper()} (ms):", float(result[f"{name}_{metric}_ms"]))
    yield "=" * _WIDTH
    for reason, count in result["failure_reasons"].items():
        yield f"failed {count} times: {reason}"


def _row(title: str, value: Any) -> str:
    return f"{title:<42} {value:>15.2f}" if isinstance(value, float) else f"{title:<42} {value:>15}"
