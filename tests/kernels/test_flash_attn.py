"""FlashAttention's back end against the law, on stand-ins with the signatures and checks of versions 2.8 and 3.

They compute in float32 through the views, tables and lengths of the call; what is left are roundings to the outputs' type.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.attention import get_backend
from halfbyte.kernels.attention.base import AttentionSpec
from halfbyte.kvcache.spec import KVCacheSpec
from halfbyte.platform import platform_named
from tests.kernels.fake_flashinfer import attend_plainly
from tests.kernels.paged_batches import BATCHES, e4m3, fill, history, make_run, scales_of
from tests.kernels.triton_interpreter import interpreted

kv_write, module = interpreted("halfbyte.kernels.triton.kv_write", "halfbyte.kernels.attention.flash_attn")

SPECS = {
    "plain": AttentionSpec(8, 2, 64, 64, 0.1),
    "window": AttentionSpec(4, 2, 80, 80, 0.1, sliding_window=20),
    "capped": AttentionSpec(4, 4, 64, 64, 0.1, soft_cap=5.0),
}
CASES = [("sm80", name, 256) for name in ("bfloat16", "float16")] + [("sm90", name, 16) for name in ("bfloat16", "fp8_e4m3")]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Of version 2.8."""
    assert block_table is not None and k.shape[1] % 256 == 0, "block size must be divisible by 256"
    assert q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype and cu_seqlens_k[0] == 0
    lens = cu_seqlens_k.diff()
    assert cu_seqlens_k.dtype == torch.int32 and lens.max() <= max_seqlen_k
    return _attend(q, k, v, cu_seqlens_q, lens, max_seqlen_q, softmax_scale, causal, window_size, softcap, block_table)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    **others: Any,
) -> Tensor:
    """Of version 3. descales: [requests, kv heads]."""
    assert not others and k is None and cache_seqlens is not None and page_table is not None and cu_seqlens_q is not None
    assert q.dtype == k_cache.dtype == v_cache.dtype and cache_seqlens.dtype == torch.int32 and max_seqlen_q is not None
    k_cache, v_cache, dtype = k_cache, v_cache, q.dtype
    if dtype == torch.float8_e4m3fn:
        assert k_descale is not None and v_descale is not None and not q.float().isnan().any()
        for descale in (k_descale, v_descale):
            assert descale.shape == (len(cache_seqlens), k_cache.shape[2]) and descale.dtype == torch.float32
            assert (descale == descale[0]).all(), "of a layer, which this stand-in may apply to its pages"
        k_cache = k_cache.float() * k_descale[0][:, None]
        v_cache = v_cache.float() * v_descale[0][:, None]
        dtype = torch.bfloat16
    found = _attend(
        q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, max_seqlen_q, softmax_scale, causal, window_size, softcap, page_table
    )
    return found.to(dtype)


def _attend(
    q_THD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    starts: Tensor,
    lens: Tensor,
    max_query_len: int,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    cap: float,
    table: Tensor,
) -> Tensor:
    assert causal and scale is not None and window[1] == (-1 if window[0] < 0 else 0)
    assert starts.dtype == table.dtype == torch.int32 and table.is_contiguous() and starts.diff().max() <= max_query_len
    assert k_BSGD.stride(-1) == v_BSGD.stride(-1) == 1
    size = k_BSGD.shape[1]
    requests = []
    for row, length in zip(table, lens.tolist(), strict=True):
        pages = row[: -(-length // size)].long()
        requests.append(tuple(plane[pages].flatten(0, 1)[:length].float() for plane in (k_BSGD, v_BSGD)))
    out_THD, _ = attend_plainly(q_THD, requests, starts.tolist(), scale, window[0], cap)
    return out_THD.to(q_THD.dtype) if q_THD.dtype.itemsize > 1 else out_THD


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in (("flash_attn", flash_attn_varlen_func), ("flash_attn_interface", flash_attn_with_kvcache)):
        package = ModuleType(name)
        setattr(package, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, package)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SPECS)
@pytest.mark.parametrize(("architecture", "name", "block_size"), CASES)
def test_outputs_and_cache_are_those_of_the_law(
    architecture: str, name: str, block_size: int, shape: str, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (shape, batch) != ("plain", "mixed"):  # interpreted, the writer takes longer than all else
        monkeypatch.setattr(kv_write, "write", lambda k, v, cache, slots: cache.format.write(k, v, cache, slots))
    spec, ours, law = SPECS[shape], module.FlashAttnBackend(architecture), get_backend("reference")
    parts = (scales_of(spec, "per head" if name == "fp8_e4m3" else "ones"), None)
    run, law_run = (make_run(backend, spec, name, batch, parts, block_size) for backend in (ours, law))
    assert ours.refuse(spec, run.cache.spec, platform_named(architecture)) is None
    kv = history(spec, batch)
    k_TGD, v_TGD = fill(run, kv)
    fill(law_run, kv)
    dtype = torch.float16 if name == "float16" else torch.bfloat16
    q_THD = torch.randn(len(k_TGD), spec.num_heads, spec.head_dim, generator=torch.Generator().manual_seed(5)).to(dtype)
    law.prepare(law_run.metadata, spec.sliding_window)
    law_q = e4m3(q_THD) if name == "fp8_e4m3" else q_THD.float()
    expected = law.forward(law_q, k_TGD.float(), v_TGD.float(), law_run.cache, law_run.metadata, spec)
    ours.prepare(run.metadata, spec.sliding_window)
    found = ours.forward(q_THD, k_TGD, v_TGD, run.cache, run.metadata, spec)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-8)  # rounded to bfloat16
    for slots_L in run.slots:
        read = [one.cache.format.read(one.cache, slots_L[None]) for one in (run, law_run)]
        assert all(torch.equal(x, y) for x, y in zip(*read, strict=True))


@pytest.mark.parametrize(
    ("architecture", "changes", "kv_changes", "reason"),
    [
        ("gfx950", {}, {}, "flash_attn: rocm not supported"),
        ("sm103", {}, {}, "flash_attn: version 4, which sm103 needs, is not called by this build"),
        ("sm80", {}, {}, "flash_attn: its version 2 reads blocks of 256 tokens and multiples, got 16"),
        ("sm90", {"num_heads": 9}, {}, "9 heads cannot share 2 kv heads evenly"),
        ("sm90", {"sinks": True}, {}, "flash_attn: sinks not supported"),
        ("sm90", {"head_dim_v": 128}, {}, "flash_attn: head sizes that differ in K and V not supported"),
        ("sm90", {}, {"first_tokens": 16}, "flash_attn: first tokens kept apart not supported"),
        ("sm90", {}, {"first_format": "float32"}, "flash_attn: models in float32 not supported"),
    ],
)
def test_refusals(architecture: str, changes: dict[str, Any], kv_changes: dict[str, Any], reason: str) -> None:
    spec = replace(SPECS["plain"], **changes)
    kv_spec = KVCacheSpec(spec.num_kv_heads, spec.head_dim, spec.head_dim_v, 16, None, "bfloat16")
    found = module.FlashAttnBackend(architecture).refuse(spec, replace(kv_spec, **kv_changes), platform_named(architecture))
    assert found is not None and found.reason.startswith(reason)
