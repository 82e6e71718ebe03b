"""What `auto` takes, cell by cell, where every vendor's package is installed; and what becomes of vLLM's cells.

The layer: 16 heads over 8 kv heads of 128, blocks of 16, no sinks. The tables are literal: who changes a rule changes a cell.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from halfbyte.errors import Refusal, UnsupportedError
from halfbyte.kernels.attention.base import AttentionSpec
from halfbyte.kernels.attention.presence import DOWNLOAD, INSTALL, Machine, absent
from halfbyte.kernels.attention.selection import readings, select
from halfbyte.kernels.attention.vendors import LayerFacts
from halfbyte.kvcache.formats import FORMATS
from halfbyte.platform import PLATFORM_NAMES, platform_named

PLAIN = LayerFacts(AttentionSpec(16, 8, 128, 128, 0.1), 16)

# FA: flash_attn, FI: flashinfer, T: triton, C: cpu
TABLE = """
                     cpu  sm80 sm86 sm89 sm90 sm100 sm103 sm120 sm121 gfx90a gfx942 gfx950
bfloat16             C    FI   FI   FI   FA   FI    FI    FI    FI    T      T      T
float16              C    FI   FI   FI   FA   FI    FI    FI    FI    T      T      T
float32              C    T    T    T    T    T     T     T     T     T      T      T
fp8_e4m3             C    FI   FI   FI   FA   FI    FI    FI    FI    T      T      T
fp8_e5m2             C    FI   FI   FI   FI   T     T     T     T     T      T      T
fp8_per_token_head   C    T    T    T    T    T     T     T     T     T      T      T
int8_per_token_head  C    T    T    T    T    T     T     T     T     T      T      T
int4_per_token_head  C    T    T    T    T    T     T     T     T     T      T      T
nvfp4                C    FI   FI   FI   FI   FI    FI    FI    FI    T      T      T
nvfp4_4over6         C    T    T    T    T    FI    FI    T     T     T      T      T
ultraquant_4bit      C    T    T    T    T    T     T     T     T     T      T      T
turboquant_k8v4      C    T    T    T    T    T     T     T     T     T      T      T
turboquant_4bit_nc   C    T    T    T    T    T     T     T     T     T      T      T
kv4                  C    T    T    T    T    T     T     T     T     T      T      T
kv4_e2m1             C    T    T    T    T    T     T     T     T     T      T      T
kv5                  C    T    T    T    T    T     T     T     T     T      T      T
kv6                  C    T    T    T    T    T     T     T     T     T      T      T
"""
NAMES = {"FA": "flash_attn", "FI": "flashinfer", "T": "triton", "C": "cpu"}

# What vLLM 0.32 ends with on NVIDIA's platforms; -: it has no reader.
VLLM = """
                     sm80 sm86 sm89 sm90 sm100 sm103 sm120 sm121
bfloat16             FA   FA   FA   FA   FI    FI    FA    FA
fp8_e4m3             FI   FI   FI   FA   FI    FI    FI    FI
fp8_e5m2             FI   FI   FI   FI   FI    FI    FI    FI
nvfp4                FI   FI   FI   FI   FI    FI    FI    FI
nvfp4_4over6         -    -    -    -    FI    FI    -     -
int8_per_token_head  T    T    T    T    T     T     T     T
fp8_per_token_head   T    T    T    T    T     T     T     T
int4_per_token_head  T    T    T    T    T     T     T     T
turboquant_k8v4      T    T    T    T    T     T     T     T
"""
# Where we differ from it although it has a reader, and why.
DIFFERENT = {
    **{
        ("bfloat16", name): "its own build of FlashAttention 2 reads blocks of 16, the released one those of 256"
        for name in ("sm80", "sm86", "sm89", "sm120", "sm121")
    },
    **{
        ("fp8_e5m2", name): "only fa2 reads it there, which no graph can hold; our own kernels can be held"
        for name in ("sm100", "sm103", "sm120", "sm121")
    },
}


def cells(table: str) -> dict[tuple[str, str], str]:
    """(format, platform) -> mark."""
    header, *rows = [line.split() for line in table.strip().splitlines()]
    return {(row[0], platform): mark for row in rows for platform, mark in zip(header, row[1:], strict=True)}


def test_the_table_names_every_plain_format_and_every_platform() -> None:
    plain = [name for name in FORMATS if not name.endswith("_ds_mla")]
    assert list(cells(TABLE)) == list(product(plain, PLATFORM_NAMES))


@pytest.mark.parametrize("name", sorted({name for name, _ in cells(TABLE)}))
def test_auto_takes_what_the_table_says(name: str) -> None:
    for platform in PLATFORM_NAMES:
        reader = select(platform_named(platform), name, [PLAIN])
        assert reader.backend == NAMES[cells(TABLE)[name, platform]], platform
        assert reader.is_fast


def test_vllms_cells_and_ours() -> None:
    ours = cells(TABLE)
    for cell, mark in cells(VLLM).items():
        if mark == "-":
            assert ours[cell] == "T", "our own kernels fill the gap"
        else:
            assert (ours[cell] == mark) is (cell not in DIFFERENT), cell
    assert set(DIFFERENT) <= set(cells(VLLM))


@pytest.mark.parametrize("platform", ["sm80", "sm86", "sm89", "sm120", "sm121"])
def test_flash_attention_2_has_blocks_of_256(platform: str) -> None:
    assert select(platform_named(platform), "bfloat16", [replace(PLAIN, block_size=256)]).backend == "flash_attn"
    answer = readings(platform_named(platform), "bfloat16", [PLAIN])["flash_attn"]
    assert isinstance(answer, Refusal) and "reads blocks of 256 tokens and multiples, got 16" in answer.reason


def test_flash_attention_4_is_not_called() -> None:
    answer = readings(platform_named("sm100"), "fp8_e4m3", [PLAIN])["flash_attn"]
    assert (
        isinstance(answer, Refusal) and answer.reason == "flash_attn: version 4, which sm100 needs, is not called by this build"
    )


@pytest.mark.parametrize("platform", ["sm80", "sm90", "sm120"])
@pytest.mark.parametrize("changes", [{"head_dim": 64, "head_dim_v": 64}, {"sinks": True}], ids=["r6", "r7"])
def test_what_flashinfer_cannot_read_of_nvfp4_triton_reads(platform: str, changes: dict[str, int]) -> None:
    layer = replace(PLAIN, attention=replace(PLAIN.attention, **changes))
    assert select(platform_named(platform), "nvfp4", [layer]).backend == "triton"
    assert select(platform_named("sm100"), "nvfp4", [layer]).backend == "flashinfer"


@pytest.mark.parametrize("platform", ["sm90", "sm100", "sm120"])
@pytest.mark.parametrize("name", ["bfloat16", "nvfp4"])
def test_first_tokens_and_odd_heads_are_for_triton(platform: str, name: str) -> None:
    for layer in (replace(PLAIN, first_tokens=16), replace(PLAIN, attention=replace(PLAIN.attention, head_dim_v=64))):
        assert select(platform_named(platform), name, [layer]).backend == "triton"


ALL = {name: "" for name in ("triton", "flash_attn_interface")} | {"flash_attn": "2.8.3", "flashinfer": "0.7.2.post1"}


@pytest.mark.parametrize(
    ("platform", "machine", "reasons"),
    [
        ("sm90", Machine(ALL, compiles=True), {}),
        ("sm100", Machine(ALL, compiles=True, has_cubins=True), {}),
        ("sm80", Machine(ALL | {"flashinfer_jit_cache": "0.7.2.post1+cu130"}), {}),
        ("sm103", Machine(ALL | {"flashinfer_jit_cache": "0.7.2.post1", "flashinfer_cubin": "0.7.2.post1"}), {}),
        (
            "sm90",
            Machine({}),
            {
                "triton": f"triton: not installed; {INSTALL}",
                "flashinfer": f"flashinfer: not installed; {INSTALL}",
                "flash_attn": "flash_attn: sm90 needs the package flash_attn_interface, which is not installed; build ",
            },
        ),
        (
            "sm80",
            Machine(ALL),
            {"flashinfer": f"flashinfer: finds neither its finished kernels nor nvcc and ninja to compile them; {DOWNLOAD}"},
        ),
        (
            "sm80",
            Machine(ALL | {"flashinfer_jit_cache": "0.7.1+cu130"}),
            {"flashinfer": "flashinfer: finds neither its finished kernels"},
        ),
        ("sm100", Machine(ALL, compiles=True), {"flashinfer": "flashinfer: NVIDIA's kernels for sm100 (cubins) are not on "}),
        (
            "sm90",
            Machine(ALL | {"flashinfer": "0.7.1"}, compiles=True),
            {"flashinfer": "flashinfer: version 0.7.1 is installed, "},
        ),
        (
            "sm90",
            Machine(ALL | {"flashinfer": "0.8.0"}, compiles=True),
            {"flashinfer": "flashinfer: version 0.8.0 is installed, "},
        ),
        ("sm90", Machine(ALL | {"flashinfer": ""}, compiles=True), {"flashinfer": "flashinfer: version unknown is installed, "}),
        (
            "sm86",
            Machine(ALL | {"flash_attn": "2.5.9"}, compiles=True),
            {"flash_attn": "flash_attn: version 2.5.9 is installed, "},
        ),
        (
            "sm90",
            Machine({name: version for name, version in ALL.items() if name != "flash_attn_interface"}, compiles=True),
            {"flash_attn": "flash_attn: sm90 needs the package flash_attn_interface, which is not installed; flash_attn 2.8.3 "},
        ),
    ],
)
def test_what_is_not_on_the_machine(platform: str, machine: Machine, reasons: dict[str, str]) -> None:
    """Each with what helps. A back end that is absent is not taken, and refused with that reason where it is asked for."""
    here = platform_named(platform)
    found = absent(here, machine)
    assert set(found) == set(reasons)
    for name, reason in reasons.items():
        assert str(found[name]).startswith(reason) and found[name].fix
        if name in ("flashinfer", "flash_attn"):
            layer = replace(PLAIN, block_size=256 if (name, platform) == ("flash_attn", "sm86") else 16)
            with pytest.raises(UnsupportedError, match=f"^{name}: "):
                select(here, "bfloat16", [layer], name, found)
            assert select(here, "bfloat16", [layer], absent=found).backend != name
