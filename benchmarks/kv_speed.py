"""What a KV format costs, or gains, in decode speed: steps of the whole engine, formats taking turns at the same contexts.

    python benchmarks/kv_speed.py [MODEL] [--kv-cache-dtype bfloat16 fp8 ...] [--context 128 1024 4096] [--batch 1 8]
                                  [--steps 8] [--rounds 9] [--out result.json]

An engine per format is held in one process, and at each context and batch all are filled with the same random prompts by real
prefill. Then rounds of `steps` decode steps alternate between the formats; ratios are taken within a round, beside the first
format.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from halfbyte.config import EngineOptions  # noqa: E402
from halfbyte.engine.build import build_engine  # noqa: E402
from halfbyte.entrypoints.bench.results import Spread, environment, save  # noqa: E402
from halfbyte.types import EngineRequest, SamplingParams  # noqa: E402

FORMATS = ("bfloat16", "fp8", "nvfp4", "kv4", "kv5", "kv6")
_SPARE_TOKENS = 64


class Decoder:
    """One engine, whose requests all decode while it is measured."""

    def __init__(self, model: str, name: str, longest: int, batch: int) -> None:
        options = EngineOptions(
            model=model,
            kv_cache_dtype=name,
            kv_check="off",
            max_model_len=longest,
            max_num_seqs=batch,
            enable_prefix_caching=False,
        )
        self.name = name
        self.core, self.info = build_engine(options)
        self._running: list[str] = []

    def fill(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Replace what runs by these prompts, prefilled."""
        self.core.abort(self._running)
        while self.core.has_work():
            self.core.step()
        params = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
        self._running = [f"{self.name} {i}" for i in range(len(prompts))]
        self.core.add(
            EngineRequest(name, prompt, params, [], 0.0, max_tokens) for name, prompt in zip(self._running, prompts, strict=True)
        )
        waiting = set(self._running)
        while waiting:
            waiting -= {output.request_id for output in self.core.step().outputs}

    def seconds(self, num_steps: int) -> float:
        """Of one decode step."""
        started_s = time.perf_counter()
        for _ in range(num_steps):
            self.core.step()
        return (time.perf_counter() - started_s) / num_steps


def measure(decoders: list[Decoder], context: int, batch: int, num_steps: int, num_rounds: int) -> list[dict[str, Any]]:
    random_ids = random.Random(context)
    vocab_size = decoders[0].info.vocab_size
    prompts = [[random_ids.randrange(vocab_size) for _ in range(context)] for _ in range(batch)]
    for decoder in decoders:
        decoder.fill(prompts, max_tokens=num_steps * (num_rounds + 1) + _SPARE_TOKENS)
        decoder.seconds(num_steps)
    times: dict[str, list[float]] = {decoder.name: [] for decoder in decoders}
    for _ in range(num_rounds):
        for decoder in decoders:
            times[decoder.name].append(decoder.seconds(num_steps))
    base = times[decoders[0].name]
    return [
        {
            "format": name,
            "context": context,
            "batch": batch,
            "tokens_per_s": vars_of(Spread.of([batch / second for second in seconds])),
            "speed_ratio": vars_of(Spread.of([first / second for first, second in zip(base, seconds, strict=True)])),
        }
        for name, seconds in times.items()
    ]


def vars_of(spread: Spread) -> dict[str, float]:
    return {name: getattr(spread, name) for name in spread.__slots__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=list(FORMATS))
    parser.add_argument("--context", nargs="+", type=int, default=[128, 1024, 4096])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out")
    words = parser.parse_args()
    longest = max(words.context) + words.steps * (words.rounds + 1) + _SPARE_TOKENS
    decoders = [Decoder(words.model, name, longest, max(words.batch)) for name in words.kv_cache_dtype]
    rows = []
    for context in words.context:
        for batch in words.batch:
            for row in measure(decoders, context, batch, words.steps, words.rounds):
                rows.append(row)
                speed, ratio = row["tokens_per_s"], row["speed_ratio"]
                print(
                    f"context {context:5d} batch {batch} {row['format']:20s} {speed['median']:8.1f} tok/s"
                    f"  x{ratio['median']:.2f} ({ratio['min']:.2f} - {ratio['max']:.2f})",
                    flush=True,
                )
    for decoder in decoders:
        decoder.core.close()
    if words.out:
        save(words.out, {"kind": "kv_speed", "model": words.model, "rows": rows, "environment": environment()})


if __name__ == "__main__":
    main()
