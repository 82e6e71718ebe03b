"""What an attention back end is, and the description of a ragged batch that it works from.

Metadata is made once per step and KV group by the runner; `prepare` adds whatever the back end wants to compute once for
all layers of the group. `forward` then runs per layer. A back end knows KV formats; it knows nothing of requests or models.

Shape letters: T tokens, R requests, H heads, G kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from halfbyte.errors import Refusal

if TYPE_CHECKING:
    from halfbyte.kvcache.spec import KVCacheSpec
    from halfbyte.kvcache.tensors import LayerCache
    from halfbyte.platform import Platform


@dataclass(slots=True)
class FirstTokens:
    """The first `count` positions of every sequence, which lie in blocks of `block_size` at the head of its table."""

    count: int
    block_size: int
    slot_mapping: Tensor  # int64 [T]: where these tokens' K/V goes, in `LayerCache.first`; -1 for all others


@dataclass(slots=True)
class AttentionMetadata:
    """A ragged batch: request r owns tokens query_start_loc[r] .. query_start_loc[r + 1] of the step, the last of its context.

    The host lists repeat the device tensors, so that nothing has to be read back. Batches may be padded: T may exceed
    sum(query_lens_host), and rows beyond len(seq_lens_host) are ignored.
    """

    query_start_loc: Tensor  # int32 [R + 1]
    seq_lens: Tensor  # int32 [R]: context length, this step's tokens included
    block_table: Tensor  # int32 [R, max entries]; 0 (the null block) where a block slid out of the window
    slot_mapping: Tensor  # int64 [T]: where each token's K/V goes; -1 = nowhere, or see `first`
    block_size: int
    query_lens_host: list[int]
    seq_lens_host: list[int]
    max_query_len: int
    max_seq_len: int
    num_decodes: int  # requests with one token in this step
    group: int = 0  # which KV group of the layout this is
    max_context_len: int = 0  # that any sequence of this run may have
    first: FirstTokens | None = None  # where the first tokens of sequences are kept apart
    plan: Any = None  # what the back end's `prepare` made


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention. `sliding_window` w: position p sees p - w + 1 .. p. `soft_cap` c: scores become c * tanh(s / c).

    sinks: each head has a score of its own that takes part in the softmax and has no value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False


class AttentionBackend(Protocol):
    """One way to compute attention over the paged cache.

    graph_support: "none", "decode" (batches of single tokens can be
    captured in a device graph) or "full".
    """

    name: str
    graph_support: str

    def has_reader(self, kv_format: str) -> bool:
        """Whether it reads this format by code of its own, faster than through the law."""
        ...

    def arrange(self, kv_spec: KVCacheSpec) -> str:
        """How this back end wants the cache of such a layer arranged: `kv_spec.format` itself, or one of `ARRANGEMENTS`."""
        ...

    def refuse(self, spec: AttentionSpec, kv_spec: KVCacheSpec, platform: Platform) -> Refusal | None:
        """Why this back end cannot run such a layer here; None when it can."""
        ...

    def prepare(self, metadata: AttentionMetadata, window: int | None) -> None:
        """Sets `metadata.plan`; once per step and KV group, whose layers share `window`."""
        ...

    def forward(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Writes K and V through the cache's format, then attends. Returns out_THD (v head dim) in q's dtype.

        sinks_H: float32, for a spec with sinks.
        """
        ...
