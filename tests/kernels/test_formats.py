"""The conformance suite that every KV format passes: what is written is read back, and nothing else is touched.

It takes every name of `FORMATS`, some pairs, and every arrangement, in shapes that the format does not refuse. What the bytes
are is another matter: `test_format_encodings.py` and `test_mla_records.py` compare them with independent encoders.

Shape letters: T tokens, R requests, L positions read, G kv heads, D head dim, S block size.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from halfbyte.kvcache.formats import ARRANGEMENTS, FORMATS, get_format
from halfbyte.kvcache.formats.base import Codec
from halfbyte.kvcache.formats.coded import CodedFormat
from halfbyte.kvcache.formats.dense import DenseFormat
from halfbyte.kvcache.formats.mla import MlaFormat
from halfbyte.kvcache.formats.numbers import GREATEST
from halfbyte.kvcache.scales import LayerScales
from halfbyte.kvcache.spec import KVCacheSpec, make_layout
from halfbyte.kvcache.tensors import KVTensors, LayerCache, view_layer
from halfbyte.platform import platform_named

# kv heads, head dim of K and of V, block size
Shape = tuple[int, int, int, int]
SHAPES: list[Shape] = [
    (1, 64, 64, 16),
    (3, 64, 64, 16),
    (2, 80, 80, 16),
    (5, 96, 96, 16),
    (1, 256, 256, 32),
    (8, 128, 128, 1),
    (2, 192, 128, 16),
    (3, 24, 16, 5),
    (1, 576, 512, 16),
    (1, 512, 512, 64),
]
NUM_BLOCKS = 7

PAIRS = ("k:fp8,v:nvfp4", "k:kv5,v:bfloat16", "v:ultraquant_4bit,k:turboquant_4bit_nc")
SIDED = tuple(name for name in (*FORMATS, *PAIRS) if isinstance(get_format(name), CodedFormat | DenseFormat))
BASE_OF = {"bfloat16_pairs": "bfloat16", **{f"{name}@tiles": name for name in SIDED}}
BASE_OF |= {f"{name}_swizzled": name for name in ("nvfp4", "nvfp4_4over6")}
NAMES = (*FORMATS, *PAIRS, *BASE_OF)


def _spec(name: str, shape: Shape) -> KVCacheSpec:
    heads, dim, dim_v, block_size = shape
    return KVCacheSpec(
        num_kv_heads=heads, head_dim=dim, head_dim_v=dim_v, block_size=block_size, sliding_window=None, format=name
    )


def _is_refused(name: str, shape: Shape) -> bool:
    return get_format(name).refuse(_spec(name, shape), platform_named("cpu")) is not None


def _label(value: object) -> str:
    return "G{}-D{}-Dv{}-S{}".format(*value) if isinstance(value, tuple) else str(value)


def _codecs() -> dict[str, Codec]:
    sides = [side for f in map(get_format, SIDED) if isinstance(f, CodedFormat | DenseFormat) for side in f.sides]
    return {side.codec.name: side.codec for side in sides}


CODECS = _codecs()
every_case = pytest.mark.parametrize(
    "name, shape", [(name, shape) for name in NAMES for shape in SHAPES if not _is_refused(name, shape)], ids=_label
)
every_sided_format = pytest.mark.parametrize("name", (*SIDED, *BASE_OF))
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def _page_bytes(spec: KVCacheSpec) -> int:
    return sum(plane.bytes for plane in get_format(spec.format).planes(spec))


def _pages(name: str, shape: Shape) -> tuple[Tensor, LayerCache]:
    """Zeroed pages and the cache that they are, with scales that differ from head to head and from K to V."""
    spec = _spec(name, shape)
    pages = torch.zeros(NUM_BLOCKS, _page_bytes(spec), dtype=torch.uint8)
    k_G, v_G = torch.linspace(0.3, 1.7, spec.num_kv_heads), torch.linspace(2.1, 0.6, spec.num_kv_heads)
    return pages, view_layer(pages, spec, LayerScales(k_G, v_G, calibrated=True))


def _random_kv(spec: KVCacheSpec, num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k_TGD = torch.randn(num_tokens, spec.num_kv_heads, spec.head_dim, generator=generator)
    return k_TGD, torch.randn(num_tokens, spec.num_kv_heads, spec.head_dim_v, generator=generator)


def _random_slots(spec: KVCacheSpec, num_tokens: int) -> Tensor:
    """Distinct slots outside the null block."""
    usable = (NUM_BLOCKS - 1) * spec.block_size
    order = torch.randperm(usable, generator=torch.Generator().manual_seed(1))
    return order[:num_tokens] + spec.block_size


def _expected(cache: LayerCache, k_TGD: Tensor, v_TGD: Tensor) -> tuple[Tensor, Tensor]:
    """What a vector is after the codec of its side took it in and out, without a cache; float32."""
    kv_format = get_format(BASE_OF.get(cache.format.name, cache.format.name))
    scales = cache.scales
    if isinstance(kv_format, MlaFormat):
        latent_TGD, rotated_TGD = k_TGD.split((512, k_TGD.shape[-1] - 512), -1)
        nothing_TGD = k_TGD.new_zeros(*k_TGD.shape[:2], 64 - rotated_TGD.shape[-1])
        record = kv_format.record.encode(latent_TGD, torch.cat((rotated_TGD, nothing_TGD), -1), scales.k_G)
        latent_TGD, rotated_TGD = kv_format.record.decode(record, scales.k_G)
        return torch.cat((latent_TGD, rotated_TGD), -1)[..., : k_TGD.shape[-1]], latent_TGD
    assert isinstance(kv_format, CodedFormat | DenseFormat)
    k, v = kv_format.sides
    return _coded(k.codec, k_TGD, scales.k_G[:, None]), _coded(v.codec, v_TGD, scales.v_G[:, None])


def _coded(codec: Codec, x: Tensor, scale: Tensor) -> Tensor:
    return codec.decode(*codec.encode(x, scale), scale)


def _write(cache: LayerCache, slots_T: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random K and V at these slots; what should be read there."""
    k_TGD, v_TGD = _random_kv(cache.spec, len(slots_T), seed)
    cache.format.write(k_TGD, v_TGD, cache, slots_T)
    return _expected(cache, k_TGD, v_TGD)


def _read(cache: LayerCache, slots_T: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [T, G, D]."""
    k_RLGD, v_RLGD = cache.format.read(cache, slots_T[:, None])
    return k_RLGD[:, 0].float(), v_RLGD[:, 0].float()


@every_case
def test_what_is_written_is_read(name: str, shape: Shape) -> None:
    _, cache = _pages(name, shape)
    slots_T = _random_slots(cache.spec, 5)
    expected_k, expected_v = _write(cache, slots_T)
    order_RL = torch.tensor([[3, 1, 0], [4, 2, 2]])
    k_RLGD, v_RLGD = cache.format.read(cache, slots_T[order_RL])
    assert torch.equal(k_RLGD.float(), expected_k[order_RL])
    assert torch.equal(v_RLGD.float(), expected_v[order_RL])


@every_case
def test_skipped_tokens_touch_nothing_even_when_not_finite(name: str, shape: Shape) -> None:
    pages, cache = _pages(name, shape)
    before = pages.clone()
    k_TGD, v_TGD = _random_kv(cache.spec, 3)
    k_TGD[0], v_TGD[1] = torch.nan, torch.inf
    cache.format.write(k_TGD, v_TGD, cache, torch.full((3,), -1))
    assert torch.equal(pages, before)
    # Beside tokens that are not skipped, too: those are written as if alone.
    slots_T = torch.tensor([-1, -1, cache.spec.block_size])
    cache.format.write(k_TGD, v_TGD, cache, slots_T)
    assert torch.equal(_read(cache, slots_T[2:])[0], _expected(cache, k_TGD, v_TGD)[0][2:])
    assert pages[1].any() and not pages[0].any()
    assert not any(x.any() for x in _read(cache, torch.tensor([0])))


@every_case
def test_a_block_owns_exactly_its_bytes(name: str, shape: Shape) -> None:
    pages, cache = _pages(name, shape)
    block, size = 3, cache.spec.block_size
    _write(cache, block * size + torch.arange(size))
    assert pages[block].any()
    pages[block] = 0
    assert not pages.any()


@every_case
def test_slots_do_not_overlap(name: str, shape: Shape) -> None:
    """All slots are written, then every third one anew: the others keep what they had."""
    _, cache = _pages(name, shape)
    slots_T = torch.arange(cache.spec.block_size, NUM_BLOCKS * cache.spec.block_size)
    expected_k, expected_v = (x.clone() for x in _write(cache, slots_T))
    expected_k[::3], expected_v[::3] = _write(cache, slots_T[::3], seed=1)
    k_TGD, v_TGD = _read(cache, slots_T)
    assert torch.equal(k_TGD, expected_k) and torch.equal(v_TGD, expected_v)


@every_case
def test_a_block_fills_token_by_token(name: str, shape: Shape) -> None:
    """As in decoding: what is not yet written reads as zero, and the last token makes the block that one write makes."""
    pages, cache = _pages(name, shape)
    size = cache.spec.block_size
    slots_T = 2 * size + torch.arange(size)
    k_TGD, v_TGD = _random_kv(cache.spec, size)
    expected_k, expected_v = _expected(cache, k_TGD, v_TGD)
    for i in range(size):
        cache.format.write(k_TGD[i : i + 1], v_TGD[i : i + 1], cache, slots_T[i : i + 1])
        if i in (0, size // 2):
            found_k, found_v = _read(cache, slots_T)
            assert torch.equal(found_k[: i + 1], expected_k[: i + 1]) and not found_k[i + 1 :].any()
            assert torch.equal(found_v[: i + 1], expected_v[: i + 1]) and not found_v[i + 1 :].any()
    at_once, fresh = _pages(name, shape)
    fresh.format.write(k_TGD, v_TGD, fresh, slots_T)
    assert torch.equal(pages, at_once)


@every_case
def test_a_copied_block_reads_the_same(name: str, shape: Shape) -> None:
    pages, cache = _pages(name, shape)
    size = cache.spec.block_size
    expected_k, expected_v = _write(cache, 2 * size + torch.arange(size))
    pages[5] = pages[2]
    k_TGD, v_TGD = _read(cache, 5 * size + torch.arange(size))
    assert torch.equal(k_TGD, expected_k) and torch.equal(v_TGD, expected_v)


@pytest.mark.parametrize("name", BASE_OF)
@pytest.mark.parametrize("shape", SHAPES, ids=_label)
def test_an_arrangement_reads_as_its_format(name: str, shape: Shape) -> None:
    """Bit for bit, from as many bytes; and it is there wherever the format is, in whole tiles."""
    if _is_refused(BASE_OF[name], shape):
        assert _is_refused(name, shape)
        return
    if name.endswith("@tiles"):
        assert _is_refused(name, shape) == bool(shape[3] % 16), "tiles are of 16 tokens"
    if _is_refused(name, shape):
        return
    sizes, bits = [], []
    for each in (name, BASE_OF[name]):
        pages, cache = _pages(each, shape)
        slots_T = _random_slots(cache.spec, 10)
        k_TGD, v_TGD = _random_kv(cache.spec, len(slots_T))
        k_TGD[0], v_TGD[1], k_TGD[2] = 0.0, -0.0, 1e5
        cache.format.write(k_TGD, v_TGD, cache, slots_T)
        sizes.append(pages.numel())
        bits += [x.view(torch.int32) for x in _read(cache, slots_T)]
    assert sizes[0] == sizes[1]
    k, v, base_k, base_v = bits
    assert torch.equal(k, base_k) and torch.equal(v, base_v)


def test_the_suite_knows_every_arrangement() -> None:
    assert set(ARRANGEMENTS) <= set(BASE_OF)
    for name, base in BASE_OF.items():
        arranged, kv_format = get_format(name), get_format(base)
        assert arranged.name == name
        assert (arranged.rotations, arranged.first_tokens) == (kv_format.rotations, kv_format.first_tokens)


def _rows(dim: int) -> dict[str, Tensor]:
    """Vectors that no model should make, and some that it may."""
    normal_D = torch.randn(dim, generator=torch.Generator().manual_seed(3))
    first_D = torch.arange(dim) == 0
    greatest = torch.finfo(torch.float32).max
    return {
        "zero": torch.zeros(dim),
        "nan": torch.full((dim,), torch.nan),
        "infinite": torch.full((dim,), torch.inf),
        "negative": torch.full((dim,), -torch.inf),
        "huge": torch.full((dim,), greatest),
        "opposite": torch.where(torch.arange(dim) % 2 == 0, greatest, -greatest),
        "one-nan": normal_D.masked_fill(first_D, torch.nan),
        "one-zero": normal_D.masked_fill(first_D, 0),
        "one-infinite": normal_D.masked_fill(first_D, torch.inf),
        "one-greatest": normal_D.masked_fill(first_D, GREATEST),
        "denormal": torch.full((dim,), 1e-40),
        "tiny": normal_D * 1e-30,
        "equal": torch.full((dim,), 5.0),
    }


@every_case
def test_extreme_vectors_stay_finite(name: str, shape: Shape) -> None:
    """In all codes of at most 8 bits a NaN is a zero and an infinity the greatest number; wider ones keep them."""
    pages, cache = _pages(name, shape)
    spec = cache.spec
    k_rows, v_rows = _rows(spec.head_dim), _rows(spec.head_dim_v)
    slots = {row: spec.block_size + i for i, row in enumerate(k_rows) if spec.block_size + i < NUM_BLOCKS * spec.block_size}
    k_TGD = torch.stack([k_rows[row] for row in slots])[:, None].expand(-1, spec.num_kv_heads, -1)
    v_TGD = torch.stack([v_rows[row] for row in slots])[:, None].expand(-1, spec.num_kv_heads, -1)
    cache.format.write(k_TGD, v_TGD, cache, torch.tensor(list(slots.values())))
    for read_TGD in _narrow_parts(cache, *_read(cache, torch.tensor(list(slots.values())))):
        found = dict(zip(slots, read_TGD, strict=True))
        assert all(row_GD.isfinite().all() for row_GD in found.values())
        assert not found["zero"].any() and not found["nan"].any()
        for special, plain in (("one-nan", "one-zero"), ("one-infinite", "one-greatest")):
            assert special not in found or plain not in found or torch.equal(found[special], found[plain])
    assert not pages[0].any()


def _narrow_parts(cache: LayerCache, k_TGD: Tensor, v_TGD: Tensor) -> list[Tensor]:
    """What codes of at most 8 bits hold of these."""
    kv_format = get_format(BASE_OF.get(cache.format.name, cache.format.name))
    if isinstance(kv_format, MlaFormat):
        return [k_TGD[..., :512], v_TGD]
    assert isinstance(kv_format, CodedFormat | DenseFormat)
    return [x for side, x in zip(kv_format.sides, (k_TGD, v_TGD), strict=True) if side.codec.bits <= 8]


# Bytes per token of H kv heads of D, and for 8 heads of 128.
BYTES_PER_TOKEN: dict[str, tuple[Callable[[int, int], int], int]] = {
    "bfloat16": (lambda h, d: 4 * h * d, 4096),
    "float16": (lambda h, d: 4 * h * d, 4096),
    "float32": (lambda h, d: 8 * h * d, 8192),
    "fp8_e4m3": (lambda h, d: 2 * h * d, 2048),
    "fp8_e5m2": (lambda h, d: 2 * h * d, 2048),
    "fp8_per_token_head": (lambda h, d: h * (2 * d + 8), 2112),
    "int8_per_token_head": (lambda h, d: h * (2 * d + 8), 2112),
    "int4_per_token_head": (lambda h, d: h * (d + 8), 1088),
    "nvfp4": (lambda h, d: 9 * h * d // 8, 1152),
    "nvfp4_4over6": (lambda h, d: 9 * h * d // 8, 1152),
    "ultraquant_4bit": (lambda h, d: h * (d + d // 16), 1088),
    "turboquant_k8v4": (lambda h, d: h * (d + d // 2 + 4), 1568),
    "turboquant_4bit_nc": (lambda h, d: h * (d // 2 + 2 + d // 2 + 4), 1072),
    "kv4": (lambda h, d: 9 * h * d // 8, 1152),  # 4 + 4 bits, and one for two scales per 16
    "kv4_e2m1": (lambda h, d: 9 * h * d // 8, 1152),
    "kv5": (lambda h, d: 10 * h * d // 8, 1280),  # 5 + 4 + 1
    "kv6": (lambda h, d: 12 * h * d // 8, 1536),  # 6 + 5 + 1
    "k:fp8,v:nvfp4": (lambda h, d: h * d + 9 * h * d // 16, 1600),
}


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_bytes_per_token(name: str) -> None:
    formula, known = BYTES_PER_TOKEN[name]
    assert _page_bytes(_spec(name, (8, 128, 128, 16))) == 16 * known
    for heads, dim, size in ((1, 64, 16), (3, 64, 5), (5, 256, 32)):
        assert _page_bytes(_spec(name, (heads, dim, dim, size))) == size * formula(heads, dim)


def test_every_format_has_its_bytes_written_down() -> None:
    assert set(FORMATS) - set(BYTES_PER_TOKEN) == {"fp8_ds_mla", "nvfp4_ds_mla"}, "those are in test_mla_records.py"


@pytest.mark.parametrize(
    "dim, refused",
    [
        (64, set()),
        (128, set()),
        (256, set()),
        (80, {"ultraquant_4bit", "turboquant_4bit_nc"}),
        (96, {"ultraquant_4bit", "turboquant_4bit_nc"}),
        (72, {"ultraquant_4bit", "turboquant_4bit_nc", "nvfp4", "nvfp4_4over6", "kv4", "kv4_e2m1", "kv5", "kv6"}),
    ],
)
def test_head_dims_that_do_not_fit_are_refused(dim: int, refused: set[str]) -> None:
    for name in FORMATS:
        refusal = get_format(name).refuse(_spec(name, (2, dim, dim, 16)), platform_named("cpu"))
        assert (refusal is not None) == (name in refused or name.endswith("_ds_mla")), name
        if refusal is not None:
            assert str(dim) in refusal.reason and refusal.fix.startswith("use --kv-cache-dtype")


# Mean squared error over mean square, of vectors of 128 normal numbers. Codes with m bits of mantissa err by up to
# 2 ** -(m + 1) of a number, evenly: a third of the square is an upper bound of the mean. Steps of s err by s ** 2 / 12.
ERROR_BOUNDS = {
    "bfloat16": 2.0**-16 / 3,
    "float16": 2.0**-22 / 3,
    "float32": 0.0,
    "fp8_e4m3": 2.0**-8 / 3,
    "fp8_e5m2": 2.0**-6 / 3,
    "fp8_per_token_head": 2.0**-8 / 3,
    "int8_per_token_head": (2.9 / 127) ** 2 / 12,  # the greatest of 128 magnitudes is about 2.8
    "int4_per_token_head": (5.4 / 15) ** 2 / 12,  # from least to most it is about 5.2
    "turboquant_4bit_value": (5.4 / 15) ** 2 / 12,
    "turboquant_4bit_key": 0.0095,  # J. Max, 1960: the least that 16 levels allow is 0.009497
    "ultraquant_4bit": 0.019,  # powers of two waste up to a factor of two of a range
    "nvfp4": 0.0095,  # this and what follows: what was measured, and a twentieth more
    "nvfp4_4over6": 0.0080,
    "int4": 0.0060,
    "int5": 0.00155,
    "int6": 0.00042,
}


def _relative_error(codec: Codec) -> float:
    x_TD = torch.randn(4000, 128, generator=torch.Generator().manual_seed(7))
    return float(((_coded(codec, x_TD, torch.ones(1)) - x_TD) ** 2).sum() / (x_TD**2).sum())


@every_codec
def test_errors_of_normal_numbers(codec: Codec) -> None:
    """A lost bit would make it four times as large."""
    assert _relative_error(codec) <= ERROR_BOUNDS[codec.name]


def test_more_search_errs_less() -> None:
    """4over6 chooses among two scales, whole numbers have even steps and use the longer side."""
    nvfp4, four_over_six, int4 = (_relative_error(CODECS[name]) for name in ("nvfp4", "nvfp4_4over6", "int4"))
    assert four_over_six < 0.9 * nvfp4
    assert int4 < 0.9 * four_over_six


@every_codec
def test_static_scales(codec: Codec) -> None:
    """Numbers and scale times a power of two are the same bytes, read times that power. Others take no notice of a scale."""
    x_TGD = torch.randn(20, 3, 64, generator=torch.Generator().manual_seed(5))
    one_G1, powers_G1 = torch.ones(3, 1), torch.tensor([[0.125], [1.0], [32.0]])
    expected = codec.encode(x_TGD, one_G1)
    given = x_TGD * powers_G1 if codec.uses_scale else x_TGD
    found = codec.encode(given, powers_G1)
    assert all(torch.equal(new, old) for new, old in zip(found, expected, strict=True))
    factor = powers_G1 if codec.uses_scale else 1
    assert torch.equal(codec.decode(*found, powers_G1), codec.decode(*expected, one_G1) * factor)
    assert not codec.uses_scale or not torch.equal(codec.encode(x_TGD, powers_G1)[0], expected[0])


# Those whose codes on a second writing are the first ones'. Others make a scale from the greatest number that they are given,
# and what they give back may have another: their second writing may round again.
LOSES_ONCE = ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "nvfp4", "nvfp4_4over6")


@pytest.mark.parametrize("name", LOSES_ONCE)
def test_what_is_lost_is_lost_once(name: str) -> None:
    x_TGD = torch.randn(300, 3, 128, generator=torch.Generator().manual_seed(9))
    scale_G1 = torch.tensor([[0.7], [1.0], [2.3]])
    once_TGD = _coded(CODECS[name], x_TGD, scale_G1)
    assert torch.equal(_coded(CODECS[name], once_TGD, scale_G1), once_TGD)


@every_sided_format
def test_the_cache_allocates_what_the_planes_say(name: str) -> None:
    windows = [None, 32, 32, None, 32]
    specs = [
        KVCacheSpec(num_kv_heads=2, head_dim=64, head_dim_v=64, block_size=16, sliding_window=w, format=name) for w in windows
    ]
    layout = make_layout(specs, _page_bytes)
    tensors = KVTensors(layout, NUM_BLOCKS, "cpu")
    assert tensors.num_bytes == NUM_BLOCKS * layout.block_bytes
    assert tensors.num_layers == len(specs)
    assert all(tensors.layer(i).spec == spec for i, spec in enumerate(specs))


@every_sided_format
def test_layers_of_one_position_share_memory_and_positions_do_not(name: str) -> None:
    windows = [None, 32]
    specs = [
        KVCacheSpec(num_kv_heads=1, head_dim=64, head_dim_v=64, block_size=16, sliding_window=w, format=name) for w in windows
    ]
    layout = make_layout([*specs, *specs], _page_bytes)
    tensors = KVTensors(layout, NUM_BLOCKS, "cpu")
    k_TGD, v_TGD = _random_kv(specs[0], 1)
    slot_T = torch.tensor([40])
    written = tensors.layer(layout.groups[0].layers[0])
    written.format.write(k_TGD, v_TGD, written, slot_T)
    for group in layout.groups:
        for position, index in enumerate(group.layers):
            cache = tensors.layer(index)
            found = cache.format.read(cache, slot_T[:, None])[0].any()
            assert bool(found) == (position == 0)


@pytest.mark.skipif(tuple(map(int, platform.release().split(".")[:2])) < (5, 14), reason="needs MADV_POPULATE_WRITE")
def test_populating_changes_no_content() -> None:
    spec = KVCacheSpec(num_kv_heads=2, head_dim=64, head_dim_v=64, block_size=16, sliding_window=None, format="bfloat16")
    tensors = KVTensors(make_layout([spec, spec], _page_bytes), 2000, "cpu")
    cache = tensors.layer(1)
    k_TGD, v_TGD = _random_kv(spec, 40)
    slots_T = torch.arange(16, 56)
    cache.format.write(k_TGD, v_TGD, cache, slots_T)
    before = [torch.clone(x) for x in cache.format.read(cache, slots_T[None])]
    tensors.populate(num_bytes=8 << 20)
    for thread in threading.enumerate():
        if thread.name == "populate":
            thread.join()
    assert all(torch.equal(x, y) for x, y in zip(cache.format.read(cache, slots_T[None]), before, strict=True))
    assert _resident_bytes(tensors) >= 7 << 20


def _resident_bytes(tensors: KVTensors) -> int:
    """Of the mappings that hold the cache, as the system counts them."""
    starts = {f"{cache.planes['k'].data_ptr():x}" for cache in map(tensors.layer, range(tensors.num_layers))}
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            first, _, end = line.split()[0].partition("-")
            is_ours = any(int(first, 16) <= int(start, 16) < int(end, 16) for start in starts)
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
