"""The Triton writer and tile reader against the law, in the interpreter: every KV format, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.triton import limits
from halfbyte.kvcache.formats import ARRANGEMENTS, FORMATS, get_format
from halfbyte.kvcache.formats.coded import CodedFormat
from halfbyte.kvcache.formats.dense import DenseFormat
from halfbyte.kvcache.scales import LayerScales
from halfbyte.kvcache.spec import KVCacheSpec
from halfbyte.kvcache.tensors import LayerCache, view_layer
from halfbyte.platform import detect_platform
from tests.kernels.triton_interpreter import interpreted, jit, tl

kv_write, kv_read, sides = interpreted(
    "halfbyte.kernels.triton.kv_write", "halfbyte.kernels.triton.kv_read", "halfbyte.kernels.triton.sides"
)
read_tile, read_halves = kv_read.read_tile, kv_read.read_halves

# kv heads, head dim of K and of V, block size
SHAPES = [(3, 64, 64, 16), (1, 80, 80, 16), (3, 96, 96, 4), (2, 128, 128, 16), (1, 256, 256, 32), (3, 192, 128, 8)]
MORE_SHAPES = [(1, 16, 16, 1), (2, 32, 64, 16), (7, 48, 80, 5), (1, 112, 112, 16), (4, 512, 512, 64), (1, 576, 512, 64)]
PAIRS = ["k:fp8,v:nvfp4", "k:kv6,v:fp8_e5m2", "k:bfloat16,v:kv4", "k:turboquant_4bit_nc,v:float32", "k:int8_per_token_head,v:kv6"]
NUM_BLOCKS = 5

HELD = [name for name in FORMATS if isinstance(get_format(name), CodedFormat | DenseFormat)]

every_format = pytest.mark.parametrize("name", [*HELD, *PAIRS])


def spec_of(name: str, shape: tuple[int, int, int, int]) -> KVCacheSpec:
    heads, dim, dim_v, block_size = shape
    spec = KVCacheSpec(
        num_kv_heads=heads, head_dim=dim, head_dim_v=dim_v, block_size=block_size, sliding_window=None, format=name
    )
    if refusal := get_format(name).refuse(spec, detect_platform("cpu")) or limits.refuse(spec):
        pytest.skip(refusal.reason)
    return spec


def make_cache(spec: KVCacheSpec) -> tuple[Tensor, LayerCache]:
    """Pages with something in them everywhere but in the null block, and scales that differ by head."""
    generator = torch.Generator().manual_seed(2)
    page_bytes = sum(plane.bytes for plane in get_format(spec.format).planes(spec))
    pages = torch.randint(0, 120, (NUM_BLOCKS, page_bytes), dtype=torch.uint8, generator=generator)
    pages[0] = 0
    k_G, v_G = (torch.exp2(torch.rand(spec.num_kv_heads, generator=generator) * 8 - 7) for _ in range(2))
    return pages, view_layer(pages, spec, LayerScales(k_G, v_G, calibrated=True))


def make_vectors(num_tokens: int, heads: int, dim: int, seed: int) -> Tensor:
    """[T, G, D]: of many sizes, and as first tokens what codecs stumble over."""
    generator = torch.Generator().manual_seed(seed)
    sizes_TG1 = torch.exp2(torch.randint(-12, 10, (num_tokens, heads, 1), generator=generator).float())
    x_TGD = torch.randn(num_tokens, heads, dim, generator=generator) * sizes_TG1
    odd_TGD = torch.zeros(9, heads, dim)
    odd_TGD[1] = -0.0
    odd_TGD[2] = 1e-40 * torch.arange(dim)
    odd_TGD[3] = 3e38
    odd_TGD[4] = torch.linspace(-3e38, 3e38, dim)
    odd_TGD[5, :, -1] = -7.0
    odd_TGD[6] = torch.arange(dim) % 16 / 2 - 4  # ties
    odd_TGD[7], odd_TGD[7, :, 3] = 1.0, torch.inf
    odd_TGD[8], odd_TGD[8, :, 5] = 2e-20, -torch.inf
    return torch.cat((odd_TGD, x_TGD))[:num_tokens]


def make_slots(spec: KVCacheSpec, num_tokens: int) -> Tensor:
    """Distinct slots outside the null block, and every fifth token nowhere."""
    usable = (NUM_BLOCKS - 1) * spec.block_size
    slots_T = torch.full((num_tokens,), -1)
    kept_T = torch.arange(num_tokens) % 5 != 4
    order = torch.randperm(usable, generator=torch.Generator().manual_seed(1)) + spec.block_size
    slots_T[kept_T.nonzero()[:usable, 0]] = order[: min(int(kept_T.sum()), usable)]
    return slots_T


@jit
def gather(side: Any, slots: Any, out: Any, num_slots: Any, BLOCK_SIZE: tl.constexpr, SLOTS: tl.constexpr, HALVES: tl.constexpr):
    """Grid: kv heads. out: float32 [slots, G, D]."""
    head = tl.program_id(0)
    i = tl.arange(0, SLOTS)
    slot = tl.load(slots + i, mask=i < num_slots, other=-1)
    place = out + (i * tl.num_programs(0) + head)[:, None] * side.dim
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    if HALVES:
        even, odd = read_halves(side, block, offset, head, slot >= 0)
        n = 2 * tl.arange(0, side.width // 2)[None, :]
        tl.store(place + n, even, mask=(i < num_slots)[:, None] & (n < side.dim))
        tl.store(place + n + 1, odd, mask=(i < num_slots)[:, None] & (n < side.dim))
    else:
        tile = read_tile(side, block, offset, head, slot >= 0)
        n = tl.arange(0, side.width)[None, :]
        tl.store(place + n, tile, mask=(i < num_slots)[:, None] & (n < side.dim))


def read(cache: LayerCache, slots_L: Tensor, halves: bool = False) -> list[Tensor]:
    """K and V at the slots, [L, G, D]; zeros at -1."""
    found = []
    for side in sides.view_sides(cache):
        out_LGD = torch.full((len(slots_L), cache.spec.num_kv_heads, side.dim.value), torch.nan)
        size = cache.spec.block_size
        gather[(cache.spec.num_kv_heads,)](side, slots_L, out_LGD, len(slots_L), size, 64, halves and side.bits.value < 8)
        found.append(out_LGD)
    return found


def compare(spec: KVCacheSpec, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> None:
    """Written by the law and by the kernel: the same pages. Read by both: the same numbers."""
    (pages, cache), (law_pages, law_cache) = make_cache(spec), make_cache(spec)
    kv_write.write(k_TGD, v_TGD, cache, slots_T)
    law_cache.format.write(k_TGD, v_TGD, law_cache, slots_T)
    assert torch.equal(pages, law_pages)
    kept_L = torch.cat((torch.zeros(1, dtype=torch.int64), slots_T[slots_T >= 0]))[:60]
    want = [x_1LGD[0].float() for x_1LGD in cache.format.read(cache, kept_L[None])]
    asked_L = torch.cat((kept_L, torch.tensor([-1])))
    for found_LGD, want_LGD in zip(read(cache, asked_L), want, strict=True):
        assert torch.equal(found_LGD[:-1], want_LGD)
        assert not found_LGD[-1].any()


@every_format
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "G{}-D{}-Dv{}-S{}".format(*s))
def test_same_bytes_and_numbers_as_the_law(name: str, shape: tuple[int, int, int, int]) -> None:
    spec = spec_of(name, shape)
    num_tokens = 24
    k_TGD = make_vectors(num_tokens, spec.num_kv_heads, spec.head_dim, seed=3)
    v_TGD = make_vectors(num_tokens, spec.num_kv_heads, spec.head_dim_v, seed=4)
    compare(spec, k_TGD, v_TGD, make_slots(spec, num_tokens))


@pytest.mark.slow
@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", MORE_SHAPES, ids=lambda s: "G{}-D{}-Dv{}-S{}".format(*s))
def test_same_bytes_and_numbers_of_more_kinds(name: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    spec = spec_of(name, shape)
    for seed in range(2):
        k_TGD = make_vectors(70, spec.num_kv_heads, spec.head_dim, 2 * seed).to(dtype)
        v_TGD = make_vectors(70, spec.num_kv_heads, spec.head_dim_v, 2 * seed + 1).to(dtype)
        compare(spec, k_TGD, v_TGD, make_slots(spec, 70))


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_reads_its_input_where_it_lies(name: str, dtype: torch.dtype) -> None:
    """K and V as parts of one product's output, in the model's dtype."""
    spec = spec_of(name, (3, 64, 64, 16))
    qkv_TX = make_vectors(24, 1, 4 * 64 * 3, seed=5)[:, 0].clamp(-1e4, 1e4).to(dtype)
    _, _, k_TX, v_TX = qkv_TX.split(64 * 3, -1)
    compare(spec, k_TX.unflatten(1, (3, 64)), v_TX.unflatten(1, (3, 64)), make_slots(spec, 24))


@every_format
def test_halves_are_even_and_odd_numbers(name: str) -> None:
    spec = spec_of(name, (1, 80, 80, 16))
    _, cache = make_cache(spec)
    slots_T = make_slots(spec, 24)
    cache.format.write(make_vectors(24, 1, 80, 8), make_vectors(24, 1, 80, 9), cache, slots_T)
    for halves_TGD, whole_TGD in zip(read(cache, slots_T, halves=True), read(cache, slots_T), strict=True):
        assert torch.equal(halves_TGD, whole_TGD)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_quotients_that_are_ties(name: str) -> None:
    """Products with the inverse of a scale would round some of them to the other side."""
    spec = spec_of(name, (3, 64, 64, 16))
    dtype = torch.float8_e4m3fn if name == "fp8_e4m3" else torch.float8_e5m2
    every = torch.arange(64 * 2, dtype=torch.uint8).view(dtype).float().nan_to_num(posinf=0)
    ties_TD = ((every[1:] + every[:-1]) / 2)[:64].expand(24, 64) * torch.exp2(torch.arange(24) - 12.0)[:, None]
    scales = make_cache(spec)[1].scales
    k_TGD, v_TGD = (ties_TD[:, None] * scale_G[:, None] for scale_G in (scales.k_G, scales.v_G))
    compare(spec, k_TGD, v_TGD, make_slots(spec, 24))


@every_format
def test_not_a_number(name: str) -> None:
    """Formats of at most 8 bits store a zero; others keep it. A token that is skipped leaves no trace."""
    spec = spec_of(name, (2, 64, 64, 16))
    (pages, cache), (_, law_cache) = make_cache(spec), make_cache(spec)
    x_TGD = torch.randn(2, 2, 64)
    x_TGD[0, 0, :7], x_TGD[1] = torch.nan, torch.nan
    kv_write.write(x_TGD, x_TGD, cache, torch.tensor([-1, -1]))
    assert torch.equal(pages, make_cache(spec)[0])
    slots_T = torch.tensor([21, 70])
    kv_write.write(x_TGD, x_TGD, cache, slots_T)
    law_cache.format.write(x_TGD, x_TGD, law_cache, slots_T)
    for found_TGD, want_1TGD in zip(read(cache, slots_T), law_cache.format.read(law_cache, slots_T[None]), strict=True):
        torch.testing.assert_close(found_TGD, want_1TGD[0].float(), rtol=0, atol=0, equal_nan=True)


def test_more_rows_than_a_program_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("kv5", (3, 64, 64, 16))
    monkeypatch.setattr(kv_write, "NUMBERS_PER_PROGRAM", 16 * 64)
    k_TGD, v_TGD = make_vectors(23, 3, 64, 6), make_vectors(23, 3, 64, 7)
    compare(spec, k_TGD, v_TGD, make_slots(spec, 23))
    compare(spec, k_TGD[:0], v_TGD[:0], make_slots(spec, 0))


def test_every_codec_has_kernels_and_every_other_format_is_refused() -> None:
    for name in [*FORMATS, *ARRANGEMENTS, *PAIRS, "nvfp4@tiles"]:
        kv_format = get_format(name)
        spec = KVCacheSpec(2, 64, 64, 16, None, name)
        plain = isinstance(kv_format, CodedFormat | DenseFormat) and "@" not in name
        assert (limits.refuse(spec) is None) == plain
    odd = limits.refuse(KVCacheSpec(1, 16, 16, 1, None, "k:nvfp4,v:bfloat16"))
    assert odd is not None and odd.fix == "use --block-size 16"


def test_limits_know_the_codecs() -> None:
    """They are asked where triton cannot be imported."""
    from halfbyte.kernels.triton.codecs import CODECS

    assert CODECS.keys() == limits.CODEC_NAMES
