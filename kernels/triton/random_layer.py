"""One layer's paged cache full of random numbers, blocks anywhere, for kernels to be timed on.

Numbers go through the writer: random bytes would be no numbers. Knows formats and layouts; called by `layer_timer` and by
benchmarks.

Shape letters: R requests, B entries of a block table, G kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from halfbyte.kernels.triton import kv_write
from halfbyte.kvcache.formats import get_format, page_bytes
from halfbyte.kvcache.spec import KVCacheSpec, KVGroup, make_layout
from halfbyte.kvcache.tensors import KVTensors, LayerCache
from halfbyte.kvcache.turns import LayerTurns, all_turns

_FILL_TOKENS = 4096


class RandomLayer:
    """cache: with room for `requests` of `context` tokens. group: how its tables are to be read.

    dtype: of K and V before they are stored.
    """

    def __init__(self, kv_spec: KVCacheSpec, requests: int, context: int, dtype: torch.dtype, device: torch.device) -> None:
        layout = make_layout([kv_spec], page_bytes)
        [self.group] = layout.groups
        num_blocks = requests * self.group.num_entries(context)
        generator = torch.Generator().manual_seed(0)
        self._ids = (1 + torch.randperm(num_blocks, generator=generator)).int().to(device)
        cache = KVTensors(layout, 1 + num_blocks, device).layer(0)
        self.cache = replace(cache, turns=_turns(kv_spec, device))
        _fill(self.cache, self._ids, dtype)
        if self.cache.first is not None:
            _clear_first_tokens(self.cache.first, self.group, self.tables(requests, context))

    def tables(self, requests: int, context: int) -> Tensor:
        """Block tables [R, B]. The first row of few entries is the beginning of that of many."""
        entries = self.group.num_entries(context)
        return self._ids[: requests * entries].view(requests, entries)


def _clear_first_tokens(first: LayerCache, group: KVGroup, table_RB: Tensor) -> None:
    """Their blocks hold bytes of another format, which might be no numbers in this one: zeros are."""
    blocks = table_RB[:, : group.first_tokens // group.first_block_size].flatten().long()
    for plane in first.planes.values():
        plane[blocks] = 0


def _turns(spec: KVCacheSpec, device: torch.device) -> LayerTurns | None:
    """As a calibrated model has them: any matrices do."""
    rotations = get_format(spec.format).rotations
    found = None
    if rotations[0] == "calibrated":
        matrix_GDD = torch.eye(spec.head_dim).expand(spec.num_kv_heads, -1, -1).contiguous()
        shift_GD = torch.zeros(spec.num_kv_heads, spec.head_dim)
        found = LayerTurns(k_GDD=matrix_GDD, k_shift_GD=shift_GD, q_GDD=matrix_GDD)
    made = all_turns(found, rotations, spec)
    return None if made is None else made.to(device)


def _fill(cache: LayerCache, ids: Tensor, dtype: torch.dtype) -> None:
    spec, device = cache.spec, ids.device
    for part in ids.long().split(max(1, _FILL_TOKENS // spec.block_size)):
        slots_T = (part[:, None] * spec.block_size + torch.arange(spec.block_size, device=device)).flatten()
        k_TGD = torch.randn(len(slots_T), spec.num_kv_heads, spec.head_dim, device=device).to(dtype)
        v_TGD = torch.randn(len(slots_T), spec.num_kv_heads, spec.head_dim_v, device=device).to(dtype)
        kv_write.write(k_TGD, v_TGD, cache, slots_T)
