"""The bytes of every coded format equal those of an independent numpy encoder (`format_reference.py`), bit for bit.

Shape letters: T tokens, S block size, G kv heads, D head dim, K blocks of 16, N bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halfbyte.kvcache.formats import get_format
from halfbyte.kvcache.formats.blocks import IntCodec, Nvfp4Codec, swizzle_v_scales, unswizzle_v_scales
from halfbyte.kvcache.formats.numbers import fold_sum, from_e2m1, from_e4m3, from_e5m2, pack, to_e2m1, to_e4m3, to_e5m2, unpack
from halfbyte.kvcache.formats.turboquant import normal_levels
from halfbyte.kvcache.scales import LayerScales
from halfbyte.kvcache.spec import KVCacheSpec
from halfbyte.kvcache.tensors import LayerCache, view_layer

HEADS, SIZE, DIM = 3, 16, 64
K_SCALES, V_SCALES = [1.0, 0.37, 2.0**-7], [0.0123, 1.0, 5.5]
SMALL_FLOATS = {
    "e4m3": (to_e4m3, from_e4m3, 8),
    "e5m2": (to_e5m2, from_e5m2, 8),
    "e2m1": (to_e2m1, from_e2m1, 4),
}

every_small_float = pytest.mark.parametrize("kind", SMALL_FLOATS)


def _magnitudes(reference: Any, kind: str) -> list[float]:
    table: list[float] = getattr(reference, kind.upper())
    return table


@every_small_float
def test_every_code_means_what_its_bits_say(kind: str, format_reference: Any) -> None:
    _, decode, bits = SMALL_FLOATS[kind]
    magnitudes = _magnitudes(format_reference, kind)
    codes = torch.arange(1 << bits, dtype=torch.uint8)
    for code, value in zip(codes.tolist(), decode(codes).tolist(), strict=True):
        sign, magnitude = code >> (bits - 1), code & ((1 << (bits - 1)) - 1)
        if magnitude < len(magnitudes):
            assert value == (-1) ** sign * magnitudes[magnitude]
        else:
            assert not np.isfinite(value), "no code that is written"
    assert _magnitudes(format_reference, "e4m3")[-1] == 448 and _magnitudes(format_reference, "e5m2")[-1] == 57344
    assert _magnitudes(format_reference, "e2m1") == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@every_small_float
def test_codes_are_the_nearest_numbers(kind: str, format_reference: Any) -> None:
    """Of every finite bfloat16, of all ties and of the float32 numbers beside them."""
    encode, _, _ = SMALL_FLOATS[kind]
    magnitudes = np.array(_magnitudes(format_reference, kind), np.float32)
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    near = [np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, np.float32(1e9))]
    every_bfloat16 = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
    x = np.concatenate([magnitudes, *near, every_bfloat16])
    x = np.concatenate([x, -x])
    expected = [getattr(format_reference, f"to_{kind}")(number) for number in x]
    assert encode(torch.from_numpy(x)).tolist() == expected


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_infinities_saturate(kind: str, format_reference: Any) -> None:
    encode, _, _ = SMALL_FLOATS[kind]
    last = len(_magnitudes(format_reference, kind)) - 1
    assert encode(torch.tensor([torch.inf, -torch.inf])).tolist() == [last, last | 128]


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_packed_codes(bits: int, format_reference: Any) -> None:
    codes_TD = torch.randint(0, 1 << bits, (9, 80), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed_TN = pack(codes_TD, bits)
    if bits < 8:
        assert packed_TN.tolist() == [format_reference.pack(codes, bits) for codes in codes_TD.tolist()]
    assert packed_TN.shape[1] == 80 * bits // 8
    assert torch.equal(unpack(packed_TN, bits, 80), codes_TD)


@pytest.mark.parametrize("length", [1, 16, 128])
def test_the_order_of_sums(length: int, format_reference: Any) -> None:
    x_TD = torch.randn(50, length, generator=torch.Generator().manual_seed(0))
    assert fold_sum(x_TD).flatten().tolist() == [format_reference.halves_sum(x_D) for x_D in x_TD.numpy()]


def _hard_vectors(seed: int, dim: int = DIM) -> np.ndarray:
    """[S, G, D]: normal ones of all sizes, outliers, many ties, zeros, numbers that round to zero, constants, denormals."""
    x = np.random.default_rng(seed).standard_normal((SIZE, HEADS, dim)).astype(np.float32)
    x[1] *= 2.0**-12
    x[2] *= 300
    x[3] *= 1e-3
    x[4, :, ::7] *= 50
    x[5] = np.rint(x[5] * 4) / 4
    x[6] = np.rint(x[6] * 2) * 6
    x[7] = 0
    x[8, :, :16] = 0
    x[9, :, 16:48] = -0.0
    x[10] = 1e-40
    x[11] *= 1e-9
    x[12] = -np.abs(x[12])
    x[13] = 5
    x[14] *= 1e20
    return x


def _written(
    name: str, k_SGD: np.ndarray, v_SGD: np.ndarray, k_scales: list[float] = K_SCALES, v_scales: list[float] = V_SCALES
) -> tuple[Tensor, LayerCache]:
    """Two pages of which the second is full of these vectors, and the cache that they are."""
    size, heads, dim = k_SGD.shape
    spec = KVCacheSpec(
        num_kv_heads=heads, head_dim=dim, head_dim_v=v_SGD.shape[2], block_size=size, sliding_window=None, format=name
    )
    pages = torch.zeros(2, sum(plane.bytes for plane in get_format(name).planes(spec)), dtype=torch.uint8)
    cache = view_layer(pages, spec, LayerScales(torch.tensor(k_scales), torch.tensor(v_scales), calibrated=True))
    cache.format.write(torch.from_numpy(k_SGD), torch.from_numpy(v_SGD), cache, torch.arange(size, 2 * size))
    return pages, cache


@pytest.mark.parametrize(
    "name, kinds",
    [
        ("nvfp4", ("nvfp4", "nvfp4")),
        ("nvfp4_4over6", ("nvfp4_4over6", "nvfp4_4over6")),
        ("kv4", ("int4", "int4")),
        ("kv4_e2m1", ("nvfp4_4over6", "nvfp4_4over6")),
        ("kv5", ("int5", "int4")),
        ("kv6", ("int6", "int5")),
    ],
)
def test_pages_of_blocks(name: str, kinds: tuple[str, str], format_reference: Any) -> None:
    k_SGD, v_SGD = _hard_vectors(1), _hard_vectors(2)
    pages, _ = _written(name, k_SGD, v_SGD)
    expected = format_reference.block_page(kinds, k_SGD, v_SGD, np.array(K_SCALES, np.float32), np.array(V_SCALES, np.float32))
    assert np.array_equal(pages[1].numpy(), expected)
    assert not pages[0].any()


@pytest.mark.parametrize(
    "kind, divisors", [("nvfp4", [6]), ("nvfp4_4over6", [6, 4]), ("int4", [7, 8]), ("int5", [15, 16]), ("int6", [31, 32])]
)
def test_block_scales_at_their_ties(kind: str, divisors: list[int], format_reference: Any) -> None:
    """Greatest numbers that bring a block's scale between two E4M3 numbers, where the order of divisions shows."""
    scale = np.float32(0.37)
    magnitudes = np.array(format_reference.E4M3, np.float32)
    x_TD = np.zeros((len(magnitudes) - 1, 16 * len(divisors)), np.float32)
    for i, divisor in enumerate(divisors):
        x_TD[:, 16 * i] = (magnitudes[1:] + magnitudes[:-1]) / 2 * (np.float32(divisor) * scale)
        x_TD[:, 16 * i + 1] = x_TD[:, 16 * i] * np.float32(-0.4)
    codec = Nvfp4Codec(kind) if kind.startswith("nvfp4") else IntCodec(kind)
    codes_TD, scales_TK = codec.encode(torch.from_numpy(x_TD), torch.tensor([scale]))
    expected = [format_reference.encode_blocks(kind, x_D, scale) for x_D in x_TD]
    assert list(zip(codes_TD.tolist(), scales_TK.tolist(), strict=True)) == expected


@pytest.mark.parametrize("kind, length", [("int4", 8), ("int5", 16), ("int6", 32)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_longer_side_serves_either_sign(kind: str, length: int, sign: int) -> None:
    """A block whose extreme is exactly at the longer side, and all else whole, loses nothing; its scale has the sign."""
    x_D = torch.tensor([length, *range(-7, 8)], dtype=torch.float32) * sign
    codec, one = IntCodec(kind), torch.ones(1)
    codes_D, scales_K = codec.encode(x_D, one)
    assert torch.equal(codec.decode(codes_D, scales_K, one), x_D)
    assert (from_e4m3(scales_K).item(), codes_D[0].item()) == (-sign, 0)


def test_the_nvfp4_page_is_flashinfers() -> None:
    """K codes | K scales | V codes | V scales, sides halved at half the page, each side at eight ninths; heads before tokens."""
    k_SGD, v_SGD = _hard_vectors(1), _hard_vectors(2)
    pages, cache = _written("nvfp4", k_SGD, v_SGD)
    page_bytes = pages.shape[1]
    assert page_bytes == SIZE * HEADS * 9 * DIM // 8
    for prefix, start in (("k", 0), ("v", page_bytes // 2)):
        middle, end = start + page_bytes // 2 * 8 // 9, start + page_bytes // 2
        assert torch.equal(cache.planes[prefix][1], pages[1, start:middle].view(HEADS, SIZE, DIM // 2))
        assert torch.equal(cache.planes[f"{prefix}_extra"][1], pages[1, middle:end].view(HEADS, SIZE, DIM // 16))


@pytest.mark.parametrize("size, dim", [(16, 64), (32, 128), (4, 256), (64, 192)])
def test_swizzled_v_scales(size: int, dim: int) -> None:
    num_blocks = dim // 16
    scales_SK = torch.randint(0, 256, (2, 3, size, num_blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    swizzled_SK = swizzle_v_scales(scales_SK)
    flat = swizzled_SK.flatten(-2)
    for t in range(size):
        for s in range(num_blocks):
            wanted = scales_SK[..., t, s]
            assert torch.equal(flat[..., t // 4 * 4 * num_blocks + s * 4 + t % 4], wanted)
            row, column = t // 4 * 4 + s // (num_blocks // 4), s % (num_blocks // 4) * 4 + t % 4
            assert torch.equal(swizzled_SK[..., row, column], wanted)
    assert torch.equal(unswizzle_v_scales(swizzled_SK), scales_SK)


@pytest.mark.parametrize("name, kind", [("fp8_e4m3", "e4m3"), ("fp8_e5m2", "e5m2")])
def test_pages_of_fp8(name: str, kind: str, format_reference: Any) -> None:
    k_SGD, v_SGD = _hard_vectors(1), _hard_vectors(2)
    magnitudes = np.array(_magnitudes(format_reference, kind), np.float32)
    ties = ((magnitudes[1:] + magnitudes[:-1]) / 2)[8 : 8 + DIM]
    k_SGD[15] = np.array(K_SCALES, np.float32)[:, None] * ties  # where dividing is not multiplying by the inverse
    pages, _ = _written(name, k_SGD, v_SGD)
    encode = getattr(format_reference, f"to_{kind}")
    expected = [
        encode(number / np.float32(scales[g]))
        for x_SGD, scales in ((k_SGD, K_SCALES), (v_SGD, V_SCALES))
        for g in range(HEADS)
        for t in range(SIZE)
        for number in x_SGD[t, g]
    ]
    assert pages[1].tolist() == expected


def _records(name: str, k_SGD: np.ndarray, v_SGD: np.ndarray, **scales: list[float]) -> list[list[list[int]]]:
    """The bytes of each token and head."""
    size, heads, _ = k_SGD.shape
    pages, _ = _written(name, k_SGD, v_SGD, **scales)
    records: list[list[list[int]]] = pages[1].view(size, heads, -1).tolist()
    return records


@pytest.mark.parametrize("name", ["fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"])
def test_per_token_head_records(name: str, format_reference: Any) -> None:
    k_SGD, v_SGD = _hard_vectors(1), _hard_vectors(2)
    encode = format_reference.encode_per_token_head
    expected = [[encode(name, k_SGD[t, g]) + encode(name, v_SGD[t, g]) for g in range(HEADS)] for t in range(SIZE)]
    assert _records(name, k_SGD, v_SGD) == expected


def test_int8_rounds_halves_away_from_zero() -> None:
    x_D = torch.tensor([127.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 126.5])
    pages, _ = _written("int8_per_token_head", *[x_D.repeat(1, 1, 8).numpy()] * 2, [1.0], [1.0])
    assert pages[1].view(torch.int8)[:8].tolist() == [127, 1, -1, 2, -2, 3, -3, 127]


def test_the_zero_point_lies_in_the_scale() -> None:
    """Numbers from -1 to 2: the scale is 0.2 but for its lowest 4 bits, which hold 5."""
    x_SGD = np.linspace(-1, 2, 64, dtype=np.float32).reshape(1, 1, 64)
    (((*_, low, _, _, _),),) = _records("int4_per_token_head", x_SGD, x_SGD, k_scales=[1.0], v_scales=[1.0])
    assert low & 15 == 5
    _, cache = _written("int4_per_token_head", x_SGD, x_SGD, [1.0], [1.0])
    k_RLGD, _ = cache.format.read(cache, torch.tensor([[1]]))
    assert (k_RLGD - torch.from_numpy(x_SGD)).abs().max() <= 0.1 + 1e-5  # half a step


def test_ultraquant_records(format_reference: Any) -> None:
    k_SGD, v_SGD = _hard_vectors(1), _hard_vectors(2)
    encode = format_reference.encode_ultraquant
    expected = [[encode(k_SGD[t, g]) + encode(v_SGD[t, g]) for g in range(HEADS)] for t in range(SIZE)]
    assert _records("ultraquant_4bit", k_SGD, v_SGD) == expected
    assert len(expected[0][0]) == DIM + DIM // 16


def test_ultraquant_exponents_at_their_borders(format_reference: Any) -> None:
    """Blocks whose greatest number brings 0.156 times itself to sqrt(1/2) * 2 ** e, and the float32 numbers around that."""
    borders = np.float32(0.5**0.5) / np.float32(0.156) * np.float32(2.0) ** np.arange(-40, 40, 8, dtype=np.float32)
    steps = np.arange(-4, 5, dtype=np.int32)
    greatest = (borders.view(np.int32)[:, None] + steps).view(np.float32)  # [10, 9]
    x_SGD = np.zeros((10, 9, 32), np.float32)
    x_SGD[..., 3] = greatest
    ones = [1.0] * 9
    found = _records("ultraquant_4bit", x_SGD, x_SGD, k_scales=ones, v_scales=ones)
    assert found == [[format_reference.encode_ultraquant(x) * 2 for x in row] for row in x_SGD]
    exponents = {record[16] - record_before[16] for row in found for record_before, record in zip(row, row[1:], strict=False)}
    assert exponents == {0, 1}, "the borders are inside of what was tried"


def test_lloyd_and_maxs_levels(format_reference: Any) -> None:
    levels = normal_levels()
    assert np.allclose(levels, format_reference.normal_levels(), rtol=0, atol=1e-12)
    published = [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]  # J. Max, 1960, table I
    assert np.allclose(levels[8:], published, rtol=0, atol=1.5e-3)
    assert np.array_equal(levels, -levels[::-1])


def test_turboquant_records(format_reference: Any) -> None:
    k_SGD, v_SGD = _hard_vectors(1), _hard_vectors(2)
    k_SGD[14:], v_SGD[14:] = k_SGD[14:].clip(-60000, 60000), v_SGD[14:].clip(-60000, 60000)
    levels = format_reference.normal_levels()
    for dim in (64, 32):
        key, value = format_reference.encode_turbo_key, format_reference.encode_turbo_value
        expected = [[key(k_SGD[t, g, :dim], levels) + value(v_SGD[t, g, :dim]) for g in range(HEADS)] for t in range(SIZE)]
        assert _records("turboquant_4bit_nc", k_SGD[..., :dim], v_SGD[..., :dim]) == expected


def test_turboquant_k8v4_records(format_reference: Any) -> None:
    k_SGD, v_SGD = _hard_vectors(1), _hard_vectors(2).clip(-60000, 60000)
    expected = [
        [
            [format_reference.to_e4m3(number / np.float32(K_SCALES[g])) for number in k_SGD[t, g]]
            + format_reference.encode_turbo_value(v_SGD[t, g])
            for g in range(HEADS)
        ]
        for t in range(SIZE)
    ]
    assert _records("turboquant_k8v4", k_SGD, v_SGD) == expected


def test_turboquant_keys_keep_their_length() -> None:
    """Norm correction: what is read is as long as what was written, up to float16's rounding of the length."""
    k_SGD = np.random.default_rng(0).standard_normal((SIZE, HEADS, 128)).astype(np.float32)
    _, cache = _written("turboquant_4bit_nc", k_SGD, k_SGD)
    k_RLGD, _ = cache.format.read(cache, torch.arange(SIZE, 2 * SIZE)[None])
    torch.testing.assert_close(k_RLGD[0].norm(dim=-1), torch.from_numpy(k_SGD).norm(dim=-1), rtol=2.0**-11 + 1e-6, atol=0)
