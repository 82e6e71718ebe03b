"""The compiled attention over every KV format against the law: what is stored, bit for bit, and what attention makes of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.attention import get_backend
from halfbyte.kernels.attention.base import AttentionSpec
from halfbyte.kernels.cpu.library import CpuEngine, KernelsMissing, instruction_sets
from halfbyte.kvcache.formats import FORMATS
from tests.kernels.paged_attention import Case, run

try:
    instruction_sets()
except KernelsMissing as reason:
    pytest.skip(str(reason), allow_module_level=True)

NAMES = [name for name in FORMATS if not name.endswith("_mla")]
NAMES += ["k:fp8,v:nvfp4", "k:kv5,v:bfloat16", "k:float16,v:int4_per_token_head", "k:kv4,v:kv6"]
SPECS = {
    "grouped": AttentionSpec(9, 3, 64, 64, 0.125),
    "window": AttentionSpec(4, 4, 80, 96, 0.1, sliding_window=40),
    "capped": AttentionSpec(8, 1, 128, 128, 0.08, soft_cap=20.0),
    "wide": AttentionSpec(4, 1, 256, 256, 0.06),
    "sinks": AttentionSpec(8, 2, 64, 64, 0.125, sliding_window=100, sinks=True),
}


CASES = [(name, shape, first) for name in NAMES for shape, first in (("grouped", 16), ("wide", 0), ("window", 16))]
CASES += [(name, shape, first) for name in ("fp8_e4m3", "kv5") for shape in ("capped", "sinks") for first in (0, 16)]


@pytest.mark.parametrize(("name", "shape", "first_tokens"), CASES)
def test_outputs_and_cache_are_those_of_the_law(name: str, shape: str, first_tokens: int) -> None:
    """Without the format's turns, which would differ in their last bits."""
    law, fast = law_and_fast(name, SPECS[shape], first_tokens, is_turned=False)
    assert all(torch.equal(x, y) for x, y in zip(law[0], fast[0], strict=True))
    torch.testing.assert_close(fast[1], law[1], rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("isa", instruction_sets()[1:])
@pytest.mark.parametrize(
    "name", ["kv5", "kv6", "k:fp8,v:int8_per_token_head", "ultraquant_4bit", "turboquant_4bit_nc", "int4_per_token_head"]
)
def test_other_instruction_sets_too(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.kernels.attention.cpu._engine", lambda num_threads: CpuEngine(num_threads, isa))
    law, fast = law_and_fast(name, SPECS["grouped"], 16, is_turned=False)
    assert all(torch.equal(x, y) for x, y in zip(law[0], fast[0], strict=True))
    torch.testing.assert_close(fast[1], law[1], rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("first_tokens", [0, 16])
@pytest.mark.parametrize("shape", ["grouped", "wide"])
@pytest.mark.parametrize("name", ["kv4", "ultraquant_4bit", "int4_per_token_head"])
def test_turned_heads_are_those_of_the_law(name: str, shape: str, first_tokens: int) -> None:
    law, fast = law_and_fast(name, SPECS[shape], first_tokens, is_turned=True)
    for x, y in zip(law[0], fast[0], strict=True):
        assert ((x - y).abs() > 1e-4 * x.abs().max()).float().mean() < 0.01, "now and then a code differs"
    torch.testing.assert_close(fast[1], law[1], rtol=5e-3, atol=5e-3)


def law_and_fast(name: str, spec: AttentionSpec, first_tokens: int, *, is_turned: bool) -> list[tuple[list[Tensor], Tensor]]:
    return run(Case(name, spec, first_tokens, is_turned), get_backend("reference"), get_backend("cpu"))
