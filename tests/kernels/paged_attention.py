"""One layer's attention over a paged cache, by several back ends: what each of them stored, and what attention makes of it.

Sequences have their first tokens apart or not; memory that no request owns is full of ones, which no format reads as a number.
Used by the tests of attention back ends, which say what must agree.

Shape letters: T tokens, L context, H heads, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec, FirstTokens
from halfbyte.kvcache.formats import get_format, page_bytes
from halfbyte.kvcache.scales import LayerScales
from halfbyte.kvcache.spec import KVCacheSpec, KVLayout, make_layout
from halfbyte.kvcache.tensors import KVTensors, LayerCache, LayerParts
from halfbyte.kvcache.turns import LayerTurns, all_turns
from halfbyte.platform import detect_platform

Requests = Sequence[tuple[int, int]]  # query length and context of each

MIXED: Requests = ((1, 150), (37, 37), (1, 1), (5, 90), (1, 16), (2, 131), (9, 12))


def random_turns(spec: KVCacheSpec, generator: torch.Generator) -> LayerTurns:
    """What calibration might have found."""
    shape = (spec.num_kv_heads, spec.head_dim, spec.head_dim)
    k_GDD = torch.eye(spec.head_dim) + 0.05 * torch.randn(shape, generator=generator)
    shift_GD = torch.randn(shape[:2], generator=generator)
    return LayerTurns(k_GDD=k_GDD, k_shift_GD=shift_GD, q_GDD=torch.linalg.inv(k_GDD).mT.contiguous())


@dataclass
class Paged:
    """One layer's cache of one back end, and the requests' tables in it."""

    cache: LayerCache
    layout: KVLayout
    metadata: AttentionMetadata
    slots: list[Tensor]  # of each request's whole context, -1 for first tokens
    first_slots: list[Tensor]


@dataclass(frozen=True)
class Case:
    """A layer and a step. dtype: of queries, keys and values."""

    name: str
    spec: AttentionSpec
    first_tokens: int = 0
    is_turned: bool = False
    requests: Requests = MIXED
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    query_scale: float = 1.0

    @property
    def kv_spec(self) -> KVCacheSpec:
        spec = self.spec
        sizes = (spec.num_kv_heads, spec.head_dim, spec.head_dim_v, self.block_size, spec.sliding_window)
        return KVCacheSpec(*sizes, self.name, self.first_tokens, first_format=str(self.dtype).removeprefix("torch."))


def make_paged(case: Case, backend: AttentionBackend, parts: LayerParts) -> Paged:
    layout = make_layout([replace(case.kv_spec, format=backend.arrange(case.kv_spec))], page_bytes)
    [group] = layout.groups
    counts = [group.num_entries(context) for _, context in case.requests]
    ids = iter((1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(7))).tolist())
    tensors = KVTensors(layout, 1 + sum(counts), "cpu", [(parts[0], None)])
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([next(ids) for _ in range(count)])
    cache = replace(tensors.layer(0), turns=parts[1])
    for plane in cache.planes.values():
        plane[1:].view(torch.uint8).fill_(0xFF)

    def slots(row: int, context: int, is_first: bool) -> Tensor:
        size = group.first_block_size if is_first else group.block_size
        places = [
            int(table[row, group.entry_of(p)]) * size + p % size if (p < group.first_tokens) == is_first else -1
            for p in range(context)
        ]
        return torch.tensor(places, dtype=torch.int64)

    main = [slots(row, context, is_first=False) for row, (_, context) in enumerate(case.requests)]
    first = [slots(row, context, is_first=True) for row, (_, context) in enumerate(case.requests)]
    queries = [num for num, _ in case.requests]
    own = zip(queries, main, first, strict=True)
    slot_mapping, first_mapping = (torch.cat(each) for each in zip(*((m[-n:], f[-n:]) for n, m, f in own), strict=True))
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *queries]).cumsum(0).int(),
        seq_lens=torch.tensor([context for _, context in case.requests], dtype=torch.int32),
        block_table=table,
        slot_mapping=slot_mapping,
        block_size=group.block_size,
        query_lens_host=queries,
        seq_lens_host=[context for _, context in case.requests],
        max_query_len=max(queries),
        max_seq_len=max(context for _, context in case.requests),
        num_decodes=queries.count(1),
        first=FirstTokens(group.first_tokens, group.first_block_size, first_mapping) if group.first_tokens else None,
    )
    return Paged(cache, layout, metadata, main, first)


def fill(case: Case, paged: Paged, history: list[tuple[Tensor, Tensor]]) -> None:
    """What earlier steps wrote: all but each request's queries, turned as the cache wants it."""
    cache = paged.cache
    for (num, _), (k_LGD, v_LGD), slots_L, first_L in zip(case.requests, history, paged.slots, paged.first_slots, strict=True):
        if cache.turns is not None:
            _, k_LGD, v_LGD = cache.turns.turn(k_LGD, k_LGD, v_LGD)
        cache.format.write(k_LGD[:-num], v_LGD[:-num], cache, slots_L[:-num])
        if cache.first is not None:
            cache.first.format.write(k_LGD[:-num], v_LGD[:-num], cache.first, first_L[:-num])


def stored(paged: Paged) -> list[Tensor]:
    """K and V of every request, main and first."""
    found = []
    for slots_L, first_L in zip(paged.slots, paged.first_slots, strict=True):
        if (slots_L >= 0).any():
            found += paged.cache.format.read(paged.cache, slots_L[slots_L >= 0][None])
        if paged.cache.first is not None:
            found += paged.cache.first.format.read(paged.cache.first, first_L[first_L >= 0][None])
    return found


def run(case: Case, *backends: AttentionBackend) -> list[tuple[list[Tensor], Tensor]]:
    """By each back end: what is stored, and the outputs [T, H, D of v]. Skips what the format refuses."""
    spec, kv_spec = case.spec, case.kv_spec
    if refusal := get_format(case.name).refuse(kv_spec, detect_platform("cpu")):
        pytest.skip(refusal.reason)
    generator = torch.Generator().manual_seed(3)
    scales = LayerScales(
        torch.rand(spec.num_kv_heads, generator=generator) + 0.5, torch.rand(spec.num_kv_heads, generator=generator) + 0.5, True
    )
    turns = LayerTurns()
    if case.is_turned:
        is_fitted = get_format(case.name).rotations[0] == "calibrated"
        found = all_turns(random_turns(kv_spec, generator) if is_fitted else None, get_format(case.name).rotations, kv_spec)
        assert found is not None
        turns = found
    history = [_sequence(case, row, context) for row, (_, context) in enumerate(case.requests)]
    q_THD, k_TGD, v_TGD = (
        torch.cat([one[i][-num:] for one, (num, _) in zip(history, case.requests, strict=True)]) for i in range(3)
    )
    sinks_H = torch.randn(spec.num_heads, generator=generator) if spec.sinks else None

    made = []
    for backend in backends:
        paged = make_paged(case, backend, (scales, turns))
        fill(case, paged, [(k_LGD, v_LGD) for _, k_LGD, v_LGD in history])
        backend.prepare(paged.metadata, spec.sliding_window)
        outputs = backend.forward(q_THD, k_TGD, v_TGD, paged.cache, paged.metadata, spec, sinks_H)
        made.append((stored(paged), outputs))
    return made


def _sequence(case: Case, row: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a request, which depend on nothing but its row."""
    spec, generator = case.spec, torch.Generator().manual_seed(100 + row)
    sizes = ((spec.num_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim_v))
    q_LHD, k_LGD, v_LGD = (torch.randn(context, *size, generator=generator).to(case.dtype) for size in sizes)
    return q_LHD * case.query_scale, k_LGD, v_LGD
