"""The compiled attention over every KV format against the law: what is stored, bit for bit, and what attention makes of it.

Sequences have their first tokens apart or not; memory that no request owns is full of ones, which no format reads as a number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.attention import get_backend
from halfbyte.kernels.attention.base import AttentionMetadata, AttentionSpec, FirstTokens
from halfbyte.kernels.cpu.library import CpuEngine, KernelsMissing, instruction_sets
from halfbyte.kvcache.formats import FORMATS, get_format
from halfbyte.kvcache.scales import LayerScales
from halfbyte.kvcache.spec import KVCacheSpec, KVLayout, make_layout
from halfbyte.kvcache.tensors import KVTensors, LayerCache, LayerParts
from halfbyte.kvcache.turns import LayerTurns, all_turns
from halfbyte.platform import detect_platform

try:
    instruction_sets()
except KernelsMissing as reason:
    pytest.skip(str(reason), allow_module_level=True)

# query length and context of each request
REQUESTS = ((1, 150), (37, 37), (1, 1), (5, 90), (1, 16), (2, 131), (9, 12))
NAMES = [name for name in FORMATS if not name.endswith("_mla")]
NAMES += ["k:fp8,v:nvfp4", "k:kv5,v:bfloat16", "k:float16,v:int4_per_token_head", "k:kv4,v:kv6"]
SPECS = {
    "grouped": AttentionSpec(9, 3, 64, 64, 0.125),
    "window": AttentionSpec(4, 4, 80, 96, 0.1, sliding_window=40),
    "capped": AttentionSpec(8, 1, 128, 128, 0.08, soft_cap=20.0),
    "wide": AttentionSpec(4, 1, 256, 256, 0.06),
    "sinks": AttentionSpec(8, 2, 64, 64, 0.125, sliding_window=100, sinks=True),
}


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


def page_bytes(spec: KVCacheSpec) -> int:
    return sum(plane.bytes for plane in get_format(spec.format).planes(spec))


def make_paged(spec: AttentionSpec, kv_spec: KVCacheSpec, backend: str, parts: LayerParts) -> Paged:
    layout = make_layout([replace(kv_spec, format=get_backend(backend).arrange(kv_spec))], page_bytes)
    [group] = layout.groups
    counts = [group.num_entries(context) for _, context in REQUESTS]
    ids = iter((1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(7))).tolist())
    tensors = KVTensors(layout, 1 + sum(counts), "cpu", [(parts[0], None)])
    table = torch.zeros(len(REQUESTS), max(counts), dtype=torch.int32)
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

    main = [slots(row, context, is_first=False) for row, (_, context) in enumerate(REQUESTS)]
    first = [slots(row, context, is_first=True) for row, (_, context) in enumerate(REQUESTS)]
    queries = [num for num, _ in REQUESTS]
    own = zip(queries, main, first, strict=True)
    slot_mapping, first_mapping = (torch.cat(each) for each in zip(*((m[-n:], f[-n:]) for n, m, f in own), strict=True))
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *queries]).cumsum(0).int(),
        seq_lens=torch.tensor([context for _, context in REQUESTS], dtype=torch.int32),
        block_table=table,
        slot_mapping=slot_mapping,
        block_size=group.block_size,
        query_lens_host=queries,
        seq_lens_host=[context for _, context in REQUESTS],
        max_query_len=max(queries),
        max_seq_len=max(context for _, context in REQUESTS),
        num_decodes=queries.count(1),
        first=FirstTokens(group.first_tokens, group.first_block_size, first_mapping) if group.first_tokens else None,
    )
    return Paged(cache, layout, metadata, main, first)


def fill(paged: Paged, history: list[list[Tensor]]) -> None:
    """What earlier steps wrote: all but each request's queries, turned as the cache wants it."""
    cache = paged.cache
    for (num, _), (k_LGD, v_LGD), slots_L, first_L in zip(REQUESTS, history, paged.slots, paged.first_slots, strict=True):
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


CASES = [(name, shape, first) for name in NAMES for shape, first in (("grouped", 16), ("wide", 0), ("window", 16))]
CASES += [(name, shape, first) for name in ("fp8_e4m3", "kv5") for shape in ("capped", "sinks") for first in (0, 16)]


@pytest.mark.parametrize(("name", "shape", "first_tokens"), CASES)
def test_outputs_and_cache_are_those_of_the_law(name: str, shape: str, first_tokens: int) -> None:
    """Without the format's turns, which would differ in their last bits."""
    law, fast = run(name, SPECS[shape], first_tokens, is_turned=False)
    assert all(torch.equal(x, y) for x, y in zip(law[0], fast[0], strict=True))
    torch.testing.assert_close(fast[1], law[1], rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("isa", instruction_sets()[1:])
@pytest.mark.parametrize(
    "name", ["kv5", "kv6", "k:fp8,v:int8_per_token_head", "ultraquant_4bit", "turboquant_4bit_nc", "int4_per_token_head"]
)
def test_other_instruction_sets_too(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.kernels.attention.cpu._engine", lambda num_threads: CpuEngine(num_threads, isa))
    law, fast = run(name, SPECS["grouped"], 16, is_turned=False)
    assert all(torch.equal(x, y) for x, y in zip(law[0], fast[0], strict=True))
    torch.testing.assert_close(fast[1], law[1], rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("first_tokens", [0, 16])
@pytest.mark.parametrize("shape", ["grouped", "wide"])
@pytest.mark.parametrize("name", ["kv4", "ultraquant_4bit", "int4_per_token_head"])
def test_turned_heads_are_those_of_the_law(name: str, shape: str, first_tokens: int) -> None:
    law, fast = run(name, SPECS[shape], first_tokens, is_turned=True)
    for x, y in zip(law[0], fast[0], strict=True):
        assert ((x - y).abs() > 1e-4 * x.abs().max()).float().mean() < 0.01, "now and then a code differs"
    torch.testing.assert_close(fast[1], law[1], rtol=5e-3, atol=5e-3)


def run(name: str, spec: AttentionSpec, first_tokens: int, *, is_turned: bool) -> list[tuple[list[Tensor], Tensor]]:
    """By the law and by the compiled kernels: what is stored, and the outputs."""
    kv_spec = KVCacheSpec(
        spec.num_kv_heads, spec.head_dim, spec.head_dim_v, 16, spec.sliding_window, name, first_tokens, first_format="float32"
    )
    if refusal := get_format(name).refuse(kv_spec, detect_platform("cpu")):
        pytest.skip(refusal.reason)
    generator = torch.Generator().manual_seed(3)
    scales = LayerScales(
        torch.rand(spec.num_kv_heads, generator=generator) + 0.5, torch.rand(spec.num_kv_heads, generator=generator) + 0.5, True
    )
    turns = LayerTurns()
    if is_turned:
        is_fitted = get_format(name).rotations[0] == "calibrated"
        found = all_turns(random_turns(kv_spec, generator) if is_fitted else None, get_format(name).rotations, kv_spec)
        assert found is not None
        turns = found
    history = [
        [torch.randn(context, spec.num_kv_heads, dim, generator=generator) for dim in (spec.head_dim, spec.head_dim_v)]
        for _, context in REQUESTS
    ]
    new = [torch.cat([one[i][-num:] for one, (num, _) in zip(history, REQUESTS, strict=True)]) for i in (0, 1)]
    q_THD = torch.randn(new[0].shape[0], spec.num_heads, spec.head_dim, generator=generator)
    sinks_H = torch.randn(spec.num_heads, generator=generator) if spec.sinks else None

    made = []
    for backend in ("reference", "cpu"):
        paged = make_paged(spec, kv_spec, backend, (scales, turns))
        assert get_backend(backend).refuse(spec, paged.cache.spec, detect_platform("cpu")) is None
        fill(paged, history)
        get_backend(backend).prepare(paged.metadata, spec.sliding_window)
        outputs = get_backend(backend).forward(q_THD, *new, paged.cache, paged.metadata, spec, sinks_H)
        made.append((stored(paged), outputs))
    return made
