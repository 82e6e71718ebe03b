"""`halfbyte bench latency`: how long one batch takes from the call to its last token, through `LLM`.

Batch sizes take turns within a round, so that a slow minute of the machine hits them all. Prefill and decode are parts of the
same run, timed where step outputs arrive: prefill ends with the step that brings the last sequence its first token, decode ends
with the last token. Tokens that other sequences got before the prefill's end count for neither.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from halfbyte.config import EngineOptions
from halfbyte.entrypoints.bench.datasets import WordPrompts, fresh_seed
from halfbyte.entrypoints.bench.offline import OFFLINE_FLAGS, REFUSED_OFFLINE, generate, sampling
from halfbyte.entrypoints.bench.results import Spread, environment, save, summary
from halfbyte.entrypoints.bench.shared_flags import MODEL, count_flag
from halfbyte.entrypoints.flag_table import engine_options
from halfbyte.entrypoints.flags import Flag, UsageError, parse
from halfbyte.types import EngineRequest, SamplingParams, StepOutput

if TYPE_CHECKING:
    from halfbyte.engine.client import EngineClient
    from halfbyte.engine.messages import Answer, Order
    from halfbyte.entrypoints.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured; the defaults are vLLM's."""

    batch_sizes: tuple[int, ...] = (8,)
    input_len: int = 32
    output_len: int = 128
    num_iters: int = 30
    num_iters_warmup: int = 10


_DEFAULT = Plan()
FLAGS = (
    MODEL,
    Flag(name="batch-size", help="requests at once; several sizes take turns (default: 8)", kind="texts", field="batch_sizes"),
    count_flag("input-len", "prompt tokens per request", _DEFAULT.input_len),
    count_flag("output-len", "output tokens per request", _DEFAULT.output_len),
    count_flag("num-iters", "measured runs of each batch size", _DEFAULT.num_iters),
    count_flag("num-iters-warmup", "runs of each batch size before that", _DEFAULT.num_iters_warmup, least=0),
    *OFFLINE_FLAGS,
)
REFUSED: Mapping[str, str] = {**REFUSED_OFFLINE, "--use-beam-search": "there is no beam search; use --n"}


@dataclass(frozen=True, slots=True)
class Run:
    """One batch. Each sequence gets its first token in the prefill; `num_decode_tokens` came after it, within `decode_s`."""

    latency_s: float
    prefill_s: float
    decode_s: float
    num_decode_tokens: int


class TimedClient:
    """An engine client that notes when the tokens of what was added last arrive."""

    def __init__(self, client: EngineClient, clock: Clock = time.perf_counter) -> None:
        self.info = client.info
        self.clock = clock
        self._client = client
        self._forget([])

    def add(self, requests: list[EngineRequest]) -> None:
        self._forget(requests)
        self._client.add(requests)

    def abort(self, request_ids: list[str]) -> None:
        self._client.abort(request_ids)

    def control(self, action: Order[Answer]) -> Future[Answer]:
        return self._client.control(action)

    def receive(self, timeout_s: float | None = None) -> StepOutput | None:
        step = self._client.receive(timeout_s)
        arrived_s = self.clock()
        arrived = [output for output in step.outputs if output.new_token_ids] if step is not None else []
        if arrived:
            self.last_token_s = arrived_s
        if arrived and self._without_token:
            self._without_token -= {output.request_id for output in arrived}
            self.prefill_end_s = arrived_s
        else:
            self.num_decode_tokens += sum(len(output.new_token_ids) for output in arrived)
        return step

    def close(self) -> None:
        self._client.close()

    def _forget(self, requests: list[EngineRequest]) -> None:
        self._without_token = {request.request_id for request in requests}
        self.prefill_end_s = self.last_token_s = 0.0
        self.num_decode_tokens = 0


def run(argv: Sequence[str]) -> int:
    parsed = parse("bench latency", "Measure the latency of one batch, at each batch size.", FLAGS, argv, REFUSED)
    command = dict(parsed.command)
    if "batch_sizes" in command:
        command["batch_sizes"] = _batch_sizes(command["batch_sizes"])
    plan = Plan(**{field.name: command[field.name] for field in fields(Plan) if field.name in command})
    params = sampling(command).clone(max_tokens=plan.output_len)
    options = engine_options(parsed)
    seed = fresh_seed() if options.seed is None else options.seed
    print(f"{options.model}: {plan.input_len} prompt and {plan.output_len} output tokens, {plan.num_iters} runs", flush=True)
    llm, client = _start(options)
    try:
        runs = measure(llm, client, plan, params, seed)
    finally:
        llm.close()
    results = [describe(size, plan, params.n, runs[size]) for size in plan.batch_sizes]
    print("\n".join(line for result in results for line in report(result)), flush=True)
    if "output_json" in command:
        document = {"model": options.model, **asdict(plan), "n": params.n, "temperature": params.temperature, "seed": seed}
        # with one batch size, vLLM's names stand at the top as they do in its files
        document |= {"environment": environment(), "results": results} | (results[0] if len(results) == 1 else {})
        save(command["output_json"], document)
    return 0


def _batch_sizes(words: Sequence[str]) -> tuple[int, ...]:
    sizes = [size for word in words for size in word.split(",")]
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise UsageError(f"--batch-size must be positive integers, such as 1 8 32, got {' '.join(sizes)}")
    return tuple(dict.fromkeys(map(int, sizes)))


def _start(options: EngineOptions) -> tuple[LLM, TimedClient]:
    from halfbyte.engine.build import build_engine
    from halfbyte.engine.client import InProcessClient
    from halfbyte.entrypoints.llm import LLM

    client = TimedClient(InProcessClient(*build_engine(options)))
    return LLM.from_client(client, options), client


def measure(llm: LLM, client: TimedClient, plan: Plan, params: SamplingParams, seed: int) -> dict[int, list[Run]]:
    """The measured runs of each batch size: warm-up rounds, then rounds that count. No prompt comes twice."""
    prompts = WordPrompts(llm.get_tokenizer(), random.Random(seed))
    runs: dict[int, list[Run]] = {size: [] for size in plan.batch_sizes}
    for _ in range(plan.num_iters_warmup + plan.num_iters):
        for size in plan.batch_sizes:
            batch = [prompts.draw(plan.input_len, plan.output_len).prompt_token_ids for _ in range(size)]
            started_s = client.clock()
            generate(llm, batch, [params] * size)
            latency_s = client.clock() - started_s
            prefill_s, decode_s = client.prefill_end_s - started_s, client.last_token_s - client.prefill_end_s
            runs[size].append(Run(latency_s, prefill_s, decode_s, client.num_decode_tokens))
    return {size: of_size[plan.num_iters_warmup :] for size, of_size in runs.items()}


def describe(batch_size: int, plan: Plan, n: int, runs: Sequence[Run]) -> dict[str, Any]:
    """The result of one batch size: vLLM's names, then speeds as median, min and max over the runs."""
    latencies_s = [run.latency_s for run in runs]
    numbers = summary(latencies_s, PERCENTILES)
    speeds = {
        "output_tokens_per_s": [batch_size * n * plan.output_len / run.latency_s for run in runs],
        "prefill_tokens_per_s": [batch_size * plan.input_len / run.prefill_s for run in runs],
        "decode_tokens_per_s": [run.num_decode_tokens / run.decode_s for run in runs if run.num_decode_tokens],
    }
    return {
        "batch_size": batch_size,
        "avg_latency": numbers["mean"],
        "latencies": latencies_s,
        "percentiles": {str(percentile): numbers[f"p{percentile}"] for percentile in PERCENTILES},
        **{name: asdict(Spread.of(values)) for name, values in speeds.items() if values},
        "runs": [asdict(run) for run in runs],
    }


def report(result: Mapping[str, Any]) -> Iterator[str]:
    yield f"Batch size {result['batch_size']}"
    yield f"  Avg latency: {result['avg_latency']:.4f} seconds"
    for percentile, latency_s in result["percentiles"].items():
        yield f"  {percentile}% percentile latency: {latency_s:.4f} seconds"
    for part in ("output", "prefill", "decode"):
        if (speed := result.get(f"{part}_tokens_per_s")) is not None:
            yield f"  {part.capitalize()}: {Spread(**speed)} tokens/s"
