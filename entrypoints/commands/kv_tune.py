"""`halfbyte kv-tune MODEL`: find the KV format of each layer that costs the least accuracy in a given number of bits or bytes.

Knows the flags, the terminal and the plan's file; `halfbyte.engine.kv_tuning` measures and chooses. Progress goes to standard
error. docs/kv_tune.md describes what is done.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

from halfbyte.config import EngineOptions
from halfbyte.engine.build import absent_backends, resolve_all
from halfbyte.engine.front import find_model
from halfbyte.engine.kv_plan import write_plan
from halfbyte.engine.kv_tuning import Bits, Budget, Judged, Room, Tuning, tune
from halfbyte.entrypoints.bench.results import environment
from halfbyte.entrypoints.bench.shared_flags import MODEL, range_check
from halfbyte.entrypoints.flag_table import ENGINE_FLAGS, LOG_LEVEL, REFUSED_FLAGS, engine_options
from halfbyte.entrypoints.flags import Flag, UsageError, parse
from halfbyte.entrypoints.kv_plan.units import parse_bytes
from halfbyte.errors import HalfbyteError, UserError
from halfbyte.model_runner.decoder_config import config_from_files
from halfbyte.platform import detect_platform
from halfbyte.resolve import AUTO_FIT

DEFAULT_OUTPUT = "kv_plan.json"
_MOST_BITS = 32
_ENGINE_FIELDS = {flag.target for flag in ENGINE_FLAGS if flag.group == "model"} - {"seed"}
_ENGINE_FIELDS |= {"block_size", "kv_calibration", "max_num_batched_tokens"}


def _check_memory(text: str) -> None:
    try:
        parse_bytes(text)
    except ValueError as error:
        raise UserError(f"--memory: {error}", param="memory") from None


def _check_tokens(num_tokens: int) -> None:
    if num_tokens < 1:
        raise UserError(f"--tokens must be at least 1, got {num_tokens}", param="tokens")


def _check_output(name: str) -> None:
    """Said before the measurement, not after it."""
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--output: {name!r} must be a file in a folder that exists", param="output")


FLAGS = (
    MODEL,
    Flag(
        name="bits",
        help="most bits per cached number, scales included, such as 4.7",
        kind="number",
        check=range_check("bits", 0, _MOST_BITS),
    ),
    Flag(
        name="tokens", help="instead of --bits: tokens that the cache has to hold in --memory", kind="size", check=_check_tokens
    ),
    Flag(name="memory", help="bytes of the KV cache for --tokens, such as 4GiB", check=_check_memory),
    Flag(name="output", help=f"file of the plan (default: {DEFAULT_OUTPUT})", check=_check_output),
    LOG_LEVEL,
    *(flag for flag in ENGINE_FLAGS if flag.target in _ENGINE_FIELDS),
)


def run(argv: Sequence[str]) -> int:
    parsed = parse("kv-tune", "Find the KV format of each layer that costs the least accuracy.", FLAGS, argv, REFUSED_FLAGS)
    given, options = parsed.command, engine_options(parsed)
    budget = make_budget(given, options)
    found = tune(options, budget, lambda line: print(line, file=sys.stderr, flush=True))
    path = Path(given.get("output", DEFAULT_OUTPUT))
    try:
        write_plan(path, found.best.layers, notes(options, budget, found) | {"environment": environment()})
    except OSError as error:
        raise HalfbyteError(f"cannot write {path}: {error.strerror}") from None
    for line in lines(options, found, path):
        print(line)
    return 0


def make_budget(given: Mapping[str, Any], options: EngineOptions) -> Budget:
    """What --bits, or --tokens and --memory, ask for. UsageError unless it is one of the two."""
    has_room = [name for name in ("tokens", "memory") if name in given]
    if "bits" in given and has_room:
        raise UsageError(f"--bits and --{has_room[0]} both say how large the cache may be: give --bits, or --tokens and --memory")
    if "bits" in given:
        return Bits(Fraction(str(given["bits"])))
    if len(has_room) < 2:
        raise UsageError("say how large the cache may be: give --bits, or --tokens and --memory")
    return _room(given["tokens"], parse_bytes(given["memory"]), options)


def _room(num_tokens: int, memory_bytes: int, options: EngineOptions) -> Room:
    """For requests as long as the engine will allow them; where that follows from the memory, as long as all tokens together."""
    files = find_model(options.model, options)
    decoder = config_from_files(files, options.hf_overrides or {})
    platform = detect_platform(options.device)
    config = resolve_all(options, files, decoder, platform, absent_backends(platform))
    longest = min(decoder.max_position, num_tokens) if config.model.max_model_len == AUTO_FIT else config.model.max_model_len
    return Room(num_tokens, memory_bytes, longest, config.scheduler.max_num_batched_tokens)


def notes(options: EngineOptions, budget: Budget, found: Tuning) -> dict[str, Any]:
    """How the plan was found, for its file."""
    asked = {name: float(value) if isinstance(value, Fraction) else value for name, value in asdict(budget).items()}
    return {
        "model": options.model,
        "dtype": found.dtype,
        "asked": asked,
        "chosen": found.best.title,
        "judged": [asdict(row) for row in found.rows],
        "num_judge_tokens": found.num_judge_tokens,
        "expected_kl": [{side: dict(costs) for side, costs in layer.items()} for layer in found.costs],
        "num_tune_tokens": found.num_tune_tokens,
    }


def lines(options: EngineOptions, found: Tuning, path: Path) -> Iterator[str]:
    """The table, then what was written."""
    judged = f"{found.num_judge_tokens:,} tokens that nothing was fitted to"
    yield f"{options.model}: KL to a {found.dtype} cache, per token over {judged}"
    yield from _table(found.rows)
    if found.best is not found.rows[0]:
        yield f"{found.best.title} does better than what was tuned, and is what is written"
    runs: dict[str, list[str]] = {}
    for layer, name in enumerate(found.best.layers):
        runs.setdefault(name, []).append(str(layer))
    yield from (f"{name}: layers {' '.join(layers)}" for name, layers in runs.items())
    yield f"wrote {path}; use it: halfbyte serve {options.model} --kv-cache-plan {path}"


def _table(rows: Sequence[Judged]) -> Iterator[str]:
    cells = [["plan", "bits", "bytes of a block", "KL", "p99 KL"]]
    cells += [[row.title, f"{row.bits:.3f}", f"{row.block_bytes:,}", f"{row.kl:.4g}", f"{row.kl_p99:.4g}"] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
