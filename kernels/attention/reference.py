"""Attention over the paged cache in plain PyTorch: the law, and the back end that runs everywhere.

Prefill, chunked prefill and decode take one path. `prepare` cuts the step's queries into tiles of equal query length and
lists for each tile the cache slots that it reads; every padding position points to slot 0, the null block's zero slot, so no
memory outside a request's own context is ever touched. `forward` runs the tiles, in float32.

Shape letters: T tokens, R requests of a tile, Q queries per request, L context positions, H heads, G kv heads,
N = H / G heads per kv head, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kernels.attention.base import AttentionMetadata, AttentionSpec

if TYPE_CHECKING:
    from halfbyte.kvcache.spec import KVCacheSpec
    from halfbyte.kvcache.tensors import LayerCache
    from halfbyte.platform import Platform

# R * Q * L of a tile: 64 MiB of float32 scores at 64 heads. R * L: 256 MiB of float32 K and V at 8 heads of 128.
MAX_TILE_SCORES = 1 << 18
MAX_TILE_POSITIONS = 1 << 15


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive queries of one request: the token row and position of the first, and the context [start, end) they see."""

    num_queries: int
    request: int
    row: int
    position: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Tile:
    """R pieces of Q queries each. hidden marks the scores that do not count; None when all do.

    first_slots: in `LayerCache.first`, -1 for all but the first tokens; None where these are kept like others.
    """

    rows: Tensor  # int64 [R * Q]: where the queries and outputs lie among the step's tokens
    slots_RL: Tensor  # int64
    first_slots_RL: Tensor | None  # int64
    hidden_RQL: Tensor | None  # bool


class ReferenceBackend:
    """Correct first. Reads any KV format through its law, so it has a fast reader for none."""

    name = "reference"
    graph_support = "none"

    def has_reader(self, kv_format: str) -> bool:
        return False

    def arrange(self, kv_spec: KVCacheSpec) -> str:
        return kv_spec.format

    def refuse(self, spec: AttentionSpec, kv_spec: KVCacheSpec, platform: Platform) -> Refusal | None:
        if spec.num_heads % spec.num_kv_heads:
            return Refusal(f"{spec.num_heads} heads cannot share {spec.num_kv_heads} kv heads evenly", "")
        return None

    def prepare(self, metadata: AttentionMetadata, window: int | None) -> None:
        metadata.plan = [_tile(pieces, metadata, window) for pieces in _pack(_pieces(metadata, window))]

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
        assert spec.sinks is (sinks_H is not None), "a spec with sinks comes with their values"
        dtype = q_THD.dtype
        if cache.turns is not None:
            q_THD, k_TGD, v_TGD = cache.turns.turn(q_THD, k_TGD, v_TGD)
        cache.format.write(k_TGD, v_TGD, cache, metadata.slot_mapping)
        if cache.first is not None and metadata.first is not None:
            cache.first.format.write(k_TGD, v_TGD, cache.first, metadata.first.slot_mapping)
        out_THD = q_THD.new_zeros(q_THD.shape[0], spec.num_heads, spec.head_dim_v)
        for tile in metadata.plan:
            k_RLGD, v_RLGD = _read(cache, tile)
            out_THD[tile.rows] = attend(q_THD[tile.rows], k_RLGD, v_RLGD, tile.hidden_RQL, spec, sinks_H).to(q_THD.dtype)
        return out_THD if cache.turns is None else cache.turns.turn_back(out_THD).to(dtype)


def _read(cache: LayerCache, tile: Tile) -> tuple[Tensor, Tensor]:
    k_RLGD, v_RLGD = cache.format.read(cache, tile.slots_RL)
    if cache.first is None or tile.first_slots_RL is None:
        return k_RLGD, v_RLGD
    is_first_RL11 = (tile.first_slots_RL >= 0)[..., None, None]
    k_first_RLGD, v_first_RLGD = cache.first.format.read(cache.first, tile.first_slots_RL.clamp(min=0))
    return torch.where(is_first_RL11, k_first_RLGD, k_RLGD), torch.where(is_first_RL11, v_first_RLGD, v_RLGD)


def attend(
    q_THD: Tensor,
    k_RLGD: Tensor,
    v_RLGD: Tensor,
    hidden_RQL: Tensor | None,
    spec: AttentionSpec,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(cap(scale * q k^T)) v of one tile, T = R * Q -> [T, H, D of v] in float32. Sinks join the softmax uncapped."""
    num_requests, length, num_kv_heads, _ = k_RLGD.shape
    group = spec.num_heads // num_kv_heads
    q_RQGND = (q_THD.float() * spec.scale).view(num_requests, -1, num_kv_heads, group, spec.head_dim)
    num_queries = q_RQGND.shape[1]
    q_RGMD = q_RQGND.permute(0, 2, 3, 1, 4).reshape(num_requests, num_kv_heads, group * num_queries, spec.head_dim)
    scores_RGML = q_RGMD @ k_RLGD.permute(0, 2, 3, 1).float()
    if spec.soft_cap is not None:
        scores_RGML = torch.tanh(scores_RGML / spec.soft_cap) * spec.soft_cap
    if hidden_RQL is not None:
        scores_RGNQL = scores_RGML.view(num_requests, num_kv_heads, group, num_queries, length)
        scores_RGNQL.masked_fill_(hidden_RQL[:, None, None], -torch.inf)
    if sinks_H is None:
        weights_RGML = scores_RGML.softmax(-1)
    else:
        sinks_GM1 = sinks_H.float().view(num_kv_heads, group, 1).expand(-1, -1, num_queries).reshape(num_kv_heads, -1, 1)
        weights_RGML = torch.cat((scores_RGML, sinks_GM1.expand(num_requests, -1, -1, -1)), -1).softmax(-1)[..., :-1]
    out_RGMD = weights_RGML @ v_RLGD.transpose(1, 2).float()
    out_RGNQD = out_RGMD.view(num_requests, num_kv_heads, group, num_queries, spec.head_dim_v)
    return out_RGNQD.permute(0, 3, 1, 2, 4).reshape(-1, spec.num_heads, spec.head_dim_v)


def _pieces(metadata: AttentionMetadata, window: int | None) -> list[Piece]:
    pieces = []
    row = 0
    for request, (query_len, seq_len) in enumerate(zip(metadata.query_lens_host, metadata.seq_lens_host, strict=True)):
        first = seq_len - query_len
        context = seq_len if window is None else min(seq_len, window + query_len)
        step = max(1, min(query_len, MAX_TILE_SCORES // max(context, 1)))
        for done in range(0, query_len, step):
            num_queries = min(step, query_len - done)
            position = first + done
            start = 0 if window is None else max(0, position - window + 1)
            pieces.append(Piece(num_queries, request, row + done, position, start, position + num_queries))
        row += query_len
    return pieces


def _pack(pieces: list[Piece]) -> list[list[Piece]]:
    """Pieces of equal query length together, those of similar context length side by side, within the tile limits."""
    tiles: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda p: (p.num_queries, p.end - p.start)):
        length = piece.end - piece.start
        if tiles and tiles[-1][0].num_queries == piece.num_queries:
            positions = (len(tiles[-1]) + 1) * length
            if positions <= MAX_TILE_POSITIONS and positions * piece.num_queries <= MAX_TILE_SCORES:
                tiles[-1].append(piece)
                continue
        tiles.append([piece])
    return tiles


def _tile(pieces: list[Piece], metadata: AttentionMetadata, window: int | None) -> Tile:
    device = metadata.block_table.device
    columns = [(p.request, p.row, p.position, p.start, p.end) for p in pieces]
    request_R, row_R, position_R, start_R, end_R = torch.tensor(columns, dtype=torch.int64, device=device).t()
    query_Q = torch.arange(pieces[0].num_queries, device=device)
    length = max(p.end - p.start for p in pieces)

    context_RL = start_R[:, None] + torch.arange(length, device=device)
    outside_RL = context_RL >= end_R[:, None]
    context_RL = context_RL.masked_fill(outside_RL, 0)
    first, first_slots_RL = metadata.first, None
    if first is None:
        slots_RL = _slots(metadata, request_R, context_RL, metadata.block_size, 0).masked_fill(outside_RL, 0)
    else:
        is_first_RL = context_RL < first.count
        shift = first.count // first.block_size - first.count // metadata.block_size
        slots_RL = _slots(metadata, request_R, context_RL, metadata.block_size, shift).masked_fill(outside_RL | is_first_RL, 0)
        first_slots_RL = _slots(metadata, request_R, context_RL.clamp(max=first.count - 1), first.block_size, 0)
        first_slots_RL = first_slots_RL.masked_fill(outside_RL | ~is_first_RL, -1)

    rows = (row_R[:, None] + query_Q).flatten()
    if len(query_Q) == 1 and all(p.end - p.start == length for p in pieces):
        return Tile(rows, slots_RL, first_slots_RL, None)
    position_RQ1 = (position_R[:, None] + query_Q)[..., None]
    hidden_RQL = outside_RL[:, None] | (context_RL[:, None] > position_RQ1)
    if window is not None:
        hidden_RQL |= context_RL[:, None] <= position_RQ1 - window
    return Tile(rows, slots_RL, first_slots_RL, hidden_RQL)


def _slots(metadata: AttentionMetadata, request_R: Tensor, position_RL: Tensor, block_size: int, shift: int) -> Tensor:
    """The slots of those positions in blocks of `block_size`, whose entries lie `shift` further back in the table."""
    block_RL = torch.div(position_RL, block_size, rounding_mode="floor")
    entry_RL = (block_RL + shift).clamp(max=metadata.block_table.shape[1] - 1)  # of positions that are not asked for
    return metadata.block_table[request_R[:, None], entry_RL].long() * block_size + position_RL - block_RL * block_size
