"""A stand-in for FlashInfer on a CPU: as strict as the real one, and computing what it computes, slowly and plainly.

Calls are bound to the recorded signatures, so that a wrong keyword is a TypeError. What the real functions check, or silently
get wrong, is checked here. Numbers are read through the very views, tables, lengths and scales that a call hands over.

Shape letters: T tokens, R requests, H heads, D head dim, B blocks, G kv heads, S block size, N numbers or bytes, L context.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.flashinfer_record import signature

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
HEAD_DIMS = (64, 128, 256, 512)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SEMAPHORE_BYTES = 8 << 20


@dataclass
class Fake:
    """architecture: of the GPU that there would be. calls: the names of what ran."""

    architecture: str
    calls: list[str] = field(default_factory=list)

    @property
    def major(self) -> int:
        return int(self.architecture.removeprefix("sm")[:-1])


def install(patch: pytest.MonkeyPatch, architecture: str) -> Fake:
    """From now on, `import flashinfer` finds the stand-in."""
    fake = Fake(architecture)
    package, decode, prefill = (ModuleType(name) for name in ("flashinfer", "flashinfer.decode", "flashinfer.prefill"))
    package.__path__ = []
    package.decode, package.prefill = decode, prefill
    package.BatchDecodeWithPagedKVCacheWrapper = lambda *args, **kwargs: DecodeWrapper(fake, *args, **kwargs)
    package.BatchPrefillWithPagedKVCacheWrapper = lambda *args, **kwargs: PrefillWrapper(fake, *args, **kwargs)
    decode.xqa_batch_decode_with_kv_cache = lambda *args, **kwargs: _xqa(fake, *args, **kwargs)
    decode.trtllm_batch_decode_with_kv_cache = lambda *args, **kwargs: _trtllm_decode(fake, *args, **kwargs)
    prefill.trtllm_batch_context_with_kv_cache = lambda *args, **kwargs: _trtllm_context(fake, *args, **kwargs)
    for module in (package, decode, prefill):
        patch.setitem(sys.modules, module.__name__, module)
    return fake


def _bind(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments by name; only those that were given."""
    bound = signature(name).bind(*args, **kwargs).arguments
    assert not bound.get("args"), "extra positional arguments are for custom kernels"
    return bound


class DecodeWrapper:
    """fa2 on tensor cores."""

    module, phase = "decode.BatchDecodeWithPagedKVCacheWrapper", "fa2 decode"

    def __init__(self, fake: Fake, *args: Any, **kwargs: Any) -> None:
        given = _bind(f"{self.module}.__init__", self, *args, **kwargs)
        workspace = given["float_workspace_buffer"]
        assert workspace.dtype == torch.uint8 and workspace.data_ptr() % 16 == 0 and given["kv_layout"] == "HND"
        assert given["backend"] == "fa2" and given.get("use_tensor_cores", True)
        self.fake = fake
        self.planned: dict[str, Any] = {}

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = _bind(f"{self.module}._plan_impl", self, *args, **kwargs)
        self._keep(given, given["indptr"], given["indices"], given["last_page_len"], given["head_dim"])
        self.planned["query_indptr"] = torch.arange(len(given["indptr"]))
        self.planned["causal"] = False

    def _keep(self, given: dict[str, Any], indptr: Tensor, indices: Tensor, last: Tensor, head_dim: int) -> None:
        for tensor in (indptr, last):
            assert tensor.dtype == torch.int32 and tensor.device.type == "cpu", "planned on the host"
        assert indices.dtype == torch.int32 and len(indices) == indptr[-1] and len(last) == len(indptr) - 1
        assert (indptr.diff() > 0).all() and ((last >= 1) & (last <= given["page_size"])).all()
        assert head_dim in HEAD_DIMS and given["pos_encoding_mode"] == "NONE"
        assert given["num_qo_heads"] % given["num_kv_heads"] == 0
        cap = given.get("logits_soft_cap") or 0.0
        assert cap >= 0
        self.planned = {**given, "indptr": indptr, "indices": indices, "last": last, "dim": head_dim, "cap": cap}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        given, plan = _bind(f"{self.module}.run", self, *args, **kwargs), self.planned
        self.fake.calls.append(self.phase)
        q_THD, kv, scales = given["q"], given["paged_kv_cache"], given.get("kv_cache_sf")
        assert q_THD.shape == (plan["query_indptr"][-1], plan["num_qo_heads"], plan["dim"]), "as planned"
        assert q_THD.dtype == plan["q_data_type"] in (torch.float16, torch.bfloat16) and kv[0].dtype == plan["kv_data_type"]
        assert kv[0].stride() == kv[1].stride(), "unequal strides are compiled anew"
        assert given.get("sinks") is None, "fa2 ignores them"
        for name in ("k_scale", "v_scale"):
            assert isinstance(given.get(name, 1.0), float)
        _check_pages(kv, scales, plan["num_kv_heads"], plan["page_size"], plan["dim"], q_THD.dtype)
        is_nvfp4 = kv[0].dtype == torch.uint8
        assert not (is_nvfp4 and plan["dim"] == 64), "misread"
        pages = [plan["indices"][a:b].long() for a, b in zip(plan["indptr"][:-1], plan["indptr"][1:], strict=True)]
        lens = (plan["indptr"].diff() - 1) * plan["page_size"] + plan["last"]
        out_THD, lse_TH = attend_plainly(
            q_THD,
            [_read(kv, scales, mine, int(length)) for mine, length in zip(pages, lens, strict=True)],
            plan["query_indptr"].tolist(),
            scale=plan["sm_scale"] * given.get("k_scale", 1.0),
            window_left=plan["window_left"],
            cap=plan["cap"],
        )
        out_THD = out_THD.to(q_THD.dtype) * given.get("v_scale", 1.0)
        return (out_THD, lse_TH / torch.log(torch.tensor(2.0))) if given.get("return_lse") else out_THD


class PrefillWrapper(DecodeWrapper):
    module, phase = "prefill.BatchPrefillWithPagedKVCacheWrapper", "fa2 prefill"

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = _bind(f"{self.module}.plan", self, *args, **kwargs)
        query_indptr = given["qo_indptr"]
        assert query_indptr.dtype == torch.int32 and query_indptr.device.type == "cpu" and given["causal"] is True
        place = (given["paged_kv_indptr"], given["paged_kv_indices"], given["paged_kv_last_page_len"])
        self._keep(given, *place, given["head_dim_qk"])
        self.planned["query_indptr"] = query_indptr


def _xqa(fake: Fake, *args: Any, **kwargs: Any) -> Tensor:
    given = _bind("decode.xqa_batch_decode_with_kv_cache", *args, **kwargs)
    fake.calls.append("xqa decode")
    q_THD, kv, scales = given["query"], given["kv_cache"], given.get("kv_cache_sf")
    assert fake.major in (9, 10, 12) and (kv[0].dtype != torch.uint8 or fake.major == 12)
    assert q_THD.is_contiguous() and given["kv_layout"] == "HND"
    assert kv[0].dtype in (q_THD.dtype, torch.float8_e4m3fn, torch.uint8), "else it is read as 16-bit numbers"
    assert given["workspace_buffer"][:SEMAPHORE_BYTES].count_nonzero() == 0, "semaphores begin as zeros"
    assert all(isinstance(given[name], float) for name in ("bmm1_scale", "bmm2_scale"))
    sinks_H = given.get("sinks")
    requests = _requests(given, kv, scales, q_THD, is_swizzled=False)
    starts = list(range(len(q_THD) + 1))
    out_THD, _ = attend_plainly(q_THD, requests, starts, given["bmm1_scale"], given["window_left"], sinks_H=sinks_H)
    return (out_THD * given["bmm2_scale"]).to(q_THD.dtype)


def _trtllm_decode(fake: Fake, *args: Any, **kwargs: Any) -> Tensor:
    given = _bind("decode.trtllm_batch_decode_with_kv_cache", *args, **kwargs)
    fake.calls.append("trtllm decode")
    assert given["backend"] == "trtllm-gen"
    return _trtllm(fake, given, list(range(len(given["query"]) + 1)))


def _trtllm_context(fake: Fake, *args: Any, **kwargs: Any) -> Tensor:
    given = _bind("prefill.trtllm_batch_context_with_kv_cache", *args, **kwargs)
    fake.calls.append("trtllm prefill")
    starts, ends = given["cum_seq_lens_q"], given["cum_seq_lens_kv"]
    assert starts.dtype == ends.dtype == torch.int32 and len(starts) == given["batch_size"] + 1
    assert torch.equal(ends.diff(), given["seq_lens"]) and starts.diff().max() <= given["max_q_len"]
    assert given["seq_lens"].max() <= given["max_kv_len"] and starts[-1] == len(given["query"])
    return _trtllm(fake, given, starts.tolist())


def _trtllm(fake: Fake, given: dict[str, Any], starts: list[int]) -> Tensor:
    q_THD, kv, scales, out = given["query"], given["kv_cache"], given.get("kv_cache_sf"), given["out"]
    assert fake.major == 10 and given["kv_layout"] == "HND"
    is_coded = kv[0].dtype != torch.bfloat16 and kv[0].dtype != torch.float16
    assert q_THD.dtype == (torch.float8_e4m3fn if is_coded else kv[0].dtype)
    assert kv[0].dtype != torch.float8_e5m2
    assert out.shape == q_THD.shape and (kv[0].dtype != torch.uint8 or out.dtype == torch.float8_e4m3fn)
    assert out.dtype in (q_THD.dtype, torch.float16, torch.bfloat16)
    counters = given["multi_ctas_kv_counter_buffer"]
    assert counters.count_nonzero() == 0 and counters.numel() >= 4 * (len(starts) - 1) * q_THD.shape[1]
    assert kv[0].stride() == kv[1].stride(), "K's strides are taken for both"
    for plane in scales or ():
        assert plane.stride(-1) == 1 and plane.stride(-2) == plane.shape[-1]
    assert not q_THD.float().isnan().any()
    requests = _requests(given, kv, scales, q_THD, is_swizzled=True)
    sinks_H = given.get("sinks")
    found, _ = attend_plainly(q_THD, requests, starts, given["bmm1_scale"], given["window_left"], sinks_H=sinks_H)
    found = found * given["bmm2_scale"]
    if out.dtype == torch.float8_e4m3fn:
        found = found.clamp(-448, 448)
    return out.copy_(found.to(out.dtype))


def _requests(
    given: dict[str, Any], kv: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor] | None, q_THD: Tensor, *, is_swizzled: bool
) -> list[tuple[Tensor, Tensor]]:
    """K and V of each request, by its row of the table."""
    table, seq_lens = given["block_tables"], given["seq_lens"]
    assert table.dtype == seq_lens.dtype == torch.int32 and table.is_contiguous() and table.dim() == 2
    _, num_kv_heads, page_size, _ = kv[0].shape
    _check_pages(kv, scales, num_kv_heads, page_size, q_THD.shape[2], q_THD.dtype)
    counts = [-(-int(length) // page_size) for length in seq_lens]
    rows = zip(table, counts, seq_lens, strict=True)
    return [_read(kv, scales, row[:count].long(), int(length), is_swizzled) for row, count, length in rows]


def _check_pages(
    kv: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor] | None, heads: int, size: int, dim: int, dtype: torch.dtype
) -> None:
    assert isinstance(kv, tuple) and kv[0].dtype == kv[1].dtype and dim in HEAD_DIMS
    assert size % 16 == 0 and size in (16, 32, 64, 128, 256, 512, 1024)
    is_nvfp4 = kv[0].dtype == torch.uint8
    assert is_nvfp4 or kv[0].dtype in (*FP8, dtype)
    for plane in kv:
        assert plane.shape[1:] == (heads, size, dim // 2 if is_nvfp4 else dim) and plane.stride(-1) == 1
        steps = (plane.data_ptr(), *(stride * plane.element_size() for stride in plane.stride()[:3]))
        assert not any(step % 16 for step in steps), "rows are copied 16 bytes at a time"
    assert (scales is not None) == is_nvfp4
    for plane in scales or ():
        assert plane.shape[1:] == (heads, size, dim // 16) and plane.dtype == torch.float8_e4m3fn and plane.stride(-1) == 1


def _read(
    kv: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor] | None, pages: Tensor, length: int, is_swizzled: bool = False
) -> tuple[Tensor, Tensor]:
    """K and V of a request, float32 [L, G, D]."""
    found = []
    for side in (0, 1):
        codes_PGSN = kv[side][pages]
        if scales is None:
            numbers = codes_PGSN.float()
        else:
            codes = torch.stack((codes_PGSN & 15, codes_PGSN >> 4), -1).flatten(-2)  # the even number lies low
            scales_PGSK = scales[side].view(torch.uint8)[pages].view(torch.float8_e4m3fn).float()
            if is_swizzled and side == 1:
                scales_PGSK = _deinterleaved(scales_PGSK)
            numbers = E2M1[codes.long()] * scales_PGSK.repeat_interleave(16, -1)
        found.append(numbers.transpose(1, 2).flatten(0, 1)[:length])
    return found[0], found[1]


def _deinterleaved(scales_PGSK: Tensor) -> Tensor:
    """Token t's scale of block k is number (t // 4) * 4K + 4k + t % 4 of its head's page."""
    size, num = scales_PGSK.shape[-2:]
    token_S1, block_K = torch.arange(size)[:, None], torch.arange(num)
    return scales_PGSK.flatten(-2)[..., token_S1 // 4 * 4 * num + 4 * block_K + token_S1 % 4]


def attend_plainly(
    q_THD: Tensor,
    requests: list[tuple[Tensor, Tensor]],
    starts: list[int],
    scale: float,
    window_left: int,
    cap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal from the end of each context; float32 outputs and the natural logarithm of the weights' sum."""
    out_THD = torch.zeros(q_THD.shape)
    lse_TH = torch.zeros(q_THD.shape[:2])
    for (k_LGD, v_LGD), begin, end in zip(requests, starts[:-1], starts[1:], strict=True):
        if not len(k_LGD):
            continue  # a row of padding
        group = q_THD.shape[1] // k_LGD.shape[1]
        k_LHD, v_LHD = (x.repeat_interleave(group, 1) for x in (k_LGD, v_LGD))
        scores_HQL = torch.einsum("qhd,lhd->hql", q_THD[begin:end].float(), k_LHD) * scale
        if cap:
            scores_HQL = cap * torch.tanh(scores_HQL / cap)
        position_Q1 = torch.arange(len(k_LGD) - (end - begin), len(k_LGD))[:, None]
        key_L = torch.arange(len(k_LGD))
        hidden_QL = key_L > position_Q1
        if window_left >= 0:
            hidden_QL |= key_L < position_Q1 - window_left
        scores_HQL = scores_HQL.masked_fill(hidden_QL, -torch.inf)
        lse_HQ = torch.logsumexp(scores_HQL, -1)
        whole_HQ = lse_HQ if sinks_H is None else torch.logaddexp(lse_HQ, sinks_H[:, None])
        out_THD[begin:end] = torch.einsum("hql,lhd->qhd", (scores_HQL - whole_HQ[..., None]).exp(), v_LHD)
        lse_TH[begin:end] = lse_HQ.t()
    return out_THD, lse_TH
