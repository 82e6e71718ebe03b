"""Which cut of the attention kernels is the fastest for a kind of layer: the candidates, and the choice among them.

Pure: what a cut takes is asked of a `LayerTimer`, which `layer_timer` makes on a GPU and tests fake. Knows no kernel and imports
neither torch nor triton. Called by `halfbyte.engine.preload`, never while serving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from halfbyte.kernels.triton.targets import SHARED_BYTES, Cut, Cuts
from halfbyte.kernels.triton.tiles import Choice, LayerKind, Measured

# Less than this is within what two measurements of one cut differ by: the built-in cut stays.
MIN_GAIN = 0.02

_DECODE_TILES, _DECODE_WARPS = (16, 32, 64), (1, 2, 4)
_PROMPT_ROWS, _PROMPT_TILES, _PROMPT_WARPS = (64, 128), (32, 64, 128), (4, 8)
_STAGES, _STAGES_AMD = (2, 3, 4), (1, 2)

# Of a layer's memory, and of tokens that are worth measuring: more of either changes no order of cuts.
_MAX_CACHE_BYTES, _MAX_REQUESTS, _MAX_CONTEXT, _MAX_QUERIES = 1 << 30, 64, 16384, 2048

# Times are of what a step of one layer takes, in seconds. None: such a cut cannot run, or gives other numbers.
Seconds = Callable[[Cut], float | None]


@dataclass(frozen=True, slots=True)
class Load:
    """The steps that are measured: `requests` that decode one token over `context` tokens each, and one prompt of `queries`
    tokens at the end of `prompt_context`. longest: tokens that any request of the server may have."""

    requests: int
    context: int
    queries: int
    prompt_context: int
    longest: int


class LayerTimer(Protocol):
    """One layer's cache and the two steps over it. built_in: its cuts without a table."""

    built_in: Cuts

    def decode_seconds(self, cut: Cut) -> float | None: ...

    def prompt_seconds(self, cut: Cut) -> float | None: ...


def make_load(max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int, token_bytes: int) -> Load:
    """As large as the engine's limits say, up to what is worth measuring. token_bytes: of one layer's K and V."""
    requests = min(max_num_seqs, _MAX_REQUESTS)
    longest = min(max_model_len, _MAX_CONTEXT)
    context = max(1, min(longest, _MAX_CACHE_BYTES // (requests * token_bytes)))
    return Load(requests, context, min(_MAX_QUERIES, max_num_batched_tokens, longest), longest, max_model_len)


def measure(kind: LayerKind, timer: LayerTimer, load: Load, architecture: str, vector_bytes: int) -> Measured:
    """The fastest cuts of one kind of layer. vector_bytes: of one kv head's K of a token."""
    built_in = timer.built_in
    decode = choose(built_in.decode, decode_candidates(architecture, built_in.decode, vector_bytes), timer.decode_seconds)
    prompt = choose(built_in.prompt, prompt_candidates(architecture, kind, vector_bytes), timer.prompt_seconds)
    return Measured(kind, decode, prompt, load.requests, load.context, load.queries, load.prompt_context)


def choose(built_in: Cut, candidates: Iterable[Cut], seconds: Seconds) -> Choice:
    """The fastest candidate, if it gains at least `MIN_GAIN` over the built-in cut; else that one."""
    built_in_s = seconds(built_in)
    assert built_in_s is not None, f"the built-in cut runs: {built_in}"
    best, best_s = built_in, built_in_s * (1 - MIN_GAIN)
    for cut in candidates:
        if cut != built_in and (found_s := seconds(cut)) is not None and found_s < best_s:
            best, best_s = cut, found_s
    return Choice(best, built_in_s if best == built_in else best_s, built_in, built_in_s)


def decode_candidates(architecture: str, built_in: Cut, vector_bytes: int) -> Iterator[Cut]:
    """Rows are what a kv head has."""
    for tile, num_warps, stages in product(_DECODE_TILES, _DECODE_WARPS, _stages(architecture)):
        cut = Cut(built_in.rows, tile, num_warps, stages)
        if shared_bytes(cut, vector_bytes) <= SHARED_BYTES[architecture]:
            yield cut


def prompt_candidates(architecture: str, kind: LayerKind, vector_bytes: int) -> Iterator[Cut]:
    """Those whose tiles hold at least all heads of one query."""
    for rows, tile, num_warps, stages in product(_PROMPT_ROWS, _PROMPT_TILES, _PROMPT_WARPS, _stages(architecture)):
        cut = Cut(rows, tile, num_warps, stages)
        if rows >= kind.heads and shared_bytes(cut, vector_bytes) <= SHARED_BYTES[architecture]:
            yield cut


def shared_bytes(cut: Cut, vector_bytes: int) -> int:
    """What a program needs at least: the tiles of keys that are on their way while one is multiplied.

    The compiler has the last word. Of 257 cuts that were compiled for sm80, sm90 and gfx942, this left out none that fits, and
    let 11 pass that need more (for queries, values and decoded numbers): those are left out when they are measured.
    """
    return (cut.stages - 1) * cut.tile * vector_bytes


def _stages(architecture: str) -> tuple[int, ...]:
    return _STAGES_AMD if architecture.startswith("gfx") else _STAGES
