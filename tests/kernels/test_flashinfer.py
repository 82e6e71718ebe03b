"""FlashInfer's back end against the law, on a stand-in that is as strict as the package: every route, format and kind of batch.

The stand-in computes in float32 what its calls describe; what is left between it and the law are roundings to the outputs' type.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from halfbyte.kernels.attention import get_backend
from halfbyte.kernels.attention.base import AttentionSpec
from halfbyte.kernels.attention.flashinfer import calls
from halfbyte.kvcache.formats import get_format, page_bytes
from halfbyte.kvcache.formats.blocks import swizzle_v_scales
from halfbyte.kvcache.spec import KVCacheSpec
from halfbyte.kvcache.tensors import view_layer
from halfbyte.kvcache.turns import LayerTurns
from halfbyte.platform import platform_named
from tests.kernels.fake_flashinfer import Fake, install
from tests.kernels.flashinfer_record import RECORD, record, signature, version_of
from tests.kernels.paged_batches import BATCHES, e4m3, fill, history, make_run, scales_of
from tests.kernels.triton_interpreter import interpreted

kv_write, backend_module = interpreted("halfbyte.kernels.triton.kv_write", "halfbyte.kernels.attention.flashinfer.backend")

SPECS = {
    "plain": AttentionSpec(8, 2, 128, 128, 0.09),
    "window": AttentionSpec(4, 2, 128, 128, 0.1, sliding_window=20),
    "capped": AttentionSpec(4, 4, 128, 128, 0.1, soft_cap=5.0),
    "sinks": AttentionSpec(4, 2, 128, 128, 0.1, sliding_window=33, sinks=True),
    "small": AttentionSpec(6, 2, 64, 64, 0.12),
}
ROUTES = {
    "sm80": ("fa2 decode", "fa2 prefill"),
    "sm90": ("fa2 decode", "fa2 prefill"),
    "sm100": ("trtllm decode", "trtllm prefill"),
    "sm120": ("xqa decode", "fa2 prefill"),
}
FORMATS = {
    "sm80": ("bfloat16", "fp8_e4m3", "fp8_e5m2", "nvfp4"),
    "sm90": ("bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "nvfp4"),
    "sm100": ("bfloat16", "fp8_e4m3", "nvfp4", "nvfp4_4over6"),
    "sm120": ("bfloat16", "fp8_e4m3", "nvfp4"),
}


@pytest.fixture(autouse=True)
def small_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept in them here but XQA's semaphores."""
    for name, num_bytes in (("_FA2_BYTES", 1 << 20), ("_XQA_BYTES", 9 << 20), ("_TRTLLM_BYTES", 1 << 20)):
        monkeypatch.setattr(calls, name, num_bytes)


def compare(
    architecture: str,
    name: str,
    shape: str,
    batch: str,
    patch: pytest.MonkeyPatch,
    scales: str = "ones",
    turns: LayerTurns | None = None,
    padding: int = 0,
    steps: int = 1,
) -> Fake:
    """Outputs and cache by FlashInfer's back end and by the law. In several steps, the Triton writer writes, else the law."""
    spec, fake = SPECS[shape], install(patch, architecture)
    if steps == 1:  # interpreted, the writer takes longer than all else
        patch.setattr(kv_write, "write", lambda k, v, cache, slots: cache.format.write(k, v, cache, slots))
    ours, law = backend_module.FlashInferBackend(architecture), get_backend("reference")
    parts = (scales_of(spec, scales), turns)
    run, law_run = (make_run(backend, spec, name, batch, parts) for backend in (ours, law))
    assert ours.refuse(spec, run.cache.spec, platform_named(architecture)) is None
    kv = history(spec, batch)
    k_TGD, v_TGD = fill(run, kv)
    fill(law_run, kv)
    generator = torch.Generator().manual_seed(5)
    q_THD = torch.randn(len(k_TGD), spec.num_heads, spec.head_dim, generator=generator).bfloat16()
    sinks_H = torch.randn(spec.num_heads, generator=generator) if spec.sinks else None

    takes_fp8, makes_fp8 = (architecture == "sm100" and is_so for is_so in (name not in ("bfloat16", "float16"), "nvfp4" in name))
    law_q = q_THD
    if takes_fp8:
        k_G = parts[0].k_G
        ratio_H1 = (k_G / k_G.max()).bfloat16().repeat_interleave(spec.num_heads // spec.num_kv_heads)[:, None]
        law_q = e4m3(q_THD * ratio_H1) / ratio_H1
    law.prepare(law_run.metadata, spec.sliding_window)
    expected = law.forward(law_q.float(), k_TGD.float(), v_TGD.float(), law_run.cache, law_run.metadata, spec, sinks_H)

    given = [torch.cat((x, torch.full((padding, *x.shape[1:]), torch.nan, dtype=x.dtype))) for x in (q_THD, k_TGD, v_TGD)]
    metadata = replace(run.metadata, slot_mapping=torch.nn.functional.pad(run.metadata.slot_mapping, (0, padding), value=-1))
    for _ in range(steps):  # plans are made anew in each
        ours.prepare(metadata, spec.sliding_window)
        out_THD = ours.forward(*given, run.cache, metadata, spec, sinks_H)
        assert out_THD.dtype == torch.bfloat16 and out_THD.shape == (len(q_THD) + padding, spec.num_heads, spec.head_dim)
        out_THD = out_THD[: len(q_THD)]
        # bfloat16 has 8 bits, and is rounded to twice where scales are applied; float16 K rounds nothing more. E4M3 has 4 bits.
        rtol, atol = (2**-4, 2**-9) if makes_fp8 else (2**-6, 2**-8)
        torch.testing.assert_close(out_THD.float(), expected, rtol=rtol, atol=atol)
    for slots_L in run.slots:
        read = [one.cache.format.read(one.cache, slots_L[None]) for one in (run, law_run)]
        assert all(torch.equal(x, y) for x, y in zip(*read, strict=True))
    return fake


CASES = [(each, name) for each, names in FORMATS.items() for name in names]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("architecture", "name"), CASES)
def test_every_route_and_batch(architecture: str, name: str, batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 2 if batch == "mixed" else 1
    fake = compare(architecture, name, "plain", batch, monkeypatch, steps=steps)
    decode, prefill = ROUTES[architecture]
    expected = {"decodes": [decode], "prefills": [prefill], "mixed": [decode, prefill]}[batch]
    assert fake.calls == steps * expected


@pytest.mark.parametrize(("architecture", "name"), CASES)
def test_windows(architecture: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(architecture, name, "window", "mixed", monkeypatch)


@pytest.mark.parametrize("name", FORMATS["sm90"])
def test_capped_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare("sm90", name, "capped", "mixed", monkeypatch)


@pytest.mark.parametrize(("architecture", "name"), [case for case in CASES if case[0] != "sm80" and "nvfp4" not in case[1]])
def test_sinks(architecture: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fa2 knows none: they are worked out from the sums that it returns."""
    compare(architecture, name, "sinks", "mixed", monkeypatch)


def test_sinks_with_block_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    compare("sm100", "nvfp4", "sinks", "mixed", monkeypatch)


@pytest.mark.parametrize("kind", ["shared", "per head"])
@pytest.mark.parametrize(("architecture", "name"), [case for case in CASES if "16" not in case[1]])
def test_scales(architecture: str, name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the layer, or one per kv head, which the kernels do not know."""
    compare(architecture, name, "plain", "mixed", monkeypatch, scales=kind)


@pytest.mark.parametrize(("architecture", "name"), [("sm90", "bfloat16"), ("sm90", "fp8_e4m3"), ("sm100", "nvfp4")])
def test_heads_of_64(architecture: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(architecture, name, "small", "mixed", monkeypatch)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("architecture", ROUTES)
def test_padded_batches(architecture: str, batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(architecture, "fp8_e4m3", "plain", batch, monkeypatch, padding=3)


def test_turned_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys by a matrix and its inverse: outputs stay as they are, but for one more rounding to bfloat16."""
    spec = SPECS["plain"]
    turn, _ = torch.linalg.qr(torch.randn(spec.head_dim, spec.head_dim, generator=torch.Generator().manual_seed(6)))
    k_GDD = turn.expand(spec.num_kv_heads, -1, -1)
    compare("sm90", "bfloat16", "plain", "mixed", monkeypatch, turns=LayerTurns(k_GDD=k_GDD, q_GDD=k_GDD))


def test_groups_with_plans_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of alike layers, prepared one after the other, then run in turns: neither takes the other's tables."""
    install(monkeypatch, "sm90")
    spec, ours, law = SPECS["plain"], backend_module.FlashInferBackend("sm90"), get_backend("reference")
    parts = (scales_of(spec, "ones"), None)
    runs = [make_run(ours, spec, "bfloat16", batch, parts) for batch in ("decodes", "mixed")]
    step = [fill(run, history(spec, batch)) for run, batch in zip(runs, ("decodes", "mixed"), strict=True)]
    for group, run in enumerate(runs):
        run.metadata.group = group
        ours.prepare(run.metadata, None)
    queries = [torch.randn(len(k), spec.num_heads, spec.head_dim).bfloat16() for k, _ in step]
    for _ in range(2):
        for run, (k_TGD, v_TGD), q_THD in zip(runs, step, queries, strict=True):
            found = ours.forward(q_THD, k_TGD, v_TGD, run.cache, run.metadata, spec)
            metadata = replace(run.metadata)
            law.prepare(metadata, None)
            expected = law.forward(q_THD.float(), k_TGD.float(), v_TGD.float(), run.cache, metadata, spec)
            torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-8)  # rounded to bfloat16


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6"])
def test_the_writer_interleaves_v_scales(name: str) -> None:
    """As the law's arrangement has them, which is FlashInfer's own formula; all else lies as in the plain format."""
    spec, pages, caches = SPECS["plain"], [], []
    for each in (name, f"{name}_swizzled", f"{name}_swizzled"):
        kv_spec = KVCacheSpec(spec.num_kv_heads, spec.head_dim, spec.head_dim, 16, None, each)
        pages.append(torch.zeros(4, page_bytes(kv_spec), dtype=torch.uint8))
        caches.append(view_layer(pages[-1], kv_spec))
    k_TGD, v_TGD = torch.randn(2, 30, spec.num_kv_heads, spec.head_dim, generator=torch.Generator().manual_seed(7))
    slots_T = 16 + torch.randperm(3 * 16, generator=torch.Generator().manual_seed(8))[:30]
    slots_T[4] = -1
    for cache in caches[:2]:
        cache.format.write(k_TGD, v_TGD, cache, slots_T)
    kv_write.write(k_TGD, v_TGD, caches[2], slots_T)
    assert torch.equal(pages[1], pages[2])
    plain, swizzled = (cache.planes for cache in caches[:2])
    assert torch.equal(swizzled["v_extra"], swizzle_v_scales(plain["v_extra"]))
    assert all(torch.equal(plain[plane], swizzled[plane]) for plane in ("k", "k_extra", "v"))


@pytest.mark.parametrize(
    ("architecture", "changes", "kv_changes", "reason"),
    [
        ("cpu", {}, {}, "flashinfer: cpu not supported"),
        ("gfx942", {}, {}, "flashinfer: rocm not supported"),
        ("sm90", {"num_heads": 9}, {}, "9 heads cannot share 2 kv heads evenly"),
        ("sm90", {"head_dim_v": 64}, {}, "flashinfer: head sizes that differ in K and V not supported"),
        ("sm90", {}, {"first_tokens": 16}, "flashinfer: first tokens kept apart not supported"),
        ("sm90", {}, {"first_format": "float32"}, "flashinfer: models in float32 not supported"),
        ("sm100", {"soft_cap": 5.0}, {}, "flashinfer: capped scores not supported on sm100: trtllm has no cap"),
        ("sm121", {"soft_cap": 5.0}, {}, "flashinfer: capped scores not supported on sm121: xqa has no cap"),
        ("sm120", {}, {"format": "fp8_e5m2"}, "flashinfer: kv_cache_dtype fp8_e5m2 not supported on sm120: xqa reads E4M3"),
        ("sm120", {"head_dim": 512, "head_dim_v": 512, "num_heads": 64}, {}, "flashinfer: heads of more than 256 on sm120"),
    ],
)
def test_refusals(architecture: str, changes: dict, kv_changes: dict, reason: str) -> None:
    spec = replace(SPECS["plain"], **changes)
    kv_spec = KVCacheSpec(spec.num_kv_heads, spec.head_dim, spec.head_dim_v, 16, None, "bfloat16")
    found = backend_module.FlashInferBackend("").refuse(spec, replace(kv_spec, **kv_changes), platform_named(architecture))
    assert found is not None and found.reason.startswith(reason)


def test_graphs_hold_what_does_not_plan_on_the_host() -> None:
    support = {name: backend_module.FlashInferBackend(name).graph_support for name in ROUTES}
    assert support == {"sm80": "none", "sm90": "none", "sm100": "decode", "sm120": "decode"}


@pytest.mark.parametrize("architecture", ["sm100", "sm120"])
def test_a_captured_batch_reads_the_device_alone(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph stands for many batches: the host's lengths are bounds, the device's count, and nothing is sent there meanwhile.
    The last request is padding."""
    install(monkeypatch, architecture)
    spec, ours, law = SPECS["plain"], backend_module.FlashInferBackend(architecture), get_backend("reference")
    run = make_run(ours, spec, "bfloat16", "decodes", (scales_of(spec, "ones"), None))
    k_TGD, v_TGD = fill(run, history(spec, "decodes"))
    q_THD = torch.randn(len(k_TGD), spec.num_heads, spec.head_dim, generator=torch.Generator().manual_seed(5)).bfloat16()
    law.prepare(run.metadata, None)
    expected = law.forward(q_THD.float(), k_TGD.float(), v_TGD.float(), run.cache, run.metadata, spec)
    captured = replace(run.metadata, seq_lens=run.metadata.seq_lens.clone(), slot_mapping=run.metadata.slot_mapping.clone())
    captured.seq_lens_host = [64] * len(captured.seq_lens)
    captured.seq_lens[-1], captured.slot_mapping[-1] = 0, -1
    ours.prepare(captured, None)
    found = ours.forward(q_THD, k_TGD, v_TGD, run.cache, captured, spec)
    torch.testing.assert_close(found[:-1].float(), expected[:-1], rtol=2**-7, atol=2**-8)  # rounded to bfloat16
    assert captured.plan.prefills is None and "_table" not in vars(captured.plan.decodes)


def test_arrangements() -> None:
    spec = KVCacheSpec(2, 128, 128, 16, None, "nvfp4")
    for name in ROUTES:
        arranged = backend_module.FlashInferBackend(name).arrange(spec)
        assert arranged == ("nvfp4_swizzled" if name == "sm100" else "nvfp4")
        assert get_format(arranged).refuse(replace(spec, format=arranged), platform_named(name)) is None
    assert backend_module.FlashInferBackend("sm100").arrange(replace(spec, format="bfloat16")) == "bfloat16"


def test_the_stand_in_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "sm90")
    import flashinfer

    workspace = torch.zeros(1 << 10, dtype=torch.uint8)
    with pytest.raises(TypeError, match="unexpected keyword"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2", use_tensor_cores=True)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", backend="fa2", use_tensor_cores=True)
    with pytest.raises(TypeError, match="missing a required"):
        wrapper.plan(torch.zeros(2, dtype=torch.int32), num_qo_heads=1)


def test_the_record_knows_what_the_package_has() -> None:
    found = find_spec("flashinfer")
    if found is None or found.origin is None:
        pytest.skip("flashinfer is not installed")
    folder = Path(found.origin).parent
    assert record(folder) == {name: _rows(name) for name in record(folder)}, (
        f"{RECORD} is of another version than {version_of(folder)}"
    )


def _rows(name: str) -> list[tuple[str, str, str | None]]:
    parameters = signature(name).parameters.values()
    return [(each.name, each.kind.name, None if each.default is each.empty else each.default) for each in parameters]
