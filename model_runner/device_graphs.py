"""The forward pass as device graphs: captured once per size at start, then replayed for every batch that fits one.

A whole graph goes from its own table to the hidden states; a step uploads the table and replays. In pieces, everything between
two attention calls is one graph, and attention runs as ever, with the step's own metadata. Batches are padded up to the next
size; above the largest, and where nothing is captured, the pass runs as it is. Knows no requests. Called by the runner.

Shape letters: T tokens, R requests, E hidden, H heads, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from tqdm import tqdm

from halfbyte.model_runner.device import Accelerator, Cut, Graph
from halfbyte.model_runner.forward import Forward
from halfbyte.model_runner.graph_plan import GraphPlan, size_for
from halfbyte.model_runner.input_batch import Counts, InputBatch, padding
from halfbyte.model_runner.layers.context import AttentionLayer, ForwardContext


@dataclass(frozen=True, slots=True)
class _Whole:
    """A graph and the table that it reads."""

    table_5R: Tensor
    graph: Graph


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What runs between the attention calls of `layers`: one more graph than there are layers."""

    graphs: list[Graph]
    layers: list[AttentionLayer]


@dataclass(slots=True)
class _Buffers:
    """Fixed memory that graphs share, made for the largest of them, which comes first."""

    num_tokens: int
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """The first rows of the buffer `name`, as many as the tensor has."""
        if name not in self.tensors:
            self.tensors[name] = tensor.new_zeros(self.num_tokens, *tensor.shape[1:])
        return self.tensors[name][: tensor.shape[0]]

    def put(self, name: str, tensor: Tensor) -> Tensor:
        return self.like(name, tensor).copy_(tensor)


@dataclass(slots=True)
class _CuttingContext(ForwardContext):
    """Where layers attend, ends a piece: queries, keys and values go into buffers, and what follows reads another.

    The buffers have one set of names per shape of attention.
    """

    buffers: _Buffers
    cut: Cut
    layers: list[AttentionLayer] = field(default_factory=list)

    def attend(self, layer: AttentionLayer, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        key = buffer_key(layer)
        for name, tensor in (("q", q_THD), ("k", k_TGD), ("v", v_TGD)):
            self.buffers.put(f"{name} {key}", tensor)
        out_THD = self.buffers.like(f"out {key}", q_THD[..., :1].expand(-1, -1, layer.spec.head_dim_v))
        self.cut()
        self.layers.append(layer)
        return out_THD


def buffer_key(layer: AttentionLayer) -> str:
    spec = layer.spec
    return f"{spec.num_heads} {spec.num_kv_heads} {spec.head_dim} {spec.head_dim_v}"


class DeviceGraphs:
    """Those of `plan`, which is not empty. max_seq_len: no request gets longer. The spare row is the one after the last."""

    def __init__(self, forward: Forward, device: Accelerator, plan: GraphPlan, max_seq_len: int, max_num_seqs: int) -> None:
        self._forward = forward
        self._device = device
        self._plan = plan
        self._max_seq_len = max_seq_len
        self._spare_row = max_num_seqs
        self._decode: dict[int, _Whole] = {}
        self._mixed: dict[int, _Whole] = {}
        self._pieces: dict[int, _Pieces] = {}
        largest = max((*plan.decode_sizes, *plan.mixed_sizes))
        self._buffers = _Buffers(largest)
        self._ids_T = torch.zeros(largest, dtype=torch.int64, device=device.place)
        self._positions_T = torch.zeros_like(self._ids_T)
        self._seat_T = forward.rows.seats(self._ids_T)

    def jobs(self) -> list[list[Callable[[], None]]]:
        """What there is to capture: per kind, the largest first, so that the others fit into its memory."""
        kinds: list[tuple[tuple[int, ...], Callable[[int], None]]] = [
            (self._plan.whole_mixed_sizes, self._capture_mixed),
            (self._plan.piecewise_sizes, self._capture_pieces),
            (self._plan.whole_decode_sizes, self._capture_decode),
        ]
        return [[_job(capture, size) for size in reversed(sizes)] for sizes, capture in kinds if sizes]

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture everything. Writes nothing into the cache."""
        jobs = [job for kind in self.jobs() for job in kind]
        for job in tqdm(jobs, desc="Capturing graphs", unit="size", disable=None):
            job()

    def run(self, batch: InputBatch) -> Tensor:
        """Hidden states [T, E] of the batch. They are good until the next step."""
        counts = batch.counts
        is_decode = max(counts.query_lens) == 1
        kind = self._plan.decode if is_decode else self._plan.mixed
        size = size_for(self._plan.decode_sizes if is_decode else self._plan.mixed_sizes, counts.num_tokens)
        if size is None or kind == "none":
            return self._forward(self._device.upload(batch.table()), counts)
        if kind == "piecewise":
            return self._replay_pieces(self._pieces[size], batch, size)
        whole = self._decode[size] if is_decode else self._mixed[size]
        self._device.upload(batch.padded_table(whole.table_5R.shape[1], self._spare_row), out=whole.table_5R)
        whole.graph.replay()
        return self._buffers.tensors["hidden"][: counts.num_tokens]

    def _replay_pieces(self, pieces: _Pieces, batch: InputBatch, size: int) -> Tensor:
        num_tokens, tensors = batch.counts.num_tokens, self._buffers.tensors
        inputs = self._forward.inputs(self._device.upload(batch.table()), num_tokens)
        context = self._forward.context_of(inputs, replace(batch.counts, has_adapters=True))
        # What follows the batch's tokens is of earlier steps: tokens do not meet between attention calls.
        self._ids_T[:num_tokens].copy_(inputs.token_ids_T)
        self._positions_T[:num_tokens].copy_(inputs.positions_T)
        if self._seat_T is not None and context.seat_T is not None:
            self._seat_T[:num_tokens].copy_(context.seat_T)
        pieces.graphs[0].replay()
        for layer, graph in zip(pieces.layers, pieces.graphs[1:], strict=True):
            key = buffer_key(layer)
            q_THD, k_TGD, v_TGD, out_THD = (tensors[f"{name} {key}"][:num_tokens] for name in ("q", "k", "v", "out"))
            out_THD.copy_(context.attend(layer, q_THD, k_TGD, v_TGD))
            graph.replay()
        return tensors["hidden"][:num_tokens]

    def _capture_decode(self, size: int) -> None:
        self._decode[size] = self._capture_whole(Counts(size, [1] * size, [self._max_seq_len] * size, True))

    def _capture_mixed(self, size: int) -> None:
        num_requests = min(size, self._spare_row)
        self._mixed[size] = self._capture_whole(Counts(size, [size] * num_requests, [self._max_seq_len] * num_requests, True))

    def _capture_whole(self, counts: Counts) -> _Whole:
        table_5R = self._device.upload(padding(len(counts.seq_lens), self._spare_row))

        def run(cut: Cut) -> None:
            self._buffers.put("hidden", self._forward(table_5R, counts, is_padded=True))

        run(_no_cut)
        [graph] = self._device.capture(run)
        return _Whole(table_5R, graph)

    def _capture_pieces(self, size: int) -> None:
        layers: list[AttentionLayer] = []

        def run(cut: Cut) -> None:
            layers.clear()
            forward = self._forward
            seat_T = None if self._seat_T is None else self._seat_T[:size]
            groups = forward.layout.group_of_layer
            context = _CuttingContext([], forward.caches, groups, self._buffers, cut, layers, seat_T=seat_T)
            self._buffers.put("hidden", forward.model(self._ids_T[:size], self._positions_T[:size], context))

        run(_no_cut)
        self._pieces[size] = _Pieces(self._device.capture(run), layers)


def _job(capture: Callable[[int], None], size: int) -> Callable[[], None]:
    return lambda: capture(size)


def _no_cut() -> None:
    """The run before the capture, which loads and compiles what the capture must not."""
