"""Which batches run as device graphs, of which sizes: arithmetic on the configuration and on what the back end can.

Batches of single tokens ("decode") and all others ("mixed") may be captured whole, in pieces between attention calls, or not at
all. Knows no device. Called by the runner before weights are read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from halfbyte.config import ExecutionConfig
from halfbyte.errors import Refusal, UnsupportedError

Kind = Literal["none", "piecewise", "full"]

# (decode, mixed) by vLLM's names
MODES: dict[str, tuple[Kind, Kind]] = {
    "none": ("none", "none"),
    "piecewise": ("piecewise", "piecewise"),
    "full": ("full", "full"),
    "full_decode_only": ("full", "none"),
    "full_and_piecewise": ("full", "piecewise"),
}
MAX_SIZE = 512


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """sizes: tokens that batches are padded to, ascending; reason: why these kinds."""

    decode: Kind
    mixed: Kind
    decode_sizes: tuple[int, ...]
    mixed_sizes: tuple[int, ...]
    reason: str

    @property
    def whole_decode_sizes(self) -> tuple[int, ...]:
        return self.decode_sizes if self.decode == "full" else ()

    @property
    def whole_mixed_sizes(self) -> tuple[int, ...]:
        return self.mixed_sizes if self.mixed == "full" else ()

    @property
    def piecewise_sizes(self) -> tuple[int, ...]:
        decode = self.decode_sizes if self.decode == "piecewise" else ()
        mixed = self.mixed_sizes if self.mixed == "piecewise" else ()
        return tuple(sorted({*decode, *mixed}))

    @property
    def is_empty(self) -> bool:
        return not (self.decode_sizes or self.mixed_sizes)

    def line(self) -> str:
        """For the start-up log."""
        if self.is_empty:
            return f"graphs: none; {self.reason}"
        parts = []
        for name, kind, sizes in (("decode", self.decode, self.decode_sizes), ("mixed", self.mixed, self.mixed_sizes)):
            count = "" if kind == "none" else f" of {len(sizes)} sizes up to {sizes[-1]} tokens"
            parts.append(f"{name} batches {kind}{count}")
        return f"graphs: {', '.join(parts)}; {self.reason}"


def plan_graphs(execution: ExecutionConfig, name: str, support: str, max_num_seqs: int, max_num_tokens: int) -> GraphPlan:
    """name, support: of the attention back end and its `graph_support`. UnsupportedError for what it cannot."""
    mode = execution.cudagraph_mode
    reason = "the model is compiled" if execution.compile != "none" else "as asked"
    if mode == "auto":
        mode = "piecewise" if support == "none" else "full_and_piecewise"
        reason = f"attention by {name} can be captured: {support}"
    decode, mixed = MODES[mode]
    for kind, needed, batches in ((decode, ("decode", "full"), "batches of single tokens"), (mixed, ("full",), "mixed batches")):
        if kind == "full" and support not in needed:
            raise UnsupportedError(
                Refusal(
                    f"--cudagraph-mode {mode} captures {batches} whole, which attention by {name} cannot be",
                    "leave it out, or use --cudagraph-mode piecewise",
                )
            )
    asked = execution.cudagraph_capture_sizes
    sizes = default_sizes(max_num_seqs, max_num_tokens) if asked is None else asked
    whole = sizes if asked is not None else tuple(sorted({*sizes, min(max_num_seqs, max_num_tokens)}))
    decode_sizes = whole[: bisect_left(whole, max_num_seqs) + 1]  # up to the first that holds them all
    return GraphPlan(
        decode=decode,
        mixed=mixed,
        decode_sizes=() if decode == "none" else decode_sizes,
        mixed_sizes=() if mixed == "none" else tuple(sizes),
        reason=reason,
    )


def default_sizes(max_num_seqs: int, max_num_tokens: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8th up to 256, every 16th up to twice the requests that run at once, at most `MAX_SIZE`."""
    most = min(2 * max_num_seqs, MAX_SIZE, max_num_tokens)
    return tuple(size for size in (1, 2, 4, *range(8, 256, 8), *range(256, MAX_SIZE + 1, 16)) if size <= most)


def size_for(sizes: Sequence[int], num_tokens: int) -> int | None:
    """The smallest that holds them; None where none does."""
    at = bisect_left(sizes, num_tokens)
    return sizes[at] if at < len(sizes) else None
