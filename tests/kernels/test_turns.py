"""Attention over turned queries, keys and values is attention: exactly where numbers allow it, else within float32's rounding.

Shape letters: T tokens, H heads, G kv heads, D head dim.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfbyte.kvcache.formats import FORMATS, get_format
from halfbyte.kvcache.formats.base import Rotation
from halfbyte.kvcache.spec import KVCacheSpec
from halfbyte.kvcache.tensors import view_layer
from halfbyte.kvcache.turns import LayerTurns, all_turns, hadamard, random_hadamard
from halfbyte.platform import platform_named

TOKENS, KV_HEADS = 33, 3
# What float32 turns may change in attention that is otherwise done in float64: products of up to 128 terms.
TOLERANCE = 2e-5


def _spec(dim: int, dim_v: int | None = None, format: str = "bfloat16") -> KVCacheSpec:
    return KVCacheSpec(
        num_kv_heads=KV_HEADS, head_dim=dim, head_dim_v=dim_v or dim, block_size=16, sliding_window=None, format=format
    )


def _qkv(dim: int, dim_v: int, group: int, whole: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Normal numbers, or small whole ones."""
    generator = torch.Generator().manual_seed(dim + group)
    shapes = ((TOKENS, KV_HEADS * group, dim), (TOKENS, KV_HEADS, dim), (TOKENS, KV_HEADS, dim_v))
    numbers = [torch.randn(shape, generator=generator) for shape in shapes]
    q_THD, k_TGD, v_TGD = [(x * 3).round() for x in numbers] if whole else numbers
    return q_THD, k_TGD, v_TGD


def _scores(q_THD: Tensor, k_TGD: Tensor) -> Tensor:
    """[H, T, T], float64."""
    keys_THD = k_TGD.double().repeat_interleave(q_THD.shape[1] // k_TGD.shape[1], 1)
    return torch.einsum("thd,shd->hts", q_THD.double(), keys_THD)


def _attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
    """Causal, in float64."""
    hidden_TT = torch.ones(TOKENS, TOKENS).triu(1).bool()
    scores = _scores(q_THD, k_TGD) / q_THD.shape[-1] ** 0.5
    weights = scores.masked_fill(hidden_TT, -torch.inf).softmax(-1)
    values_THD = v_TGD.double().repeat_interleave(q_THD.shape[1] // v_TGD.shape[1], 1)
    return torch.einsum("hts,shd->thd", weights, values_THD)


def _calibrated(dim: int, dim_v: int) -> LayerTurns:
    """Matrices that are neither orthogonal nor symmetric, one per kv head, and a shift."""
    generator = torch.Generator().manual_seed(dim)

    def matrices(size: int) -> Tensor:
        random_GDD = torch.randn(KV_HEADS, size, size, generator=generator, dtype=torch.float64)
        left_GDD, _, right_GDD = torch.linalg.svd(random_GDD)
        return left_GDD * torch.linspace(0.5, 2, size, dtype=torch.float64) @ right_GDD

    key_GDD, value_GDD = matrices(dim), matrices(dim_v)
    return LayerTurns(
        k_GDD=key_GDD.float(),
        k_shift_GD=torch.randn(KV_HEADS, dim, generator=generator),
        q_GDD=torch.linalg.inv(key_GDD).transpose(1, 2).float(),
        v_GDD=value_GDD.float(),
        out_GDD=torch.linalg.inv(value_GDD).float(),
    )


def _turns(kind: str, dim: int, dim_v: int) -> LayerTurns:
    if kind == "calibrated":
        return _calibrated(dim, dim_v)
    rotations: tuple[Rotation, Rotation] = ("hadamard", "hadamard") if kind == "hadamard" else ("random_hadamard",) * 2
    turns = all_turns(None, rotations, _spec(dim, dim_v))
    assert turns is not None
    return turns


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    "kind, dim, dim_v",
    [
        ("hadamard", 64, 64),
        ("hadamard", 128, 32),
        ("random_hadamard", 128, 128),
        ("random_hadamard", 80, 96),
        ("calibrated", 64, 64),
        ("calibrated", 80, 48),
    ],
)
def test_turned_attention_is_attention(kind: str, dim: int, dim_v: int, group: int) -> None:
    q_THD, k_TGD, v_TGD = _qkv(dim, dim_v, group)
    turns = _turns(kind, dim, dim_v)
    turned = turns.turn(q_THD, k_TGD, v_TGD)
    assert all((new - old).abs().max() > 0.1 for new, old in zip(turned, (q_THD, k_TGD, v_TGD), strict=True)), "it turns"
    found_THD = turns.turn_back(_attention(*turned).float())
    expected_THD = _attention(q_THD, k_TGD, v_TGD)
    torch.testing.assert_close(found_THD.double(), expected_THD, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("kind, dim", [("hadamard", 64), ("hadamard", 256), ("random_hadamard", 128), ("random_hadamard", 80)])
def test_scores_of_whole_numbers_are_equal(kind: str, dim: int) -> None:
    """Matrices of +-1 over a power of two round nothing, and the scores come out bit for bit; V comes back as it was."""
    q_THD, k_TGD, v_TGD = _qkv(dim, dim, group=2, whole=True)
    turns = _turns(kind, dim, dim)
    turned_q_THD, turned_k_TGD, turned_v_TGD = turns.turn(q_THD, k_TGD, v_TGD)
    assert torch.equal(_scores(turned_q_THD, turned_k_TGD), _scores(q_THD, k_TGD))
    assert torch.equal(turns.turn_back(turned_v_TGD), v_TGD)


def test_a_turn_written_out() -> None:
    """k' = A k - b, q' = A^-T q, v' = B v, and an output of v' is turned back by B^-1; each kv head has its own matrices."""
    q_THD, k_TGD, v_TGD = _qkv(16, 8, group=2)
    turns = _calibrated(16, 8)
    assert turns.k_GDD is not None and turns.k_shift_GD is not None and turns.q_GDD is not None
    assert turns.v_GDD is not None and turns.out_GDD is not None
    turned_q_THD, turned_k_TGD, turned_v_TGD = turns.turn(q_THD, k_TGD, v_TGD)
    back_TGD = turns.turn_back(turned_v_TGD)
    for g in range(KV_HEADS):
        for t in range(TOKENS):
            torch.testing.assert_close(turned_k_TGD[t, g], turns.k_GDD[g] @ k_TGD[t, g] - turns.k_shift_GD[g])
            torch.testing.assert_close(turned_v_TGD[t, g], turns.v_GDD[g] @ v_TGD[t, g])
            torch.testing.assert_close(back_TGD[t, g], turns.out_GDD[g] @ turned_v_TGD[t, g])
            for head in (2 * g, 2 * g + 1):
                torch.testing.assert_close(turned_q_THD[t, head], turns.q_GDD[g] @ q_THD[t, head])


def test_a_shift_moves_all_scores_of_a_query_alike() -> None:
    q_THD, k_TGD, v_TGD = _qkv(64, 64, group=2)
    turns = _calibrated(64, 64)
    turned_q_THD, turned_k_TGD, _ = turns.turn(q_THD, k_TGD, v_TGD)
    moved = _scores(turned_q_THD, turned_k_TGD) - _scores(q_THD, k_TGD)
    assert moved.abs().max() > 1
    torch.testing.assert_close(moved, moved[..., :1].expand_as(moved), rtol=0, atol=1e-3)


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_hadamards_matrix(size: int) -> None:
    """Sylvester's: the sign of (i, j) is the parity of the bits that i and j share. Orthogonal and symmetric."""
    matrix = hadamard(size)
    assert all(matrix[i, j] == (-1) ** (i & j).bit_count() for i in range(size) for j in range(size))
    assert torch.equal(matrix @ matrix.t(), size * torch.eye(size))


@pytest.mark.parametrize("dim, block", [(64, 64), (80, 16), (96, 32), (128, 128)])
def test_random_hadamards_blocks(dim: int, block: int) -> None:
    """Signs first, then Hadamard's matrix on each block. The signs are part of the format: a cache may outlive a build."""
    matrix = random_hadamard(dim)
    assert torch.equal(matrix @ matrix.t(), block * torch.eye(dim)), "orthogonal up to the length of its rows"
    signs_D = matrix[torch.arange(dim) // block * block, torch.arange(dim)]
    assert signs_D[:16].tolist() == [1, -1, 1, 1, -1, -1, -1, -1, 1, -1, -1, 1, 1, -1, 1, -1]
    for start in range(0, dim, block):
        rows = slice(start, start + block)
        assert torch.equal(matrix[rows, rows] * signs_D[rows], hadamard(block))
        assert matrix[rows].count_nonzero() == block * block
    assert 0.3 * dim < (signs_D > 0).sum() < 0.7 * dim


def test_fixed_turns_are_orthogonal_up_to_a_factor() -> None:
    for kind, factor in (("hadamard", 1), ("random_hadamard", 16)):
        turns = _turns(kind, 16, 16)
        for matrix_GDD, inverse_GDD in ((turns.k_GDD, turns.q_GDD), (turns.v_GDD, turns.out_GDD)):
            assert matrix_GDD is not None and inverse_GDD is not None
            assert torch.equal(matrix_GDD @ matrix_GDD.transpose(1, 2), factor * torch.eye(16).expand(KV_HEADS, -1, -1))
        assert turns.k_GDD is not None and turns.q_GDD is not None
        assert turns.v_GDD is not None and turns.out_GDD is not None
        assert torch.equal(turns.q_GDD, turns.k_GDD / factor)
        assert torch.equal(turns.out_GDD @ turns.v_GDD, torch.eye(16).expand(KV_HEADS, -1, -1))


def test_sides_turn_alone() -> None:
    """K turned and V not: values and outputs stay themselves; the other way round so do queries and keys."""
    q_THD, k_TGD, v_TGD = _qkv(32, 32, group=2)
    key_only, value_only = (all_turns(None, sides, _spec(32)) for sides in (("hadamard", "none"), ("none", "hadamard")))
    assert key_only is not None and value_only is not None
    turned_q_THD, turned_k_TGD, same_v_TGD = key_only.turn(q_THD, k_TGD, v_TGD)
    assert same_v_TGD is v_TGD and key_only.turn_back(q_THD) is q_THD
    assert not torch.equal(turned_q_THD, q_THD) and not torch.equal(turned_k_TGD, k_TGD)
    same_q_THD, same_k_TGD, turned_v_TGD = value_only.turn(q_THD, k_TGD, v_TGD)
    assert same_q_THD is q_THD and same_k_TGD is k_TGD and not torch.equal(turned_v_TGD, v_TGD)


def test_formats_say_how_they_are_turned() -> None:
    """A layer's cache comes with the turns of its format, unless those take a calibration."""
    turned = {"int4_per_token_head": (True, True), "ultraquant_4bit": (True, False), "turboquant_4bit_nc": (True, False)}
    turned |= dict.fromkeys(("kv4", "kv5", "kv6"), (False, True))
    for name in FORMATS:
        kv_format = get_format(name)
        if kv_format.refuse(spec := _spec(64, format=name), platform_named("cpu")):
            continue
        turns = view_layer(torch.zeros(1, sum(plane.bytes for plane in kv_format.planes(spec)), dtype=torch.uint8), spec).turns
        sides = (turns is not None and turns.k_GDD is not None, turns is not None and turns.v_GDD is not None)
        assert sides == turned.get(name, (False, False)), name
        if name.startswith("kv"):
            assert kv_format.rotations == ("calibrated", "none" if name == "kv4_e2m1" else "block_hadamard")
