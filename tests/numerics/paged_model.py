"""A model over a paged cache, driven step by step: what the runner does, in the plainest form. Load through a fixture.

Memory that no request owns is NaN at all times, so that any read of it shows in the logits.

Shape letters: T tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfbyte.kernels.attention.base import AttentionMetadata
from halfbyte.kvcache.formats import get_format
from halfbyte.kvcache.spec import KVCacheSpec, make_layout
from halfbyte.kvcache.tensors import KVTensors
from halfbyte.model_runner.layers.context import ForwardContext
from halfbyte.model_runner.layers.model import Model


@dataclass
class Row:
    """One request: how many of its tokens are in the cache, and its block table per KV group."""

    num_computed_tokens: int
    block_ids: list[list[int]]


class PagedModel:
    """Requests are named by the caller; each step feeds some of them more tokens. The cache holds `num_tokens` of all.

    seats: of the requests that have an adapter.
    """

    def __init__(
        self, model: Model, *, kv_format: str = "float32", block_size: int = 4, num_tokens: int = 1024, num_requests: int = 16
    ) -> None:
        self.model = model
        self.block_size = block_size
        specs = [
            KVCacheSpec(
                num_kv_heads=s.num_kv_heads,
                head_dim=s.head_dim,
                head_dim_v=s.head_dim_v,
                block_size=block_size,
                sliding_window=s.sliding_window,
                format=kv_format,
            )
            for s in model.attention_specs()
        ]
        specs = [replace(spec, format=model.backend.arrange(spec)) for spec in specs]
        self.layout = make_layout(specs, lambda spec: sum(p.bytes for p in get_format(spec.format).planes(spec)))
        num_blocks = 1 + len(self.layout.groups) * (num_tokens // block_size + num_requests)
        tensors = KVTensors(self.layout, num_blocks, "cpu")
        self.caches = [tensors.layer(i) for i in range(len(specs))]
        self.free = list(range(1, num_blocks))
        self.rows: dict[str, Row] = {}
        self.seats: dict[str, int] = {}
        self._poison(self.free)

    @torch.inference_mode()
    def step(self, tokens: Mapping[str, Sequence[int]], *, keep: int | None = None) -> dict[str, Tensor]:
        """Feeds each request the given tokens in one ragged batch -> the logits [at most keep, V] of its last tokens."""
        metadata = [self._metadata(group, tokens) for group in range(len(self.layout.groups))]
        positions = [self.rows[name].num_computed_tokens + i for name, ids in tokens.items() for i in range(len(ids))]
        token_ids_T = torch.tensor([i for ids in tokens.values() for i in ids])
        seats = [self.seats.get(name, 0) for name, ids in tokens.items() for _ in ids]
        seat_T = torch.tensor(seats, dtype=torch.int32) if any(seats) else None
        context = ForwardContext(metadata, self.caches, self.layout.group_of_layer, seat_T=seat_T)
        hidden = self.model(token_ids_T, torch.tensor(positions), context)
        kept = [rows if keep is None else rows[-keep:] for rows in hidden.split([len(ids) for ids in tokens.values()])]
        logits = self.model.compute_logits(torch.cat(kept)).split([len(rows) for rows in kept])
        for name, ids in tokens.items():
            self.rows[name].num_computed_tokens += len(ids)
        return dict(zip(tokens, logits, strict=True))

    def release(self, name: str) -> None:
        for blocks in self.rows.pop(name).block_ids:
            self._release([b for b in blocks if b])

    def greedy(self, prompts: Mapping[str, Sequence[int]], num_tokens: int) -> dict[str, list[int]]:
        """Continues every prompt by `num_tokens`, all together, and releases them."""
        output: dict[str, list[int]] = {name: [] for name in prompts}
        fed: Mapping[str, Sequence[int]] = prompts
        for _ in range(num_tokens):
            for name, logits in self.step(fed, keep=1).items():
                output[name].append(int(logits[-1].argmax()))
            fed = {name: ids[-1:] for name, ids in output.items()}
        for name in prompts:
            self.release(name)
        return output

    def _metadata(self, group: int, tokens: Mapping[str, Sequence[int]]) -> AttentionMetadata:
        window = self.layout.groups[group].sliding_window
        tables, slots, seq_lens = [], [], []
        for name, ids in tokens.items():
            row = self.rows.setdefault(name, Row(0, [[] for _ in self.layout.groups]))
            blocks = row.block_ids[group]
            seq_len = row.num_computed_tokens + len(ids)
            if window is not None:
                self._slide(blocks, max(0, row.num_computed_tokens - window + 1) // self.block_size)
            while len(blocks) * self.block_size < seq_len:
                blocks.append(self.free.pop())
            new = range(row.num_computed_tokens, seq_len)
            slots += [blocks[p // self.block_size] * self.block_size + p % self.block_size for p in new]
            tables.append(blocks)
            seq_lens.append(seq_len)
        width = max(map(len, tables))
        query_lens = [len(ids) for ids in tokens.values()]
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in tables], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            block_size=self.block_size,
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            num_decodes=query_lens.count(1),
        )
        self.model.backend.prepare(metadata, window)
        return metadata

    def _slide(self, blocks: list[int], num_gone: int) -> None:
        self._release([b for b in blocks[:num_gone] if b])
        blocks[:num_gone] = [0] * num_gone

    def _release(self, blocks: list[int]) -> None:
        self._poison(blocks)
        self.free += blocks

    def _poison(self, blocks: list[int]) -> None:
        for cache in self.caches:
            for plane in cache.planes.values():
                plane[blocks] = torch.nan
