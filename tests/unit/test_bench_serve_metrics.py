"""What `bench serve` computes from times: exact values from timestamps made by hand, arrivals, ramps, and the pace of a run."""

from __future__ import annotations

import asyncio
import random
import statistics
from itertools import pairwise
from math import inf

import pytest

from halfbyte.entrypoints.bench.load_generator import RampUp, StreamReader, pace, start_offsets
from halfbyte.entrypoints.bench.serve_metrics import (
    METRICS,
    Record,
    detail,
    measure,
    num_within,
    peak_concurrency,
    peak_tokens_per_s,
    report,
    values_ms,
)


def record(started_s: float, *arrivals_s: float, tokens: int | None = None, prompt: int = 10, error: str = "") -> Record:
    """A request whose chunks arrived at these times after its start."""
    arrivals = [started_s + arrival_s for arrival_s in arrivals_s]
    last_s = arrivals[-1] if arrivals else started_s
    return Record(
        started_s=started_s,
        ended_s=last_s,
        arrivals_s=arrivals,
        last_s=last_s,
        num_prompt_tokens=prompt,
        num_output_tokens=len(arrivals) if tokens is None else tokens,
        error=error,
    )


def test_latencies_of_one_request() -> None:
    """Chunks may hold several tokens: ITL is the gap between chunks, TPOT divides by tokens."""
    one = record(100.0, 0.5, 0.75, 1.25, tokens=7)
    assert (one.ttft_s, one.e2el_s, one.itls_s) == (0.5, 1.25, [0.25, 0.5])
    assert one.tpot_s == 0.75 / 6
    assert record(0.0, 0.5).tpot_s is None, "an answer of one token has no time per further token"


def test_an_end_after_the_last_token_counts_as_its_time() -> None:
    """The last tokens may have no text, so that only the finish chunk tells when they were there."""
    one = record(0.0, 0.5, 0.75, tokens=5)
    one.last_s = 1.5
    assert (one.e2el_s, one.tpot_s, one.itls_s) == (1.5, 0.25, [0.25])


def test_result_of_a_run() -> None:
    records = [
        record(0.0, 0.125, 0.25, 0.375, prompt=8),
        record(0.5, 0.25, 0.5, 0.75, tokens=5, prompt=16),
        record(1.0, 0.5, prompt=4, error="HTTP 500: no"),
        record(1.0, prompt=4, error="HTTP 500: no"),
        record(1.5, 0.5, prompt=2),
    ]
    records[1].num_cached_tokens = 6
    result = measure(records, tuple(METRICS), [99, 50, 99.5], {})
    duration_s = 2.0
    expected = {
        "duration": duration_s,
        "completed": 3,
        "failed": 2,
        "total_input_tokens": 26,
        "total_output_tokens": 9,
        "total_cached_tokens": 6,
        "request_throughput": 1.5,
        "request_goodput": None,
        "output_throughput": 4.5,
        "total_token_throughput": 17.5,
        "max_concurrent_requests": 2,
        "mean_ttft_ms": 875 / 3,
        "median_ttft_ms": 250.0,
        "p50_ttft_ms": 250.0,
        "mean_tpot_ms": 125.0,
        "median_itl_ms": 187.5,
        "median_e2el_ms": 500.0,
    }
    assert {name: result[name] for name in expected} == pytest.approx(expected)
    assert result["failure_reasons"] == {"HTTP 500: no": 2}
    assert result["std_itl_ms"] == pytest.approx(statistics.pstdev([125, 125, 250, 250]))
    assert result["p99_ttft_ms"] == pytest.approx(250 + 0.98 * 250)
    assert "p99.5_e2el_ms" in result
    for metric in METRICS:
        assert {f"{name}_{metric}_ms" for name in ("mean", "median", "std", "p99")} <= set(result)


def test_a_run_without_latencies_of_a_kind_reports_none() -> None:
    result = measure([record(0.0, 1.0)], ("ttft", "tpot"), [99], {})
    assert "mean_ttft_ms" in result and not [name for name in result if "tpot" in name or "e2el" in name]


def test_only_successful_requests_have_latencies() -> None:
    assert values_ms([record(0.0, 0.25), record(0.0, 0.5, error="cut")], "ttft") == [250.0]


def test_goodput_wants_every_limit() -> None:
    records = [record(0.0, 0.25, 0.5), record(0.0, 0.25, 1.0), record(0.0, 0.75, 1.0), record(0.0, 0.25)]
    assert num_within(records, {"ttft": 250.0}) == 3
    assert num_within(records, {"ttft": 250.0, "tpot": 250.0}) == 2, "an answer of one token exceeds no TPOT"
    assert num_within(records, {"e2el": 999.0}) == 2
    assert measure(records, (), [], {"ttft": 250.0})["request_goodput"] == 3.0


def test_peaks() -> None:
    overlapping = [record(0.0, 2.0), record(1.0, 1.0), record(2.0, 1.0), record(2.5, 1.0, error="late")]
    assert peak_concurrency(overlapping) == 2, "one that starts as another ends does not overlap it"
    # chunks in seconds 0, 1, 1 with 4 tokens each, and in second 1 with 1 token
    assert peak_tokens_per_s([record(10.0, 0.5, 1.0, 1.5, tokens=12), record(10.0, 1.25)]) == 9.0
    assert peak_tokens_per_s([]) == 0.0


def test_detail_has_an_entry_for_every_request() -> None:
    failed = record(3.0, error="refused")
    good = record(2.0, 0.5, 1.0)
    good.texts = ["a", "b"]
    assert detail([good, failed]) == {
        "input_lens": [10, 10],
        "output_lens": [2, 0],
        "start_times": [0.0, 1.0],
        "ttfts": [0.5, 0.0],
        "itls": [[0.5], []],
        "generated_texts": ["ab", ""],
        "errors": ["", "refused"],
    }


def test_report_has_a_line_for_what_was_measured() -> None:
    result = measure([record(0.0, 0.5, 1.0), record(0.0, error="HTTP 503: full")], ("ttft",), [99], {})
    lines = list(report(result | {"request_rate": "inf", "max_concurrency": None}))
    text = "\n".join(lines)
    for title in ("Successful requests:", "Mean TTFT (ms):", "P99 TTFT (ms):", "Median TTFT (ms):"):
        assert title in text
    assert lines[-1] == "failed 1 times: HTTP 503: full"
    assert "TPOT" not in text and "goodput" not in text and "concurrency:" not in text and "cached" not in text


def test_gamma_arrivals_offer_the_rate_and_are_repeatable() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        offsets = start_offsets(2001, 8.0, burstiness, random.Random(5))
        assert offsets == start_offsets(2001, 8.0, burstiness, random.Random(5))
        assert offsets[0] == 0.0 and offsets[-1] == pytest.approx(2000 / 8.0)
        gaps = [later - earlier for earlier, later in pairwise(offsets)]
        assert min(gaps) >= 0.0
        variation = statistics.pstdev(gaps) / statistics.mean(gaps)
        assert variation == pytest.approx(burstiness**-0.5, rel=0.1), "a gamma distribution of that shape"


def test_even_arrivals_and_all_at_once() -> None:
    assert start_offsets(4, 2.0, inf, random.Random(0)) == [0.0, 0.5, 1.0, 1.5]
    assert start_offsets(3, inf, 1.0, random.Random(0)) == [0.0, 0.0, 0.0]
    assert start_offsets(1, 2.0, 1.0, random.Random(0)) == [0.0]


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 5.0), ("exponential", 3.0)])
def test_ramp_up(strategy: str, middle: float) -> None:
    ramp = RampUp(strategy, start_rps=1.0, end_rps=9.0)  # type: ignore[arg-type]
    assert [ramp.rate(progress) for progress in (0.0, 0.5, 1.0)] == pytest.approx([1.0, middle, 9.0])
    offsets = start_offsets(4, ramp, inf, random.Random(0))
    assert [later - earlier for earlier, later in pairwise(offsets)] == pytest.approx([1.0, 1 / middle, 1 / 9])


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        await asyncio.sleep(0)  # what was started starts before time goes on
        self.now_s += seconds


async def test_requests_start_at_their_offsets() -> None:
    time = Time()

    async def send(index: int) -> Record:
        return Record(started_s=time.clock(), num_prompt_tokens=index)

    records = await pace(send, [0.0, 0.25, 0.25, 1.0], clock=time.clock, sleep=time.sleep)
    assert [one.started_s for one in records] == [50.0, 50.25, 50.25, 51.0]
    assert [one.num_prompt_tokens for one in records] == [0, 1, 2, 3]
    assert time.sleeps == [0.25, 0.75]


async def test_concurrency_is_bounded() -> None:
    in_flight = peak = 0

    async def send(index: int) -> Record:
        nonlocal in_flight, peak
        in_flight += 1
        peak = max(peak, in_flight)
        for _ in range(3):
            await asyncio.sleep(0)
        in_flight -= 1
        return Record(started_s=0.0)

    assert len(await pace(send, [0.0] * 20, max_concurrency=3)) == 20
    assert peak == 3
    await pace(send, [0.0] * 20)
    assert peak == 20


def read(stream: bytes, piece: int | None = None) -> Record:
    """The record of a stream that arrives in pieces of that size, one per second."""
    one = Record(started_s=0.0, num_prompt_tokens=3)
    reader = StreamReader(one)
    size = piece or len(stream) or 1
    now_s = 0.0
    for start in range(0, len(stream), size):
        now_s += 1.0
        reader.feed(stream[start : start + size], now_s)
    reader.end(now_s)
    return one


CHAT = (
    b': comment\n\ndata: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    b'data: {"id":"x","choices":[{"delta":{"content":"Par"}}]}\n\n'
    b'data: {"choices":[{"delta":{"reasoning_content":"is"}}]}\r\n\r\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"stop","logprobs":null}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("piece", [None, 1, 7, 100])
def test_a_stream_in_any_pieces(piece: int | None) -> None:
    one = read(CHAT, piece)
    assert (one.error, "".join(one.texts), len(one.arrivals_s)) == ("", "Paris", 2)
    assert (one.num_prompt_tokens, one.num_output_tokens, one.num_cached_tokens) == (9, 4, 2)
    if piece == 1:
        ends = [CHAT.index(b"\n", CHAT.index(text)) + 1 for text in (b'"Par"', b'"is"', b'"stop"')]
        assert [*one.arrivals_s, one.last_s] == ends, "an event has arrived with its last byte"


def test_without_usage_chunks_are_counted() -> None:
    one = read(b'data: {"choices":[{"text":"a"}]}\n\ndata:{"choices":[{"text":""}]}\n\ndata: [DONE]')
    assert (one.error, one.num_prompt_tokens, one.num_output_tokens, one.num_cached_tokens) == ("", 3, 2, None)


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
    one = read(b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n' + usage)
    assert (one.error, one.arrivals_s, one.num_output_tokens) == ("", [1.0], 1)


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (b"", "the server sent no events"),
        (b'{"choices": []}', "the server sent no events"),
        (b'data: {"choices":[{"text":"a"}]}\n\n', "the stream ended before the answer did"),
        (b"data: [DONE]\n\n", "the answer holds no output"),
        (
            b'data: {"choices":[{"text":"a"}]}\n\ndata: {"error":{"message":"engine died","code":500}}\n\ndata: [DONE]\n\n',
            "the server ended the stream: engine died",
        ),
    ],
)
def test_broken_streams_say_how(stream: bytes, error: str) -> None:
    assert read(stream).error == error
