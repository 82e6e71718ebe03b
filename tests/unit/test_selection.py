"""Who reads which KV format where: each limit that is known of vendors' kernels, and what is left when nobody reads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from halfbyte.errors import Refusal, UnsupportedError, UserError
from halfbyte.kernels.attention import BACKENDS
from halfbyte.kernels.attention.base import AttentionSpec
from halfbyte.kernels.attention.selection import MODEL_RULES, Reader, best, model_rule, read_by, readings, select
from halfbyte.kernels.attention.vendors import PRIORITIES, VENDORS, LayerFacts, priority, vendor_refusal
from halfbyte.kvcache.formats import FORMATS
from halfbyte.platform import PLATFORM_NAMES, platform_named

PLAIN = LayerFacts(AttentionSpec(16, 8, 128, 128, 0.1), 16)
LATENT = LayerFacts(AttentionSpec(128, 1, 576, 512, 0.1), 64, is_mla=True)
SM10X = ("sm100", "sm103")
OTHER_CUDA = [name for name in PLATFORM_NAMES if name.startswith("sm") and name not in SM10X]


def layer(**changes: Any) -> LayerFacts:
    """`PLAIN` with other numbers; head_dim is that of K and V."""
    if "head_dim" in changes:
        changes.setdefault("head_dim_v", changes["head_dim"])
    return replace(PLAIN, attention=replace(PLAIN.attention, **changes))


def reason(vendor: str, platform: str, kv_format: str, facts: LayerFacts = PLAIN) -> str:
    refusal = vendor_refusal(vendor, platform, kv_format, facts)
    return "" if refusal is None else refusal.reason


def awkward_layers() -> Iterator[LayerFacts]:
    yield from (layer(head_dim=dim) for dim in (2, 64, 72, 80, 96, 256, 512, 576))
    yield from (layer(head_dim=192, head_dim_v=128), layer(sinks=True), layer(sliding_window=128), layer(soft_cap=30.0))
    yield from (layer(num_heads=9), replace(PLAIN, block_size=1), replace(PLAIN, block_size=256))
    yield from (replace(PLAIN, is_causal=False), LATENT)


@pytest.mark.parametrize("platform", PLATFORM_NAMES)
def test_every_cell_is_one_of_three_outcomes(platform: str) -> None:
    here = platform_named(platform)
    for name in (*FORMATS, "k:fp8_e4m3,v:nvfp4"):
        for facts in (PLAIN, *awkward_layers()):
            found = readings(here, name, [facts])
            assert set(found) == {*BACKENDS, *VENDORS}
            preferred = [name for name in priority(here) if name in BACKENDS]
            assert list(found)[: len(preferred)] == preferred
            for answer in found.values():
                if isinstance(answer, Refusal):
                    assert answer.reason
                else:
                    assert answer.outcome in ("reads natively", "reads through our kernels")
            if best(found) is None:
                with pytest.raises(UnsupportedError):
                    select(here, name, [facts])
            else:
                assert select(here, name, [facts]) == best(found)


@pytest.mark.parametrize("platform", PLATFORM_NAMES)
@pytest.mark.parametrize("name", [name for name in FORMATS if not name.endswith("_ds_mla")])
def test_our_own_kernels_read_every_format_everywhere(platform: str, name: str) -> None:
    """Where no vendor's package is installed."""
    absent = {vendor: Refusal(f"{vendor}: not installed", "") for vendor in VENDORS}
    reader = select(platform_named(platform), name, [PLAIN], absent=absent)
    assert reader.outcome == "reads through our kernels" and reader.backend in BACKENDS


def test_a_vendors_row_does_not_make_it_selectable() -> None:
    """Only what the registry has is ever taken; the row says what would be."""
    here = platform_named("sm90")
    for vendor in set(VENDORS) - set(BACKENDS):
        answer = read_by(vendor, here, "bfloat16", PLAIN)
        assert isinstance(answer, Refusal)
        if vendor_refusal(vendor, "sm90", "bfloat16", PLAIN) is None:
            assert answer.reason == f"{vendor}: not in this build" and answer.fix == f"this build has {', '.join(BACKENDS)}"


def test_a_vendor_of_the_build_reads_natively_within_its_limits() -> None:
    """Its fast reader wins over the law; where its row refuses, our own kernels take over, for this back end only."""
    here = platform_named("sm90")
    assert select(here, "nvfp4", [PLAIN]) == Reader("flashinfer", is_vendors=True, is_fast=True)
    assert select(here, "nvfp4", [PLAIN]).outcome == "reads natively"
    for facts in (layer(head_dim=64), layer(sinks=True)):
        assert not select(here, "nvfp4", [facts]).is_vendors
        with pytest.raises(UnsupportedError, match="flashinfer: "):
            select(here, "nvfp4", [facts], "flashinfer")
    assert not select(here, "nvfp4", [PLAIN, layer(head_dim=64)]).is_vendors, "one back end runs all layers"


def test_r2_mla_needs_a_record_of_its_own() -> None:
    here = platform_named("sm100")
    for name in ("nvfp4", "nvfp4_4over6", "kv4", "int8_per_token_head"):
        with pytest.raises(UnsupportedError) as caught:
            select(here, name, [LATENT])
        [refusal] = caught.value.refusals
        assert refusal.reason == f"kv_cache_dtype {name} not supported with MLA: a latent needs a record of its own"
        assert refusal.fix == f"use --kv-cache-dtype {'nvfp4_ds_mla' if name.startswith('nvfp4') else 'fp8_ds_mla'}"
    for name in [name for name in FORMATS if name.endswith("_ds_mla")]:
        with pytest.raises(UnsupportedError, match="not supported without MLA"):
            select(here, name, [PLAIN])


def test_r4_a_back_end_that_was_asked_for_says_why_not() -> None:
    with pytest.raises(UnsupportedError) as caught:
        select(platform_named("sm90"), "bfloat16", [PLAIN], "cpu")
    assert [str(refusal) for refusal in caught.value.refusals] == [
        "the cpu attention back end does not run on cuda; leave --attention-backend out"
    ]
    with pytest.raises(UserError, match="--attention-backend must be one of auto, cpu, .*reference, got 'triton9'") as wrong:
        select(platform_named("cpu"), "bfloat16", [PLAIN], "triton9")
    assert wrong.value.param == "attention_backend"
    assert select(platform_named("cpu"), "bfloat16", [PLAIN], "reference").backend == "reference"


def test_r5_nobody_left_lists_every_back_end() -> None:
    with pytest.raises(UnsupportedError) as caught:
        select(platform_named("sm90"), "bfloat16", [replace(PLAIN, is_causal=False)])
    text = str(caught.value)
    assert all(f"{name}: " in text for name in (*BACKENDS, *VENDORS)), text
    assert all(refusal.fix for refusal in caught.value.refusals)


def test_a_back_end_that_the_machine_lacks_is_not_taken() -> None:
    here = platform_named("cpu")
    assert select(here, "bfloat16", [PLAIN]).backend == "cpu"
    absent = {"cpu": Refusal("cpu: no compiled kernels", "install g++")}
    assert select(here, "bfloat16", [PLAIN], absent=absent).backend == "reference"
    with pytest.raises(UnsupportedError, match=r"^cpu: no compiled kernels; install g\+\+$"):
        select(here, "bfloat16", [PLAIN], "cpu", absent)


def test_what_a_back_end_cannot_do_is_said_before_what_is_not_installed() -> None:
    absent = {"flashinfer": Refusal("flashinfer: not installed", "pip install")}
    with pytest.raises(UnsupportedError, match="^flashinfer: head size 64 not supported"):
        select(platform_named("sm90"), "nvfp4", [layer(head_dim=64)], "flashinfer", absent)
    with pytest.raises(UnsupportedError, match="^flashinfer: not installed; pip install$"):
        select(platform_named("sm90"), "nvfp4", [PLAIN], "flashinfer", absent)


@pytest.mark.parametrize("platform", OTHER_CUDA)
@pytest.mark.parametrize("name", ["nvfp4", "fp8_e4m3"])
def test_r6_flashinfer_misreads_nvfp4_at_head_size_64(platform: str, name: str) -> None:
    found = reason("flashinfer", platform, name, layer(head_dim=64))
    assert ("head size 64 not supported with nvfp4" in found) is (name == "nvfp4")


def test_r6_not_on_sm10x() -> None:
    assert all(reason("flashinfer", platform, "nvfp4", layer(head_dim=64)) == "" for platform in SM10X)


@pytest.mark.parametrize("platform", OTHER_CUDA)
def test_r7_flashinfer_has_no_nvfp4_with_sinks(platform: str) -> None:
    assert "sinks not supported with nvfp4" in reason("flashinfer", platform, "nvfp4", layer(sinks=True))


def test_r7_not_on_sm10x_nor_for_other_formats() -> None:
    assert all(reason("flashinfer", platform, "nvfp4", layer(sinks=True)) == "" for platform in SM10X)
    assert reason("flashinfer", "sm90", "bfloat16", layer(sinks=True)) == ""


@pytest.mark.parametrize("platform", PLATFORM_NAMES)
def test_r8_flashinfer_writes_4over6_on_sm10x_alone(platform: str) -> None:
    found = reason("flashinfer", platform, "nvfp4_4over6")
    assert (found == "") is (platform in SM10X)
    if platform in OTHER_CUDA:
        assert found.startswith(f"flashinfer: kv_cache_dtype nvfp4_4over6 not supported on {platform}")
        assert select(platform_named(platform), "nvfp4_4over6", [PLAIN]), "ours read it all the same"


@pytest.mark.parametrize("platform", ["sm80", "sm90", "sm100", "sm120"])
def test_r11_flashinfer_has_no_nvfp4_without_causality(platform: str) -> None:
    facts = replace(PLAIN, is_causal=False)
    assert "non-causal not supported with nvfp4" in reason("flashinfer", platform, "nvfp4", facts)
    assert reason("flashinfer", platform, "bfloat16", facts) == ""


@pytest.mark.parametrize("platform", PLATFORM_NAMES)
def test_r12_flash_attention_reads_fp8_where_it_has_version_3_or_4(platform: str) -> None:
    assert (reason("flash_attn", platform, "fp8_e4m3") == "") is (platform in ("sm90", *SM10X))
    assert reason("flash_attn", platform, "fp8_e5m2") != ""


def test_r17_the_mla_kernels_of_flashinfer_read_no_record() -> None:
    assert reason("flashinfer_mla", "sm100", "fp8_e4m3", LATENT) == ""
    assert "kv_cache_dtype fp8_ds_mla not supported" in reason("flashinfer_mla", "sm100", "fp8_ds_mla", LATENT)
    assert reason("flashmla", "sm90", "fp8_ds_mla", LATENT) == ""
    assert "nvfp4_ds_mla not supported on sm90" in reason("flashmla", "sm90", "nvfp4_ds_mla", LATENT)


def test_ultraquant_has_a_vendor_on_gfx950_alone() -> None:
    facts = replace(layer(head_dim=256, num_heads=64), block_size=64)
    assert reason("flydsl", "gfx950", "ultraquant_4bit", facts) == ""
    assert reason("flydsl", "gfx942", "ultraquant_4bit", facts) == "flydsl: gfx942 not supported"
    windowed = replace(facts, attention=replace(facts.attention, sliding_window=4096))
    assert "sliding window" in reason("flydsl", "gfx950", "ultraquant_4bit", windowed)


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("turboquant") and name.endswith("_nc")])
def test_turned_turboquant_keys_need_a_power_of_two(name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        select(platform_named("sm90"), name, [layer(head_dim=96)])
    assert len(caught.value.refusals) == 1, "what the format refuses is said once"


def test_aliases_have_the_rules_of_what_they_stand_for() -> None:
    assert readings(platform_named("sm90"), "fp8", [PLAIN]) == readings(platform_named("sm90"), "fp8_e4m3", [PLAIN])


def test_glm_takes_fp8_on_sm10x() -> None:
    rule = model_rule("GlmMoeDsaForCausalLM", platform_named("sm100"))
    assert rule is not None and (rule.kv_format, "TTFT" in rule.cost) == ("fp8_e4m3", True)
    assert model_rule("GlmMoeDsaForCausalLM", platform_named("sm103")) is rule
    assert model_rule("GlmMoeDsaForCausalLM", platform_named("sm90")) is None
    assert model_rule("LlamaForCausalLM", platform_named("sm100")) is None


def test_rules_name_what_exists() -> None:
    for rule in MODEL_RULES:
        assert rule.kv_format in FORMATS and rule.platforms <= set(PLATFORM_NAMES) and rule.reason and rule.cost
    assert all(len(set(names)) == len(names) for names in PRIORITIES.values()) and PRIORITIES["cpu"][-1] == "reference"
    for name, vendor in VENDORS.items():
        assert vendor.platforms <= set(PLATFORM_NAMES), name
        for limit in vendor.limits:
            assert limit.platforms <= vendor.platforms and limit.formats <= set(vendor.reads), (name, limit.reason)


@pytest.mark.parametrize(
    ("name", "device", "capability", "gfx"),
    [("cpu", "cpu", None, ""), ("sm103", "cuda", (10, 3), ""), ("sm86", "cuda", (8, 6), ""), ("gfx942", "rocm", None, "gfx942")],
)
def test_platforms_by_name(name: str, device: str, capability: tuple[int, int] | None, gfx: str) -> None:
    found = platform_named(name)
    assert (found.device, found.capability, found.gfx, found.architecture) == (device, capability, gfx, name)


def test_unknown_platform_names_what_is_possible() -> None:
    with pytest.raises(UserError, match="--platform must be one of cpu, sm80, .*, gfx950, got 'sm70'"):
        platform_named("sm70")


def test_selection_imports_no_torch() -> None:
    code = "import sys; import halfbyte.kernels.attention.selection; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
