"""`halfbyte bench KIND`: picks the kind of benchmark; each is a module in `entrypoints/bench/` with `run(argv) -> exit code`.

Knows no flags, and imports a kind only when it runs.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import import_module

from halfbyte.entrypoints.flags import UsageError

# kind -> (its module, what it measures)
KINDS: dict[str, tuple[str, str]] = {
    "latency": ("halfbyte.entrypoints.bench.latency", "one batch through `LLM`: seconds, prefill and decode tokens/s"),
    "throughput": ("halfbyte.entrypoints.bench.throughput", "a dataset through `LLM`: requests/s and tokens/s"),
    "serve": ("halfbyte.entrypoints.bench.serve", "load on a running server: TTFT, TPOT, ITL, E2EL"),
    "startup": ("halfbyte.entrypoints.bench.startup", "from the command `halfbyte serve` to its first token"),
    "kernels": ("halfbyte.entrypoints.bench.kernels", "attention and matrix products by themselves"),
}


def run(argv: Sequence[str]) -> int:
    kind, *words = argv or [""]
    if kind in ("-h", "--help", "help"):
        print(_help())
        return 0
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        asked = f"unknown kind {kind!r}" if kind and not kind.startswith("-") else "bench needs a kind"
        raise UsageError(f"{asked}; did you mean {near[0]}?" if near else f"{asked}: halfbyte bench {'|'.join(KINDS)}")
    code: int = import_module(KINDS[kind][0]).run(words)
    return code


def _help() -> str:
    rows = [f"  {name:<12} {does}" for name, (_, does) in KINDS.items()]
    last = "`halfbyte bench KIND --help` shows a kind's flags; --log-level is in each of them."
    return "\n".join(["usage: halfbyte bench KIND [flags]", "", *rows, "", last])
