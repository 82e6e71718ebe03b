"""The Triton attention back end against the law: every KV format, decoding, drafts, prompts and mixtures.

What is stored agrees bit for bit. Outputs differ by the order of sums, in bfloat16 also by what goes into products: queries and
weights of the softmax have 8 bits there (11 where codes are read as float16), the law's 24.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfbyte.kernels.attention import get_backend
from halfbyte.kernels.attention.base import AttentionSpec
from halfbyte.kvcache.formats import FORMATS
from tests.kernels.paged_attention import Case, run
from tests.kernels.triton_interpreter import ON_GPU, interpreted

attention, targets = interpreted("halfbyte.kernels.triton.attention", "halfbyte.kernels.triton.targets")

from halfbyte.kernels.attention.triton import TritonBackend  # noqa: E402

NAMES = [name for name in FORMATS if not name.endswith("_mla")]
NAMES += ["k:fp8,v:nvfp4", "k:kv5,v:bfloat16", "k:kv4,v:kv6"]
FLOAT32 = {"rtol": 1e-4, "atol": 3e-5}
BFLOAT16 = {"rtol": 2e-2, "atol": 2e-2}
PLAIN = AttentionSpec(6, 2, 64, 64, 0.125)
# query length and context: decoding in one part and in several, a chunk behind a prefix, a whole prompt, nothing but itself
REQUESTS = ((1, 270), (37, 60), (1, 1), (5, 20))


def compare(case: Case, backend: TritonBackend | None = None) -> None:
    law, fast = run(case, get_backend("reference"), backend or TritonBackend())
    assert all(torch.equal(x, y) for x, y in zip(law[0], fast[0], strict=True))
    torch.testing.assert_close(fast[1], law[1], **(FLOAT32 if case.dtype is torch.float32 else BFLOAT16))


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of contexts are short, so that a few tokens make several; few programs share them."""
    monkeypatch.setattr(attention, "part_tokens", lambda _: 64)
    monkeypatch.setattr(attention, "num_programs", lambda _: 3)
    if ON_GPU:
        here = attention.gpu_of(torch.device("cuda", 0))
        monkeypatch.setattr(attention, "gpu_of", lambda _: here)


@pytest.mark.parametrize("name", NAMES)
def test_every_format_in_float32(name: str) -> None:
    compare(Case(name, PLAIN, requests=REQUESTS))


@pytest.mark.parametrize("name", NAMES)
def test_every_format_in_bfloat16(name: str) -> None:
    compare(Case(name, PLAIN, requests=REQUESTS, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["bfloat16", "nvfp4", "kv4", "kv6", "int8_per_token_head"])
def test_first_tokens_apart(name: str) -> None:
    for first_tokens in (16, 32):
        compare(Case(name, PLAIN, first_tokens, requests=REQUESTS, dtype=torch.bfloat16))


SPECS = {
    "one head": AttentionSpec(1, 1, 64, 64, 0.125),
    "three heads each, 80": AttentionSpec(6, 2, 80, 80, 0.11),
    "four heads each, 96": AttentionSpec(8, 2, 96, 96, 0.1),
    "eight heads each, 128": AttentionSpec(8, 1, 128, 128, 0.09),
    "256": AttentionSpec(2, 1, 256, 256, 0.06),
    "512": AttentionSpec(2, 2, 512, 512, 0.04),
    "K 128, V 64": AttentionSpec(4, 2, 128, 64, 0.09),
    "window": AttentionSpec(4, 2, 64, 64, 0.125, sliding_window=40),
    "long window": AttentionSpec(4, 2, 64, 64, 0.125, sliding_window=130),
    "cap": AttentionSpec(4, 2, 64, 64, 0.125, soft_cap=3.0),
    "sinks": AttentionSpec(8, 2, 64, 64, 0.125, sinks=True),
    "sinks and window": AttentionSpec(8, 2, 64, 64, 0.125, sliding_window=33, sinks=True),
}


@pytest.mark.parametrize("shape", SPECS)
@pytest.mark.parametrize("name", ["bfloat16", "fp8_e4m3", "nvfp4", "kv4"])
def test_every_kind_of_layer(name: str, shape: str) -> None:
    first_tokens = 16 if name == "kv4" else 0
    compare(Case(name, SPECS[shape], first_tokens, requests=((1, 150), (9, 75), (33, 33)), dtype=torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SPECS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_format_of_every_kind_of_layer(name: str, shape: str, dtype: torch.dtype) -> None:
    compare(Case(name, SPECS[shape], 16, requests=((1, 150), (9, 75), (33, 33)), dtype=dtype))


@pytest.mark.parametrize("name", ["bfloat16", "nvfp4", "kv4", "int4_per_token_head", "ultraquant_4bit"])
def test_turned_heads(name: str) -> None:
    """K, V and queries are turned by the kernels, in sums of another order: now and then a code differs."""
    for requests in (REQUESTS, ((1, 150), (1, 30))):
        case = Case(name, PLAIN, 16, is_turned=name not in ("bfloat16", "nvfp4"), requests=requests, dtype=torch.bfloat16)
        law, fast = run(case, get_backend("reference"), TritonBackend())
        for x, y in zip(law[0], fast[0], strict=True):
            assert ((x.float() - y.float()).abs() > 1e-2 * x.float().abs().max()).float().mean() < 0.01
        torch.testing.assert_close(fast[1], law[1], **BFLOAT16)


@pytest.mark.parametrize("block_size", [32, 64])
def test_longer_blocks(block_size: int) -> None:
    compare(Case("nvfp4", PLAIN, requests=REQUESTS, dtype=torch.bfloat16, block_size=block_size))


@pytest.mark.parametrize("name", ["float16", "nvfp4", "kv4"])
def test_float16(name: str) -> None:
    compare(Case(name, PLAIN, 16, requests=REQUESTS, dtype=torch.float16))


@pytest.mark.parametrize("shape", ["one head", "window", "sinks", "eight heads each, 128"])
@pytest.mark.parametrize("max_queries", [3, 4])
def test_drafts_are_decoded_together(max_queries: int, shape: str) -> None:
    """Requests of up to so many queries, all alike or not, beside one that has more."""
    requests = ((max_queries, 150), (max_queries, 70), (1, 66), (max_queries + 1, 20))
    compare(Case("nvfp4", SPECS[shape], requests=requests, dtype=torch.bfloat16), TritonBackend(max_queries))


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    """Alone and in the middle of others: the same bits."""
    case = Case("nvfp4", PLAIN, requests=REQUESTS, dtype=torch.bfloat16)
    [(_, alone)] = run(replace(case, requests=REQUESTS[:1]), TritonBackend())
    [(_, together)] = run(case, TritonBackend())
    assert torch.equal(alone[:1], together[:1])


def test_large_queries_do_not_overflow() -> None:
    """Codes are read as float16, whose greatest number is 65504; queries may be greater."""
    spec = replace(PLAIN, scale=PLAIN.scale * 2.0**-20)
    case = Case("nvfp4", spec, requests=REQUESTS, dtype=torch.bfloat16, query_scale=2.0**20)
    compare(case)


@pytest.mark.parametrize("max_context_len", [0, 1, 16384, 16385, 131072, 1 << 20])
def test_the_longest_context_has_few_parts(max_context_len: int) -> None:
    size = targets.part_tokens(max_context_len)
    assert size & (size - 1) == 0
    assert -(-max_context_len // size) <= 64
    assert size == 256 or -(-max_context_len // (size // 2)) > 64
