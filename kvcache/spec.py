"""What one layer's KV cache is, and how layers share one pool of blocks.

Pure arithmetic on small frozen values; knows no torch, no memory and no requests. Formats (`kvcache/formats`) say which
planes a block has; `make_layout` groups the layers so that any block id can serve any group; sizing, the block pool's
manager, the tensors and the runner read the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log2, prod

from halfbyte.errors import Refusal, UnsupportedError

_ITEM_BYTES = {
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a block, for one layer: "k", "v" or scales. `shape` is that of one block; `dtype` is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The KV cache of one layer. sliding_window w: a token at position p attends to p - w + 1 .. p; None: to all before it.

    first_tokens: so many tokens at the beginning of a sequence are kept in `first_format` instead; all layers of a model agree.
    """

    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    block_size: int
    sliding_window: int | None
    format: str
    first_tokens: int = 0
    first_format: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of one kind that share a block table. `layers[i]` (the model's layer index) uses cache position i.

    An entry of the table is a block of `block_size` tokens, except that the first `first_tokens` of a sequence take so much more
    room that a block holds only `first_block_size` of them.
    """

    layers: tuple[int, ...]
    sliding_window: int | None
    block_size: int
    first_tokens: int = 0
    first_block_size: int = 1

    @property
    def entry_shift(self) -> int:
        """By how much a token's entry lies behind `position // block_size`, after the first tokens."""
        return self.first_tokens // self.first_block_size - self.first_tokens // self.block_size

    def entry_of(self, position: int) -> int:
        """The table's entry that holds the token at `position`."""
        if position < self.first_tokens:
            return position // self.first_block_size
        return self.entry_shift + position // self.block_size

    def num_entries(self, num_tokens: int) -> int:
        """How long the table of so many tokens is."""
        return self.entry_of(num_tokens - 1) + 1 if num_tokens > 0 else 0


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How all layers share one pool: block b of group g is the bytes of block b at positions 0 .. len(g.layers) - 1.

    specs: of each layer, with the block size of its group. position_bytes: of one block, by position (the widest layer there
    counts). unit_tokens: a multiple of all groups' block sizes; prefixes are shared in such units.
    Without groups nothing is kept.
    """

    groups: tuple[KVGroup, ...]
    specs: tuple[KVCacheSpec, ...]
    position_bytes: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """One block at all positions."""
        return sum(self.position_bytes)

    @property
    def unit_tokens(self) -> int:
        return max((max(group.block_size, group.first_tokens) for group in self.groups), default=1)

    @property
    def group_of_layer(self) -> list[int]:
        """For each layer of the model, the index of its group."""
        owner = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        return [owner[layer] for layer in range(len(owner))]


def make_layout(specs: Sequence[KVCacheSpec], page_bytes: Callable[[KVCacheSpec], int]) -> KVLayout:
    """Group the layers; `specs[i]` is layer i, `page_bytes` the bytes of one block of one layer.

    Layers of one window are of one kind. A kind that takes fewer bytes per token gets longer blocks, by the power of two that
    makes the blocks of all kinds most alike: what is saved per token is not lost to padding. The group size is the smallest
    kind's layer count, or the largest's when that is less than half as much again (a few unused pages cost less than twice the
    block tables). A kind's layers are dealt out evenly over its groups, the wide ones first, so that like lies beside like.
    Full attention comes first, then kinds in the order of their first layer. UnsupportedError when a block is too small for one
    of the first tokens.
    """
    assert specs, "a model needs at least one layer with a KV cache"
    assert len({(spec.block_size, spec.first_tokens) for spec in specs}) == 1, "all layers share one block size"
    kinds: dict[int | None, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec.sliding_window, []).append(layer)
    kind_bytes = {window: sum(page_bytes(specs[i]) for i in layers) / len(layers) for window, layers in kinds.items()}
    counts = [len(layers) for layers in kinds.values()]
    group_size = max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)
    groups, sized = [], list(specs)
    for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] is not None):
        block_size = specs[0].block_size * _nearest_power_of_two(max(kind_bytes.values()) / kind_bytes[window])
        for layer in layers:
            sized[layer] = replace(specs[layer], block_size=block_size)
        widest_first = sorted(layers, key=lambda layer: -page_bytes(sized[layer]))
        num_groups = -(-len(layers) // group_size)
        for i in range(num_groups):
            mine = tuple(widest_first[i::num_groups])
            first_block_size = min(_first_block_size(sized[layer], page_bytes) for layer in mine)
            groups.append(KVGroup(mine, window, block_size, specs[0].first_tokens, first_block_size))
    position_bytes = [
        max(page_bytes(sized[group.layers[i]]) for group in groups if i < len(group.layers))
        for i in range(max(len(group.layers) for group in groups))
    ]
    return KVLayout(tuple(groups), tuple(sized), tuple(position_bytes))


def _nearest_power_of_two(ratio: float) -> int:
    return 1 << max(0, round(log2(ratio)))


def _first_block_size(spec: KVCacheSpec, page_bytes: Callable[[KVCacheSpec], int]) -> int:
    """How many of the first tokens fit into a block: a power of two that divides their number, 1 where there are none."""
    if not spec.first_tokens:
        return 1
    token_bytes = page_bytes(replace(spec, block_size=1, format=spec.first_format))
    fit = page_bytes(spec) // token_bytes
    if not fit:
        reason = (
            f"a block of {spec.block_size} tokens of {spec.format} KV holds none of the first {spec.first_tokens} tokens, "
            f"which stay in {spec.first_format}"
        )
        raise UnsupportedError(Refusal(reason, "use --block-size 16"))
    return min(1 << (fit.bit_length() - 1), spec.first_tokens & -spec.first_tokens)
