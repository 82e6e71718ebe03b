"""What a KV format is: which bytes a block holds, how K and V get into them, and how they come out again.

A format knows its planes and its arithmetic; it knows nothing of requests, schedulers or attention. `write` and `read` are
the law (plain PyTorch); fast kernels must agree with them. Called by attention back ends, sizing and the conformance suite.

Most formats treat K and V vector by vector: such a format is two codecs (`Side`) and an order of bytes (`coded.py`).

Shape letters: T tokens, R requests, L positions read, G kv heads, D head dim, B blocks, S block size, E bytes beside codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kvcache.spec import KVCacheSpec, Plane

if TYPE_CHECKING:
    from halfbyte.kvcache.tensors import LayerCache
    from halfbyte.platform import Platform

# How vectors are turned before they are stored: not at all, by a Hadamard matrix, by one with random signs, by one of 16 in each
# block of 16, or by a matrix that was calibrated for the model. Queries (for V: outputs) are turned by the inverse, so that
# attention is unchanged.
Rotation = Literal["none", "hadamard", "random_hadamard", "block_hadamard", "calibrated"]


@dataclass(frozen=True, slots=True)
class Side:
    """K or V of a format: its codec, and how its vectors are turned."""

    codec: Codec
    rotation: Rotation = "none"


class KVFormat(Protocol):
    """One way to keep K and V in a block. Stateless; `name` is its key in `FORMATS` or `ARRANGEMENTS`.

    A slot is block * block_size + offset. Slot 0 lies in the null block, which holds zeros only: `write` must keep it so.
    K and V arrive turned as `rotations` (of K, of V) say; what is read is turned, too. first_tokens: how many tokens at the
    beginning of each sequence are kept in the model's dtype unless the user says otherwise.
    """

    name: str
    first_tokens: int

    @property
    def sides(self) -> tuple[Side, Side] | None:
        """K's and V's; None where the two are not kept vector by vector."""
        ...

    @property
    def rotations(self) -> tuple[Rotation, Rotation]:
        """Of K and of V."""
        ...

    def planes(self, spec: KVCacheSpec) -> tuple[Plane, ...]:
        """The tensors that make up one layer's block, in memory order. A block's bytes are the sum of theirs."""
        ...

    def refuse(self, spec: KVCacheSpec, platform: Platform) -> Refusal | None:
        """Why this format cannot hold such a layer on this platform; None when it can."""
        ...

    def write(self, k_TGD: Tensor, v_TGD: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
        """Quantise and store one token per row at its slot (int64). Rows whose slot is -1 are skipped."""
        ...

    def read(self, cache: LayerCache, slots_RL: Tensor) -> tuple[Tensor, Tensor]:
        """Gather by slot (int64) and dequantise: (k_RLGD, v_RLGD). Slot 0 reads as zero."""
        ...


class Codec(Protocol):
    """How one vector of K or V becomes a code per number, and bytes beside them (scales). Each vector stands alone.

    bits: of a code; up to 8, codes are uint8; 16 and 32: the number's own bits, int16 or int32. uses_scale: whether `scale`
    matters, a positive float32 per kv head (real = stored * scale). extra_unit: bytes of each number beside the codes. Numbers
    that are not finite are stored as the greatest or as zero (NaN), by all codecs of at most 8 bits.
    """

    name: str
    bits: int
    uses_scale: bool
    extra_unit: int

    def extra_bytes(self, dim: int) -> int:
        """Bytes beside the codes, per vector."""
        ...

    def encode(self, x_D: Tensor, scale_1: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [..., D] and scale [..., 1] -> codes [..., D], extra uint8 [..., E]."""
        ...

    def decode(self, codes_D: Tensor, extra_E: Tensor, scale_1: Tensor) -> Tensor:
        """What `encode` made, back as float32 [..., D]. Zero codes with zero extra are zeros."""
        ...

    def refuse(self, dim: int) -> Refusal | None:
        """Why vectors of this length cannot be kept."""
        ...
