"""The child's side of `compare.py`: one engine in its own interpreter, measured at the command of the parent.

Runs under any Python of a peer's environment, so it knows the standard library and the four keys of an adapter, not halfbyte.
Lines of JSON come on standard input and go out on what was standard output; whatever the engine prints goes to standard
error. Timing happens here, beside the engine, so that no pipe and no pause of the process is part of a measurement.

An adapter is a file with a class `Engine`: `Engine(settings)` loads, `versions()` names what ran, and
`generate(prompts, output_len)` returns for each prompt its greedy tokens as (token id, time.perf_counter() at which a caller
could first see it), exactly `output_len` of them, whatever the end-of-text token; tokens of one step share one time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

Stream = list[tuple[int, float]]


def measure(
    engine: Any, prompts: list[list[int]], output_len: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Run one batch. Decoding is the time from the step in which the last prompt has its first token, and the tokens after it."""
    started_s = clock()
    streams: list[Stream] = engine.generate(prompts, output_len)
    ended_s = clock()
    all_begun_s = max(stream[0][1] for stream in streams)
    last_token_s = max(stream[-1][1] for stream in streams)
    return {
        "first_tokens_s": all_begun_s - started_s,
        "decode_s": last_token_s - all_begun_s,
        "num_decoded_tokens": sum(seen_s > all_begun_s for stream in streams for _, seen_s in stream),
        "call_s": ended_s - started_s,
        "token_ids": [[token_id for token_id, _ in stream] for stream in streams],
    }


def load(adapter: str, settings: dict[str, Any]) -> tuple[Any, float]:
    """The engine of an adapter's file, and how many seconds its imports and its start took."""
    started_s = time.perf_counter()
    spec = importlib.util.spec_from_file_location("compare_adapter", adapter)
    assert spec is not None and spec.loader is not None
    module = sys.modules["compare_adapter"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Engine(settings), time.perf_counter() - started_s


def serve(answers: TextIO) -> None:
    """First line in: the adapter and its settings. Every further line: a batch. The end of the input is the end."""

    def answer(document: dict[str, Any]) -> None:
        print(json.dumps(document), file=answers, flush=True)

    order = json.loads(sys.stdin.readline())
    engine, load_s = load(order["adapter"], order["settings"])
    answer({"load_s": load_s, "versions": engine.versions()})
    for line in sys.stdin:
        batch = json.loads(line)
        answer(measure(engine, batch["prompts"], batch["output_len"]))


def main() -> None:
    sys.path.pop(0)  # this folder: an adapter beside this file must not stand in for the package that it is named after
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(answers)


if __name__ == "__main__":
    main()
