"""One layer's paged cache on a GPU and two steps over it, for `tuning` to try cuts of the attention kernels on.

Numbers are random, blocks lie anywhere. A cut counts when it compiles, fits, and gives what the built-in cut gives. On a CPU (the
interpreter, in tests) everything runs but the graph, and times mean nothing.

Shape letters: T tokens, R requests, Q queries of a request, H heads, G kv heads, D head dim.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from halfbyte.kernels.attention.base import AttentionMetadata, AttentionSpec, FirstTokens
from halfbyte.kernels.triton.attention import Attention, gpu_of, make_plan
from halfbyte.kernels.triton.launch import Launch
from halfbyte.kernels.triton.random_layer import RandomLayer
from halfbyte.kernels.triton.targets import Cut, Cuts
from halfbyte.kernels.triton.tuning import Load
from halfbyte.kvcache.formats import page_bytes
from halfbyte.kvcache.spec import KVCacheSpec, KVGroup, make_layout

# Relative to the built-in cut's outputs, as norms: both round weights and outputs to 8 bits (bfloat16), each in another order.
MAX_DIFFERENCE = 0.02

# The device idles while the next cut is compiled, and needs some time to get back to its clock.
_WARM_S, _ROUNDS, _ROUND_S = 5e-2, 5, 5e-3
_WRITER = "write_rows"

log = logging.getLogger(__name__)


class LayerTimer:
    """Implements `tuning.LayerTimer`. kv_spec: of a layer that the Triton kernels do not refuse. dtype: of queries, K and V."""

    def __init__(self, spec: AttentionSpec, kv_spec: KVCacheSpec, dtype: torch.dtype, load: Load, device: torch.device) -> None:
        [group] = make_layout([kv_spec], page_bytes).groups
        entries, needed = group.num_entries(load.context), group.num_entries(load.prompt_context)
        requests = max(load.requests, -(-needed // entries))  # room for the prompt, too
        layer = RandomLayer(kv_spec, requests, load.context, dtype, device)
        self._decode = _Step(layer, spec, (load.requests, 1, load.context), dtype, load.longest)
        self._prompt = _Step(layer, spec, (1, load.queries, load.prompt_context), dtype, load.longest)
        self.built_in = self._decode.built_in

    def decode_seconds(self, cut: Cut) -> float | None:
        return self._decode.seconds(replace(self.built_in, decode=cut))

    def prompt_seconds(self, cut: Cut) -> float | None:
        return self._prompt.seconds(replace(self.built_in, prompt=cut))


class _Step:
    """shape: requests, queries of each, context of each."""

    def __init__(
        self, layer: RandomLayer, spec: AttentionSpec, shape: tuple[int, int, int], dtype: torch.dtype, longest: int
    ) -> None:
        requests, queries, context = shape
        self._cache, self._spec = layer.cache, spec
        table_RB = layer.tables(requests, context)
        self._metadata = _metadata(shape, table_RB, layer.group, longest)
        self._inputs = [
            torch.randn(requests * queries, heads, dim, device=table_RB.device).to(dtype)
            for heads, dim in (
                (spec.num_heads, spec.head_dim),
                (spec.num_kv_heads, spec.head_dim),
                (spec.num_kv_heads, spec.head_dim_v),
            )
        ]
        self._sinks_H = torch.zeros(spec.num_heads, device=table_RB.device) if spec.sinks else None
        self._expected: Tensor | None = None

    @property
    def built_in(self) -> Cuts:
        attention = self._attention(None)
        k, v, *_ = attention.sides(self._inputs[0].dtype)
        return attention.built_in_cuts(k, v)

    def seconds(self, cuts: Cuts) -> float | None:
        """Median over some rounds. The first cuts of a step are those that others are compared with."""
        launches, out_THD = self._launches(cuts)
        try:
            for launch in launches:
                launch.compile()
        except (TritonError, RuntimeError) as error:  # the compiler's passes raise RuntimeError
            log.debug("%s: does not compile: %s", cuts, error)
            return None
        try:
            _run(launches)
        except OutOfResources as error:
            log.debug("%s: %s", cuts, error)
            return None
        if self._expected is None:
            self._expected = out_THD.float()
        difference = torch.linalg.vector_norm(out_THD.float() - self._expected) / torch.linalg.vector_norm(self._expected)
        if not difference <= MAX_DIFFERENCE:  # not a number is no match either
            log.warning("%s: left out, its outputs differ from the built-in cut's by %.1f%%", cuts, 100 * difference)
            return None
        return device_seconds(lambda: _run(launches), out_THD.device)

    def _attention(self, cuts: Cuts | None) -> Attention:
        self._metadata.plan = make_plan(self._metadata, self._spec.sliding_window, 1)
        return Attention(self._cache, self._metadata, self._spec, self._sinks_H, gpu_of(self._inputs[0].device), cuts)

    def _launches(self, cuts: Cuts) -> tuple[list[Launch], Tensor]:
        """What a layer launches but for storing K and V, and the outputs that it fills in."""
        q_THD, k_TGD, v_TGD = self._inputs
        out_THD = torch.zeros(*q_THD.shape[:2], self._spec.head_dim_v, dtype=q_THD.dtype, device=q_THD.device)
        launches = list(self._attention(cuts).launches(q_THD, k_TGD, v_TGD, out_THD))
        return [launch for launch in launches if launch.kernel.__name__ != _WRITER], out_THD


def device_seconds(run: Callable[[], None], device: torch.device) -> float:
    """The median time of a run: on a GPU captured in a graph, so that launches cost nothing, by the device's own clock."""
    if device.type == "cpu":
        begin_s = time.perf_counter()
        run()
        return time.perf_counter() - begin_s
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    run_s = _replays_s(graph, 1)
    run_s = _replays_s(graph, max(1, int(_WARM_S / run_s)))
    num = max(1, int(_ROUND_S / run_s))
    return statistics.median(_replays_s(graph, num) for _ in range(_ROUNDS))


def _replays_s(graph: torch.cuda.CUDAGraph, num: int) -> float:
    """Of one of `num` replays."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(num):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / num


def _run(launches: list[Launch]) -> None:
    for launch in launches:
        launch.run()


def _metadata(shape: tuple[int, int, int], table_RB: Tensor, group: KVGroup, longest: int) -> AttentionMetadata:
    requests, queries, context = shape
    device = table_RB.device
    nowhere_T = torch.full((requests * queries,), -1, dtype=torch.int64, device=device)
    first = FirstTokens(group.first_tokens, group.first_block_size, nowhere_T) if group.first_tokens else None
    return AttentionMetadata(
        query_start_loc=torch.arange(requests + 1, device=device, dtype=torch.int32) * queries,
        seq_lens=torch.full((requests,), context, device=device, dtype=torch.int32),
        block_table=table_RB,
        slot_mapping=nowhere_T,
        block_size=group.block_size,
        query_lens_host=[queries] * requests,
        seq_lens_host=[context] * requests,
        max_query_len=queries,
        max_seq_len=context,
        num_decodes=requests if queries == 1 else 0,
        max_context_len=longest,
        first=first,
    )
