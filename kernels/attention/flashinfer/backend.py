"""Attention by FlashInfer over the paged cache: decodes and prefills of a batch apart, each by its platform's kernels.

K and V are written by our own Triton writer, whatever the format: FlashInfer's writer for NVFP4 reads its scales back to the
host in every call, has one scale for all heads, and is compiled with approximate divisions, so that its bytes are not the
law's. How FlashInfer cuts a context into parts depends on the batch, and so do the last bits of its outputs. Knows tensors and
the cache's planes; which kernels serve what is `routes`, how they are called `calls`.

Shape letters: T tokens, H heads, G kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kernels.attention.base import AttentionMetadata, AttentionSpec
from halfbyte.kernels.attention.flashinfer import routes
from halfbyte.kernels.attention.flashinfer.batch import Part, StepPlan, split
from halfbyte.kernels.attention.flashinfer.calls import Calls, Layer, Phase
from halfbyte.kernels.attention.flashinfer.routes import Kernel
from halfbyte.kernels.attention.vendors import VENDORS
from halfbyte.kvcache.formats.swizzled import SUFFIX

if TYPE_CHECKING:
    from halfbyte.kvcache.scales import LayerScales
    from halfbyte.kvcache.spec import KVCacheSpec
    from halfbyte.kvcache.tensors import LayerCache
    from halfbyte.platform import Platform

_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class _Units:
    """A layer's scales as the kernels take them: one number per side, and what is left of each head's where they differ."""

    scales: LayerScales
    k: float = 1.0
    v: float = 1.0
    k_H1: Tensor | None = None
    v_H1: Tensor | None = None


class FlashInferBackend:
    """architecture: the platform's that it runs on; default: that of the GPU in use."""

    name = "flashinfer"

    def __init__(self, architecture: str | None = None) -> None:
        self._architecture = _architecture_in_use() if architecture is None else architecture
        self._route = routes.route(self._architecture)
        self.graph_support = self._route.graph_support
        self._calls = Calls()
        self._units: dict[int, _Units] = {}

    def has_reader(self, kv_format: str) -> bool:
        return kv_format in VENDORS[self.name].reads

    def arrange(self, kv_spec: KVCacheSpec) -> str:
        return routes.arrangement(self._architecture, kv_spec.format)

    def refuse(self, spec: AttentionSpec, kv_spec: KVCacheSpec, platform: Platform) -> Refusal | None:
        if platform.device != "cuda":
            return Refusal(f"flashinfer: {platform.device} not supported", "leave --attention-backend out")
        return routes.refuse(platform.architecture, spec, kv_spec)

    def prepare(self, metadata: AttentionMetadata, window: int | None) -> None:
        """Splits the batch. Kernels that plan on the host do so for the first layer of each kind."""
        metadata.plan = split(metadata, window)

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
        from halfbyte.kernels.triton.kv_write import write  # not everywhere installed

        dtype = q_THD.dtype
        if cache.turns is not None:
            q_THD, k_TGD, v_TGD = (x.to(dtype) for x in cache.turns.turn(q_THD, k_TGD, v_TGD))
        write(k_TGD, v_TGD, cache, metadata.slot_mapping)
        units = self._units_of(cache, spec)
        if units.k_H1 is not None:
            q_THD = q_THD * units.k_H1.to(dtype)
        layer = _layer(cache, metadata, spec, units, dtype, sinks_H)
        out_THD = self._attend(layer, q_THD.to(layer.query_dtype), metadata.plan).to(dtype)
        if units.v_H1 is not None:
            out_THD = out_THD * units.v_H1.to(dtype)
        return out_THD if cache.turns is None else cache.turns.turn_back(out_THD).to(dtype)

    def _attend(self, layer: Layer, q_THD: Tensor, plan: StepPlan) -> Tensor:
        phases: list[tuple[Part, Phase, Kernel]] = []
        if plan.decodes is not None:
            phases.append((plan.decodes, "decode", self._route.decode))
        if plan.prefills is not None:
            phases.append((plan.prefills, "prefill", self._route.prefill))
        if len(phases) == 1 and phases[0][0].rows == slice(0, len(q_THD)):
            [(part, phase, kernel)] = phases
            return self._calls.run(kernel, phase, layer, q_THD, part, plan)
        out_THD = torch.zeros_like(q_THD)  # rows beyond the batch's stay zero
        for part, phase, kernel in phases:
            out_THD[part.rows] = self._calls.run(kernel, phase, layer, q_THD[part.rows], part, plan)
        return out_THD

    def _units_of(self, cache: LayerCache, spec: AttentionSpec) -> _Units:
        """Read from the device once per layer, at the first step, which is the warm-up's."""
        units = self._units.get(id(cache.scales))
        if units is None or units.scales is not cache.scales:
            units = self._units[id(cache.scales)] = _units(cache.scales, spec)
        return units


def _architecture_in_use() -> str:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return ""
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def _units(scales: LayerScales, spec: AttentionSpec) -> _Units:
    """Scores and outputs are linear in K and V: what a head's scale has beyond the greatest goes to its queries and outputs."""
    if not scales.calibrated:
        return _Units(scales)
    group = spec.num_heads // spec.num_kv_heads
    found = []
    for scale_G in (scales.k_G, scales.v_G):
        most = float(scale_G.max())
        is_shared = bool((scale_G == most).all())
        found.append((most, None if is_shared else (scale_G / most).repeat_interleave(group)[:, None]))
    (k, k_H1), (v, v_H1) = found
    return _Units(scales, k, v, k_H1, v_H1)


def _layer(
    cache: LayerCache, metadata: AttentionMetadata, spec: AttentionSpec, units: _Units, dtype: torch.dtype, sinks_H: Tensor | None
) -> Layer:
    """The planes of the cache with the types that FlashInfer knows them by; heads before tokens (HND), as they lie."""
    kv_format, planes = cache.format.name.removesuffix(SUFFIX), cache.planes
    k, v, block_scales, query_dtype = planes["k"], planes["v"], None, dtype
    if kv_format in routes.NVFP4:
        block_scales = (planes["k_extra"].view(torch.float8_e4m3fn), planes["v_extra"].view(torch.float8_e4m3fn))
    elif kv_format in _FP8:
        k, v = k.view(_FP8[kv_format]), v.view(_FP8[kv_format])
    else:
        query_dtype = k.dtype  # 16-bit numbers are multiplied with their like
    return Layer(
        spec=spec,
        block_size=metadata.block_size,
        kv=(k, v),
        block_scales=block_scales,
        k_scale=units.k,
        v_scale=units.v,
        query_dtype=query_dtype,
        takes_fp8_queries=kv_format in routes.FP8_QUERIES,
        sinks_H=sinks_H,
    )
