"""How each of FlashInfer's kernels is called: arguments, workspaces and plans. The only module that imports the package.

Knows FlashInfer 0.7.2; `tests/kernels/flashinfer_signatures.json` records what is called here, and a strict stand-in checks each
call. Knows no cache and no format: a `Layer` says what lies where.

Shape letters: T tokens of a part, H heads, D head dim, B blocks, G kv heads, S block size, N numbers or bytes of a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Any, Literal

import torch
from torch import Tensor

from halfbyte.kernels.attention.base import AttentionSpec
from halfbyte.kernels.attention.flashinfer.batch import Part, StepPlan
from halfbyte.kernels.attention.flashinfer.routes import Kernel

Phase = Literal["decode", "prefill"]

# fa2 keeps the parts of split contexts here. FlashInfer recommends 128 MiB; vLLM found 394 MiB to be enough for wide models.
_FA2_BYTES = 394 << 20
_XQA_BYTES = 128 << 20  # the first 8 MiB are semaphores, which have to begin as zeros and are left so
_TRTLLM_BYTES = 128 << 20
_LN2 = log(2)


@dataclass(frozen=True, slots=True)
class Layer:
    """What a call needs of a layer. kv: [B, G, S, N] each, in the type that FlashInfer knows. block_scales: of NVFP4.

    k_scale, v_scale: what scores and outputs are multiplied with. query_dtype: of the queries that come. takes_fp8_queries:
    whether trtllm-gen wants them in E4M3.
    """

    spec: AttentionSpec
    block_size: int
    kv: tuple[Tensor, Tensor]
    block_scales: tuple[Tensor, Tensor] | None
    k_scale: float
    v_scale: float
    query_dtype: torch.dtype
    takes_fp8_queries: bool
    sinks_H: Tensor | None

    @property
    def kind(self) -> tuple[Any, ...]:
        """Layers of one kind share plans."""
        spec = self.spec
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale, spec.soft_cap)
        return (*shape, self.query_dtype, self.kv[0].dtype)


class Calls:
    """Workspaces and wrappers, made when they are first used, for one device and one stream."""

    def __init__(self) -> None:
        self._workspaces: dict[str, Tensor] = {}
        self._wrappers: dict[Any, _Planned] = {}

    def run(self, kernel: Kernel, phase: Phase, layer: Layer, q_THD: Tensor, part: Part, plan: StepPlan) -> Tensor:
        """[T, H, D] of the part's tokens, in the queries' dtype."""
        if kernel == "fa2":
            return self._fa2(phase, layer, q_THD, part, plan)
        if kernel == "xqa":
            return self._xqa(layer, q_THD.contiguous(), part, plan)
        return self._trtllm(phase, layer, q_THD, part, plan)

    def _fa2(self, phase: Phase, layer: Layer, q_THD: Tensor, part: Part, plan: StepPlan) -> Tensor:
        key = (phase, layer.kind)
        if key not in plan.planned:
            planned = self._wrappers.setdefault((plan.group, *key), _Planned(self._make_wrapper(phase, q_THD.device)))
            planned.plan(phase, layer, part, plan.window)
            plan.planned[key] = planned.wrapper
        found = plan.planned[key].run(
            q_THD,
            layer.kv,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            kv_cache_sf=layer.block_scales,
            return_lse=layer.sinks_H is not None,
        )
        if layer.sinks_H is None:
            return found
        # fa2 knows no sinks: they take from the weights of all keys what the softmax would give them. lse is to base 2.
        out_THD, lse_TH = found
        return out_THD * torch.sigmoid(lse_TH * _LN2 - layer.sinks_H)[..., None].to(out_THD.dtype)

    def _make_wrapper(self, phase: Phase, device: torch.device) -> Any:
        import flashinfer

        workspace = self._workspace("fa2", _FA2_BYTES, device)
        if phase == "decode":
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True, backend="fa2")
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")

    def _xqa(self, layer: Layer, q_THD: Tensor, part: Part, plan: StepPlan) -> Tensor:
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        out: Tensor = xqa_batch_decode_with_kv_cache(
            query=q_THD,
            kv_cache=layer.kv,
            workspace_buffer=self._workspace("xqa", _XQA_BYTES, q_THD.device),
            block_tables=part.block_table,
            seq_lens=part.seq_lens,
            max_seq_len=part.max_seq_len,
            bmm1_scale=layer.spec.scale * layer.k_scale,
            bmm2_scale=layer.v_scale,
            window_left=_window_left(plan.window),
            sinks=layer.sinks_H,
            kv_layout="HND",
            kv_cache_sf=layer.block_scales,
        )
        return out

    def _trtllm(self, phase: Phase, layer: Layer, q_THD: Tensor, part: Part, plan: StepPlan) -> Tensor:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache
        from flashinfer.prefill import trtllm_batch_context_with_kv_cache

        query = _to_e4m3(q_THD) if layer.takes_fp8_queries else q_THD
        makes_fp8 = layer.block_scales is not None
        shared = {
            "query": query,
            "kv_cache": layer.kv,
            "workspace_buffer": self._workspace("trtllm", _TRTLLM_BYTES, q_THD.device),
            "block_tables": part.block_table,
            "seq_lens": part.seq_lens,
            "bmm1_scale": layer.spec.scale * layer.k_scale,
            "bmm2_scale": layer.v_scale,
            "window_left": _window_left(plan.window),
            "out": torch.empty_like(query, dtype=query.dtype if makes_fp8 else q_THD.dtype),
            "sinks": layer.sinks_H,
            "kv_layout": "HND",
            "kv_cache_sf": layer.block_scales,
            "multi_ctas_kv_counter_buffer": self._counters(part.num_requests * layer.spec.num_heads, q_THD.device),
        }
        call: Callable[..., Tensor]
        if phase == "decode":
            call = trtllm_batch_decode_with_kv_cache
            return call(**shared, max_seq_len=part.max_seq_len, backend="trtllm-gen").to(q_THD.dtype)
        call = trtllm_batch_context_with_kv_cache
        return call(
            **shared,
            max_q_len=part.max_query_len,
            max_kv_len=part.max_seq_len,
            batch_size=part.num_requests,
            cum_seq_lens_q=part.query_starts,
            cum_seq_lens_kv=part.seq_starts,
        ).to(q_THD.dtype)

    def _workspace(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        """Zeros at first. Each kernel has its own: others would leave something where it expects zeros."""
        if name not in self._workspaces:
            self._workspaces[name] = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return self._workspaces[name]

    def _counters(self, num_rows: int, device: torch.device) -> Tensor:
        """trtllm-gen's counters, four bytes per request and head, which it leaves as zeros. Powers of two: they seldom grow."""
        size = 4 << max(18, (num_rows - 1).bit_length())
        return self._workspace(f"counters of {size}", size, device)


class _Planned:
    """A wrapper, and when the copies of its last plan are done: they read pinned memory that the next plan overwrites."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._copied: torch.cuda.Event | None = None

    def plan(self, phase: Phase, layer: Layer, part: Part, window: int | None) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        spec = layer.spec
        place = (part.page_indptr, part.pages, part.last_page_lens)
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, layer.block_size)
        settings = {
            "pos_encoding_mode": "NONE",
            "sm_scale": spec.scale,
            "window_left": _window_left(window),
            "logits_soft_cap": spec.soft_cap,
            "q_data_type": layer.query_dtype,
            "kv_data_type": layer.kv[0].dtype,
            "non_blocking": True,
        }
        if phase == "decode":
            self.wrapper.plan(*place, *shape, **settings)
        else:
            self.wrapper.plan(part.query_indptr, *place, *shape, causal=True, **settings)
        if part.pages.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()


def _window_left(window: int | None) -> int:
    """How many keys before its own a query sees; -1: all."""
    return -1 if window is None else window - 1


def _to_e4m3(q_THD: Tensor) -> Tensor:
    """With a scale of 1; torch's cast makes NaN of what is too great."""
    most = torch.finfo(torch.float8_e4m3fn).max
    return q_THD.clamp(-most, most).to(torch.float8_e4m3fn)
