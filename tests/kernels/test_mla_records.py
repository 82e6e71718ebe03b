"""The records of multi-head latent attention against numpy ones, byte for byte; what else holds for every format is in
`test_formats.py`.

Shape letters: T tokens, R requests, L positions read, D head dim, C latent, P rotated numbers, N bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halfbyte.kvcache.formats import get_format
from halfbyte.kvcache.scales import LayerScales
from halfbyte.kvcache.spec import KVCacheSpec
from halfbyte.kvcache.tensors import LayerCache, view_layer
from halfbyte.platform import platform_named

BLOCK_SIZE, TOKENS, LATENT = 16, 12, 512
NUM_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}

every_record = pytest.mark.parametrize("name", NUM_BYTES)
every_dim = pytest.mark.parametrize("dim", [576, 512])


def _spec(name: str, dim: int = 576, heads: int = 1, dim_v: int = LATENT) -> KVCacheSpec:
    return KVCacheSpec(
        num_kv_heads=heads, head_dim=dim, head_dim_v=dim_v, block_size=BLOCK_SIZE, sliding_window=None, format=name
    )


def _vectors(dim: int) -> np.ndarray:
    """[T, D] float32: normal ones of all sizes, outliers, ties, zeros, a zero tile, denormals, a tile of ties."""
    x = np.random.default_rng(dim).standard_normal((TOKENS, dim)).astype(np.float32)
    x[1] *= 1e-3
    x[2] *= 1e3
    x[3, ::50] *= 100
    x[4] = np.rint(x[4] * 4) / 4
    x[5] = 0
    x[6, 128:256] = 0
    x[7] *= 1e-30
    x[8] = 1e-40
    x[9] *= 1e15
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    scale = np.float32(100) / np.float32(448)
    x[10, :126] = (numbers[1:] + numbers[:-1]) / 2 * scale  # where dividing is not multiplying by the inverse
    x[10, 126] = 100
    x[10, 127] = 0
    return x


def _written(name: str, x_TD: np.ndarray, scale: float = 1.0) -> tuple[Tensor, LayerCache, Tensor]:
    """Pages that hold these vectors, their cache, and the slots."""
    spec = _spec(name, x_TD.shape[1])
    pages = torch.zeros(3, sum(plane.bytes for plane in get_format(name).planes(spec)), dtype=torch.uint8)
    scales = LayerScales(torch.tensor([scale]), torch.ones(1), calibrated=True)
    cache = view_layer(pages, spec, scales)
    slots_T = torch.arange(BLOCK_SIZE + 3, BLOCK_SIZE + 3 + len(x_TD))
    k_TGD = torch.from_numpy(x_TD)[:, None]
    cache.format.write(k_TGD, torch.full((len(x_TD), 1, LATENT), torch.nan), cache, slots_T)  # V's values do not matter
    return pages, cache, slots_T


def _records(pages: Tensor, name: str, slots_T: Tensor) -> list[list[int]]:
    records: list[list[int]] = pages.view(-1, NUM_BYTES[name])[slots_T].tolist()
    return records


@every_dim
def test_fp8_records(dim: int, format_reference: Any) -> None:
    x_TD = _vectors(dim)
    pages, _, slots_T = _written("fp8_ds_mla", x_TD)
    assert _records(pages, "fp8_ds_mla", slots_T) == [format_reference.encode_fp8_mla(x_D) for x_D in x_TD]


@every_dim
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_nvfp4_records(dim: int, scale: float, format_reference: Any) -> None:
    x_TD = _vectors(dim)
    pages, _, slots_T = _written("nvfp4_ds_mla", x_TD, scale)
    expected = [format_reference.encode_nvfp4_mla(x_D, np.float32(scale)) for x_D in x_TD]
    assert _records(pages, "nvfp4_ds_mla", slots_T) == expected


def test_an_fp8_record_written_out() -> None:
    """Tile t is 2 ** t at its first number: codes of 448, scales of 2 ** t / 448; the rotated part is its own bits."""
    x_TD = np.zeros((1, 576), np.float32)
    x_TD[0, [0, 128, 256, 384]] = [1, 2, 4, 8]
    x_TD[0, 512:] = np.arange(64)
    pages, cache, slots_T = _written("fp8_ds_mla", x_TD)
    record_N = pages.view(-1, 656)[slots_T[0]]
    assert record_N[:512].nonzero().flatten().tolist() == [0, 128, 256, 384]
    assert record_N[[0, 128, 256, 384]].tolist() == [0x7E] * 4
    assert torch.equal(record_N[512:528].view(torch.float32), torch.tensor([1.0, 2, 4, 8]) / 448)
    assert torch.equal(record_N[528:].view(torch.bfloat16), torch.arange(64, dtype=torch.bfloat16))


def test_the_order_of_nvfp4_scales() -> None:
    """Block s begins with 6 times the E4M3 number whose byte is 48 + s, all else is zero."""
    scale_bytes = torch.arange(48, 48 + 32, dtype=torch.uint8)
    x_TD = np.zeros((1, 576), np.float32)
    x_TD[0, 0:512:16] = 6 * scale_bytes.view(torch.float8_e4m3fn).float().numpy()
    pages, _, slots_T = _written("nvfp4_ds_mla", x_TD)
    record_N = pages.view(-1, 352)[slots_T[0]]
    assert [record_N[320 + 8 * (s % 4) + s // 4].item() for s in range(32)] == scale_bytes.tolist()
    assert record_N[:256].tolist() == ([7] + [0] * 7) * 32, "the low nibble is the even number"
    assert not record_N[256:320].any()


@every_record
def test_bytes_per_token(name: str) -> None:
    for dim in (576, 512):
        (plane,) = get_format(name).planes(_spec(name, dim))
        assert plane.bytes == BLOCK_SIZE * NUM_BYTES[name]


@every_record
@every_dim
def test_what_is_read(name: str, dim: int) -> None:
    """K in its own head dim, V is its latent; gathered by slot."""
    x_TD = _vectors(dim)[:7]
    _, cache, slots_T = _written(name, x_TD)
    order_RL = torch.tensor([[3, 4, 0], [4, 6, 6]])
    k_RLGD, v_RLGD = cache.format.read(cache, slots_T[order_RL])
    assert k_RLGD.shape == (2, 3, 1, dim) and v_RLGD.shape == (2, 3, 1, LATENT)
    assert torch.equal(v_RLGD, k_RLGD[..., :LATENT])
    written_RLD = torch.from_numpy(x_TD)[order_RL]
    error = (k_RLGD[:, :, 0] - written_RLD).norm(dim=-1) / written_RLD.norm(dim=-1)
    # half a step of 3 (1) bits of mantissa is at most 1/16 (1/4) of a number, and the scale's own rounding adds a little
    assert (error < {"fp8_ds_mla": 1 / 16, "nvfp4_ds_mla": 1 / 4}[name]).all()
    if name == "fp8_ds_mla" and dim > LATENT:
        assert torch.equal(k_RLGD[:, :, 0, LATENT:], written_RLD[..., LATENT:].bfloat16().float()), "not quantised"


@every_record
@every_dim
def test_without_rotated_numbers_their_place_is_zero(name: str, dim: int) -> None:
    start, end = {"fp8_ds_mla": (528, 656), "nvfp4_ds_mla": (256, 320)}[name]
    pages, _, slots_T = _written(name, _vectors(dim)[:1])
    assert bool(pages.view(-1, NUM_BYTES[name])[slots_T, start:end].any()) == (dim > LATENT)


@every_record
def test_only_latents_are_taken(name: str) -> None:
    kv_format, platform = get_format(name), platform_named("cpu")
    assert kv_format.refuse(_spec(name), platform) is None
    assert kv_format.refuse(_spec(name, dim=512), platform) is None
    for wrong in (_spec(name, heads=2), _spec(name, dim=128, dim_v=128), _spec(name, dim_v=128), _spec(name, dim=640)):
        refusal = kv_format.refuse(wrong, platform)
        assert refusal is not None and name in refusal.reason and "latent attention" in refusal.reason
        assert f"got {wrong.num_kv_heads} of {wrong.head_dim} and {wrong.head_dim_v}" in refusal.reason
        assert refusal.fix == "use --kv-cache-dtype fp8"
    assert kv_format.rotations == ("none", "none") and kv_format.first_tokens == 0
