"""The reference back end against attention written out query by query, on ragged batches over a poisoned cache.

Shape letters: T tokens, L context, H heads, G kv heads, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.attention import get_backend, reference
from halfbyte.kernels.attention.base import AttentionMetadata, AttentionSpec
from halfbyte.kvcache.formats import get_format
from halfbyte.kvcache.spec import KVCacheSpec
from halfbyte.kvcache.tensors import LayerCache, view_layer

BLOCK_SIZE = 8
# (tokens in this step, context length with them)
RAGGED = [(1, 1), (1, 37), (5, 5), (7, 20), (16, 16), (1, 64), (5, 50), (33, 33), (1, 9), (24, 40)]


@dataclass
class Sequence:
    """One request's whole K and V in float32 (as the cache's format holds them), and its blocks."""

    k_LGD: Tensor
    v_LGD: Tensor
    q_LHD: Tensor
    blocks: list[int]


class Batch:
    """Requests over one layer's cache, in which every byte that no request owns is NaN."""

    def __init__(self, spec: AttentionSpec, seq_lens: list[int], kv_format: str = "float32", seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.spec = spec
        kv_spec = KVCacheSpec(
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim_v,
            block_size=BLOCK_SIZE,
            sliding_window=spec.sliding_window,
            format=kv_format,
        )
        needed = [math.ceil(n / BLOCK_SIZE) for n in seq_lens]
        num_blocks = 1 + 2 * sum(needed)
        page_bytes = sum(plane.bytes for plane in get_format(kv_format).planes(kv_spec))
        self.cache: LayerCache = view_layer(torch.zeros(num_blocks, page_bytes, dtype=torch.uint8), kv_spec)
        self.poison(list(range(1, num_blocks)))
        ids = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
        self.sequences = []
        dtype = getattr(torch, kv_format)
        for n, count in zip(seq_lens, needed, strict=True):
            k_LGD = torch.randn(n, spec.num_kv_heads, spec.head_dim, generator=generator).to(dtype).float()
            v_LGD = torch.randn(n, spec.num_kv_heads, spec.head_dim_v, generator=generator).to(dtype).float()
            q_LHD = torch.randn(n, spec.num_heads, spec.head_dim, generator=generator)
            self.sequences.append(Sequence(k_LGD, v_LGD, q_LHD, [ids.pop() for _ in range(count)]))

    def poison(self, blocks: list[int]) -> None:
        for plane in self.cache.planes.values():
            plane[blocks] = torch.nan

    def slots(self, request: int, start: int, end: int) -> Tensor:
        blocks = self.sequences[request].blocks
        return torch.tensor([blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)], dtype=torch.int64)

    def fill(self, request: int, end: int) -> None:
        """Puts a request's first `end` positions into the cache, as earlier steps would have."""
        sequence = self.sequences[request]
        self.cache.format.write(sequence.k_LGD[:end], sequence.v_LGD[:end], self.cache, self.slots(request, 0, end))

    def slide(self, request: int, num_computed: int) -> None:
        """What the manager does to blocks that left the window: null in the table, memory handed to others (poisoned)."""
        if self.spec.sliding_window is None:
            return
        gone = max(0, num_computed - self.spec.sliding_window + 1) // BLOCK_SIZE
        blocks = self.sequences[request].blocks
        self.poison([b for b in blocks[:gone] if b])
        blocks[:gone] = [0] * gone

    def step(self, lens: list[tuple[int, int, int]], num_padding: int = 0) -> list[Tensor]:
        """Runs (request, query_len, seq_len) rows as one step; returns each row's output."""
        spec = self.spec
        q, k, v, slots = [], [], [], []
        for request, query_len, seq_len in lens:
            span = slice(seq_len - query_len, seq_len)
            sequence = self.sequences[request]
            q.append(sequence.q_LHD[span])
            k.append(sequence.k_LGD[span])
            v.append(sequence.v_LGD[span])
            slots.append(self.slots(request, seq_len - query_len, seq_len))
        for rows, heads, dim in (
            (q, spec.num_heads, spec.head_dim),
            (k, spec.num_kv_heads, spec.head_dim),
            (v, spec.num_kv_heads, spec.head_dim_v),
        ):
            rows.append(torch.full((num_padding, heads, dim), torch.nan, dtype=rows[0].dtype))
        slots.append(torch.full((num_padding,), -1))
        metadata = self.metadata(lens, torch.cat(slots))
        backend = get_backend("reference")
        backend.prepare(metadata, spec.sliding_window)
        out_THD = backend.forward(torch.cat(q), torch.cat(k), torch.cat(v), self.cache, metadata, spec)
        *outputs, padding = out_THD.split([*metadata.query_lens_host, num_padding])
        assert not padding.any()
        return outputs

    def metadata(self, lens: list[tuple[int, int, int]], slot_mapping: Tensor) -> AttentionMetadata:
        query_lens, seq_lens = [n for _, n, _ in lens], [n for _, _, n in lens]
        tables = [self.sequences[request].blocks for request, _, _ in lens]
        width = max(map(len, tables)) + 3
        garbage = len(self.cache.planes["k"]) - 1
        table = [blocks + [garbage] * (width - len(blocks)) for blocks in tables]
        return AttentionMetadata(
            query_start_loc=torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=torch.tensor(table, dtype=torch.int32),
            slot_mapping=slot_mapping,
            block_size=BLOCK_SIZE,
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            num_decodes=sum(n == 1 for n in query_lens),
        )

    def expected(self, request: int, query_len: int, seq_len: int) -> Tensor:
        """Attention written out: one query and one head at a time, in float64."""
        spec, sequence = self.spec, self.sequences[request]
        out = torch.empty(query_len, spec.num_heads, spec.head_dim_v, dtype=torch.float64)
        for i, position in enumerate(range(seq_len - query_len, seq_len)):
            first = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
            for head in range(spec.num_heads):
                kv_head = head // (spec.num_heads // spec.num_kv_heads)
                k_LD = sequence.k_LGD[first : position + 1, kv_head].double()
                v_LD = sequence.v_LGD[first : position + 1, kv_head].double()
                scores_L = spec.scale * (k_LD @ sequence.q_LHD[position, head].double())
                if spec.soft_cap is not None:
                    scores_L = spec.soft_cap * torch.tanh(scores_L / spec.soft_cap)
                out[i, head] = scores_L.softmax(0) @ v_LD
        return out


def _spec(heads: int = 3, kv_heads: int = 1, dim: int = 64, dim_v: int = 64, **kwargs: object) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, dim, dim_v, dim**-0.5, **kwargs)  # type: ignore[arg-type]


SPECS = {
    "gqa1": _spec(2, 2),
    "gqa3": _spec(6, 2),
    "gqa8": _spec(8, 1, 128, 128),
    "dim80": _spec(2, 1, 80, 80),
    "dim256": _spec(2, 1, 256, 256),
    "narrow-v": _spec(4, 2, 96, 64),
    "window5": _spec(3, 1, sliding_window=5),
    "window8": _spec(3, 1, sliding_window=8),
    "window1": _spec(3, 3, sliding_window=1),
    "window-longer-than-context": _spec(3, 1, sliding_window=1000),
    "cap": _spec(4, 2, soft_cap=1.5),
    "cap-window": _spec(4, 2, soft_cap=1.5, sliding_window=20),
}


def _run(spec: AttentionSpec, kv_format: str = "float32", num_padding: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    batch = Batch(spec, [n for _, n in RAGGED], kv_format)
    lens = [(i, query_len, seq_len) for i, (query_len, seq_len) in enumerate(RAGGED)]
    for request, query_len, seq_len in lens:
        batch.fill(request, seq_len - query_len)
        batch.slide(request, seq_len - query_len)
    return batch.step(lens, num_padding), [batch.expected(*row) for row in lens]


@pytest.mark.parametrize("name", SPECS)
def test_ragged_batch_equals_attention_written_out(name: str) -> None:
    for got, expected in zip(*_run(SPECS[name]), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_format", ["bfloat16", "float16", "float32"])
def test_plain_formats_are_read_through_their_law(kv_format: str) -> None:
    for got, expected in zip(*_run(SPECS["cap-window"], kv_format), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_padding_rows_are_ignored_and_zero() -> None:
    for got, expected in zip(*_run(SPECS["gqa3"], num_padding=7), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gqa3", "window5", "window8"])
@pytest.mark.parametrize("limits", [(1, 1), (64, 64), (300, 1 << 15)])
def test_tile_limits_do_not_change_the_result(name: str, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_TILE_SCORES", limits[0])
    monkeypatch.setattr(reference, "MAX_TILE_POSITIONS", limits[1])
    for got, expected in zip(*_run(SPECS[name]), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gqa3", "narrow-v", "window5", "window8", "cap-window"])
@pytest.mark.parametrize("chunk", [1, 7, 8, 40])
def test_chunked_prefill_equals_whole(name: str, chunk: int) -> None:
    spec, length = SPECS[name], 45
    (whole,) = Batch(spec, [length]).step([(0, length, length)])
    batch = Batch(spec, [length])
    chunks: list[Tensor] = []
    for end in [*range(chunk, length, chunk), length]:
        done = sum(map(len, chunks))
        batch.slide(0, done)
        chunks += batch.step([(0, end - done, end)])
    torch.testing.assert_close(torch.cat(chunks), whole, rtol=1e-5, atol=1e-6)


def test_a_neighbour_with_nan_keeps_it_to_itself() -> None:
    spec = SPECS["gqa3"]
    batch = Batch(spec, [30, 21, 30])
    batch.sequences[1].k_LGD[4] = torch.nan
    batch.sequences[1].v_LGD[4] = torch.nan
    batch.sequences[1].q_LHD[:] = torch.nan
    for request in range(3):
        batch.fill(request, 20)
    first, bad, last = batch.step([(0, 1, 21), (1, 1, 21), (2, 1, 21)])
    assert bad.isnan().all()
    for request, got in ((0, first), (2, last)):
        torch.testing.assert_close(got.double(), batch.expected(request, 1, 21), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["window5", "window8"])
def test_what_left_the_window_is_not_read_though_its_block_stays(name: str) -> None:
    spec = SPECS[name]
    assert spec.sliding_window is not None
    batch = Batch(spec, [n for _, n in RAGGED])
    lens = [(i, query_len, seq_len) for i, (query_len, seq_len) in enumerate(RAGGED)]
    for request, query_len, seq_len in lens:
        num_computed = seq_len - query_len
        batch.fill(request, num_computed)
        gone = batch.slots(request, 0, max(0, num_computed - spec.sliding_window + 1))
        for plane in batch.cache.planes.values():
            plane[gone // BLOCK_SIZE, :, gone % BLOCK_SIZE] = torch.nan
    for got, row in zip(batch.step(lens), lens, strict=True):
        torch.testing.assert_close(got.double(), batch.expected(*row), rtol=1e-5, atol=1e-5)


def test_queries_of_model_dtype_come_back_in_it() -> None:
    batch = Batch(SPECS["gqa3"], [12], "bfloat16")
    for sequence in batch.sequences:
        sequence.q_LHD = sequence.q_LHD.bfloat16()
    (got,) = batch.step([(0, 12, 12)])
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), batch.expected(0, 12, 12), rtol=1e-2, atol=1e-2)


def test_refuses_uneven_heads() -> None:
    backend = get_backend("reference")
    kv_spec = Batch(SPECS["gqa3"], [1]).cache.spec
    platform = None  # the reference back end runs anywhere and does not look
    assert backend.refuse(SPECS["gqa3"], kv_spec, platform) is None  # type: ignore[arg-type]
    assert "5 heads" in str(backend.refuse(_spec(5, 2), kv_spec, platform))  # type: ignore[arg-type]


def test_a_sink_takes_weight_and_has_no_value() -> None:
    batch = Batch(SPECS["gqa3"], [9])
    sequence, spec = batch.sequences[0], SPECS["gqa3"]
    batch.step([(0, 9, 9)])
    sinks_H = torch.linspace(-2, 3, spec.num_heads)
    metadata = batch.metadata([(0, 9, 9)], batch.slots(0, 0, 9))
    backend = get_backend("reference")
    backend.prepare(metadata, spec.sliding_window)
    kv = (sequence.q_LHD, sequence.k_LGD, sequence.v_LGD)
    plain_THD = backend.forward(*kv, batch.cache, metadata, spec)
    with_sinks_THD = backend.forward(*kv, batch.cache, metadata, replace(spec, sinks=True), sinks_H)
    k_LHD = sequence.k_LGD.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1)
    scores_HQL = torch.einsum("qhd,lhd->hql", sequence.q_LHD * spec.scale, k_LHD)
    scores_HQL = scores_HQL.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    total_QH = scores_HQL.exp().sum(-1).t()
    torch.testing.assert_close(with_sinks_THD, plain_THD * (total_QH / (total_QH + sinks_H.exp()))[..., None])
