"""`halfbyte bench KIND`: picks the kind of benchmark; each is a module in `entrypoints/bench/` with `run(argv) -> exit code`.

Knows no flags, and imports a kind only when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from halfbyte.entrypoints.commands.kinds import choose_kind

# kind -> (its module, what it measures)
KINDS: dict[str, tuple[str, str]] = {
    "latency": ("halfbyte.entrypoints.bench.latency", "one batch through `LLM`: seconds, prefill and decode tokens/s"),
    "throughput": ("halfbyte.entrypoints.bench.throughput", "a dataset through `LLM`: requests/s and tokens/s"),
    "serve": ("halfbyte.entrypoints.bench.serve", "load on a running server: TTFT, TPOT, ITL, E2EL"),
    "startup": ("halfbyte.entrypoints.bench.startup", "from the command `halfbyte serve` to its first token"),
    "kernels": ("halfbyte.entrypoints.bench.kernels", "attention and matrix products by themselves"),
}


def run(argv: Sequence[str]) -> int:
    chosen = choose_kind("bench", {kind: does for kind, (_, does) in KINDS.items()}, argv)
    if chosen is None:
        return 0
    kind, words = chosen
    code: int = import_module(KINDS[kind][0]).run(words)
    return code
