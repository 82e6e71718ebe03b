"""`halfbyte bench`: output tokens per second at several batch sizes, through `LLM`, on this machine.

Every batch size is warmed up, then the sizes take turns, so that a slow minute of the machine hits them all. Prompts are
random token ids, new each time: the prefix cache cannot answer for the model. Prints median and spread, or one JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.entrypoints.flag_table import ENGINE_FLAGS, LOG_LEVEL, REFUSED_FLAGS, engine_options
from halfbyte.entrypoints.flags import Flag, UsageError, parse
from halfbyte.errors import HalfbyteError
from halfbyte.types import SamplingParams

if TYPE_CHECKING:
    from halfbyte.entrypoints.llm import LLM

FLAGS = (
    Flag(name="model", help="the same as --model", owner="engine", positional=True),
    Flag(name="batch-size", help="requests at once (default: 1 8 32)", kind="texts", field="batch_sizes"),
    Flag(name="input-len", help="prompt tokens per request (default: 32)", kind="size"),
    Flag(name="output-len", help="output tokens per request (default: 64)", kind="size"),
    Flag(name="num-iters", help="measured runs of each batch size (default: 3)", kind="size"),
    Flag(name="num-iters-warmup", help="runs before that (default: 1)", kind="size"),
    Flag(name="output-json", help="also write the result to this file"),
    LOG_LEVEL,
    *ENGINE_FLAGS,
)
DEFAULT_BATCH_SIZES = (1, 8, 32)
# Ids below this exist in every vocabulary worth measuring, and lie above the special tokens.
_TOKEN_IDS = range(200, 1000)

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. All runs have the same lengths; EOS is ignored."""

    batch_sizes: tuple[int, ...] = DEFAULT_BATCH_SIZES
    input_len: int = 32
    output_len: int = 64
    num_iters: int = 3
    num_iters_warmup: int = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """One batch size: output tokens per second over its runs."""

    batch_size: int
    tokens_per_s: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)


def run(argv: Sequence[str]) -> int:
    parsed = parse("bench", "Measure output tokens per second at several batch sizes.", FLAGS, argv, REFUSED_FLAGS)
    given = {name: value for name, value in parsed.command.items() if name not in ("log_level", "output_json")}
    plan = _plan(given)
    options = engine_options(parsed)
    from halfbyte import LLM

    print(
        f"bench: {options.model}, {plan.input_len} prompt and {plan.output_len} output tokens, {plan.num_iters} runs", flush=True
    )
    llm = LLM(**parsed.engine)
    try:
        results = measure(llm, plan)
    finally:
        llm.close()
    for result in results:
        low, high = min(result.tokens_per_s), max(result.tokens_per_s)
        print(f"batch {result.batch_size:>3}: {result.median:9.1f} tokens/s  (from {low:.1f} to {high:.1f})")
    if "output_json" in parsed.command:
        _write_json(Path(parsed.command["output_json"]), options.model, plan, results)
    return 0


def measure(llm: LLM, plan: Plan, clock: Clock = time.perf_counter) -> list[Measured]:
    """Run the plan: warm-up of every size, then rounds in which each size has one run."""
    rng = random.Random(0)
    for batch_size in plan.batch_sizes * plan.num_iters_warmup:
        _run_once(llm, plan, batch_size, rng, clock)
    speeds: dict[int, list[float]] = {batch_size: [] for batch_size in plan.batch_sizes}
    for _ in range(plan.num_iters):
        for batch_size in plan.batch_sizes:
            seconds = _run_once(llm, plan, batch_size, rng, clock)
            speeds[batch_size].append(batch_size * plan.output_len / seconds)
    return [Measured(batch_size, tuple(values)) for batch_size, values in speeds.items()]


def _run_once(llm: LLM, plan: Plan, batch_size: int, rng: random.Random, clock: Clock) -> float:
    """Seconds for one batch from the call to the last token, prefill included."""
    prompts: list[Any] = [rng.choices(_TOKEN_IDS, k=plan.input_len) for _ in range(batch_size)]
    params = SamplingParams(temperature=0.0, max_tokens=plan.output_len, ignore_eos=True, detokenize=False)
    started_s = clock()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = clock() - started_s
    for output in outputs:
        if len(output.outputs[0].token_ids) != plan.output_len:
            raise HalfbyteError(
                f"a request ended after {len(output.outputs[0].token_ids)} of {plan.output_len} tokens "
                f"({output.outputs[0].finish_reason}); use a smaller --output-len or a larger --max-model-len"
            )
    return seconds


def _plan(given: dict[str, Any]) -> Plan:
    for name, least in (("input_len", 1), ("output_len", 1), ("num_iters", 1), ("num_iters_warmup", 0)):
        if given.get(name, least) < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {given[name]}")
    if "batch_sizes" in given:
        words = [word for text in given["batch_sizes"] for word in text.split(",")]
        if not all(word.isdigit() and int(word) > 0 for word in words):
            raise UsageError(f"--batch-size must be positive integers, such as 1 8 32, got {' '.join(words)}")
        given["batch_sizes"] = tuple(dict.fromkeys(int(word) for word in words))
    return Plan(**given)


def _write_json(path: Path, model: str, plan: Plan, results: Sequence[Measured]) -> None:
    from halfbyte.entrypoints.commands.collect_env import report

    document = {
        "model": model,
        "command": sys.argv,
        "plan": asdict(plan),
        "environment": dict(report()),
        "results": [asdict(result) | {"median": result.median, "unit": "output tokens/s"} for result in results],
    }
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise HalfbyteError(f"cannot write {path}: {error.strerror}") from None
