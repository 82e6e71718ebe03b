"""What a KV format is: which bytes a block holds, how K and V get into them, and how they come out again.

A format knows its planes and its arithmetic; it knows nothing of requests, schedulers or attention. `write` and `read` are
the law (plain PyTorch); fast kernels must agree with them. Called by attention back ends, sizing and the conformance suite.

Shape letters: T tokens, R requests, L positions read, G kv heads, D head dim, B blocks, S block size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kvcache.spec import KVCacheSpec, Plane

if TYPE_CHECKING:
    from halfbyte.kvcache.tensors import LayerCache
    from halfbyte.platform import Platform


class KVFormat(Protocol):
    """One way to keep K and V in a block. Stateless; `name` is its key in `FORMATS` or `ARRANGEMENTS`.

    A slot is block * block_size + offset. Slot 0 lies in the null block, which holds zeros only: `write` must keep it so.
    """

    name: str

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
