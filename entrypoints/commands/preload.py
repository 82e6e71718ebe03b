"""`halfbyte preload MODEL`: fetch, compile and calibrate ahead all that a start would otherwise do while users wait.

Knows the flags and the terminal; `halfbyte.engine.preload` does the work. docs/preload.md says what is made and where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from halfbyte.engine.preload import Preloaded, Tuned, autotune, preload
from halfbyte.entrypoints.bench.shared_flags import MODEL
from halfbyte.entrypoints.flag_table import ENGINE_FLAGS, LOG_LEVEL, REFUSED_FLAGS, engine_options
from halfbyte.entrypoints.flags import Flag, parse
from halfbyte.log import note

FLAGS = (
    MODEL,
    Flag(name="autotune", help="on a GPU: measure how the attention kernels are best cut, and keep that", kind="switch"),
    LOG_LEVEL,
    *ENGINE_FLAGS,
)


def run(argv: Sequence[str]) -> int:
    parsed = parse("preload", "Make ahead what a start with the same flags would make.", FLAGS, argv, REFUSED_FLAGS)
    options = engine_options(parsed)
    tuned = autotune(options, note) if parsed.command.get("autotune") else None
    made = preload(options, note)
    for line in (*(_tuned_lines(tuned) if tuned else ()), *_lines(made)):
        print(line)
    return 0


def _tuned_lines(tuned: Tuned) -> Iterator[str]:
    yield f"attention tiles: {tuned.path}"
    for each in tuned.table.measured:
        kind = each.kind
        yield f"  {kind.heads} heads per kv head of {kind.head_dim} numbers, {kind.kv_format} KV, {kind.dtype}"
        for name, choice in (("decode", each.decode), ("prompt", each.prompt)):
            times = f"{choice.seconds * 1e6:.1f} us, built in {choice.built_in_seconds * 1e6:.1f} us"
            cut = choice.cut
            size = f"{cut.rows} rows, {cut.tile} tokens, {cut.num_warps} warps, {cut.stages} stages"
            yield f"    {name}: {size}: {times}{' (the built-in cut)' if cut == choice.built_in else ''}"


def _lines(made: Preloaded) -> Iterator[str]:
    yield f"model: {made.model}"
    for place in made.places:
        if place.num_before or place.num_made:
            yield f"{place.name}: {place.path}: {place.num_made} files made, {place.num_before} were there"
    yield from (line for line in made.report if line.startswith(("kernels:", "attention tiles:", "KV calibration:")))
    if any(name == "capture graphs" for name, _ in made.next_phases):
        yield "device graphs: captured at each start, since they live in its process"
    before = dict(made.phases)
    yield f"{'part of a start':<40} {'now':>9} {'next time':>9}"
    for name, seconds in made.next_phases:
        yield f"  {name:<38} {before.get(name, 0):7.2f} s {seconds:7.2f} s"
    yield f"  {'together':<38} {sum(before.values()):7.2f} s {sum(s for _, s in made.next_phases):7.2f} s"
