"""What K, V, queries and outputs of a layer are multiplied with, so that their numbers suit a coarse format.

Attention does not notice: with k' = A k - b and q' = A^-T q, a score q' k' differs from q k by q b', the same for all keys of a
query, which the softmax cancels; with v' = B v, outputs are turned back by B^-1. Knows matrices only. Made by calibration, or
here for formats with fixed matrices; applied by attention back ends.

Shape letters: T tokens, H heads, G kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfbyte.kvcache.formats.base import Rotation
from halfbyte.kvcache.spec import KVCacheSpec

_BLOCK = 16  # numbers that share a block scale
_SIGN_SEED = 0x9E3779B9  # of int4_per_token_head's random signs


@dataclass(frozen=True, slots=True)
class LayerTurns:
    """float32, on the layer's device. A row of k_GDD gives one number of k'. None: that side is not turned.

    k_shift_GD: b of the class's docstring, subtracted after the product. q_GDD: the inverse transpose of k_GDD.
    """

    k_GDD: Tensor | None = None
    k_shift_GD: Tensor | None = None
    q_GDD: Tensor | None = None
    v_GDD: Tensor | None = None
    out_GDD: Tensor | None = None

    def to(self, device: torch.device) -> LayerTurns:
        moved = (getattr(self, name) for name in LayerTurns.__slots__)
        return LayerTurns(*(None if tensor is None else tensor.to(device) for tensor in moved))

    def turn(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as the cache wants them, in float32."""
        if self.k_GDD is not None and self.q_GDD is not None:
            q_THD, k_TGD = _multiply(q_THD, self.q_GDD), _multiply(k_TGD, self.k_GDD)
            if self.k_shift_GD is not None:
                k_TGD = k_TGD - self.k_shift_GD
        return q_THD, k_TGD, v_TGD if self.v_GDD is None else _multiply(v_TGD, self.v_GDD)

    def turn_back(self, out_THD: Tensor) -> Tensor:
        """The outputs of attention over turned values."""
        return out_THD if self.out_GDD is None else _multiply(out_THD, self.out_GDD)


def _multiply(x_THD: Tensor, matrix_GDD: Tensor) -> Tensor:
    """Each head's vectors by the matrix of its kv head."""
    num_kv_heads = matrix_GDD.shape[0]
    x_TGND = x_THD.float().unflatten(1, (num_kv_heads, -1))
    return torch.einsum("tgnd,ged->tgne", x_TGND, matrix_GDD).flatten(1, 2)


def all_turns(calibrated: LayerTurns | None, rotations: tuple[Rotation, Rotation], spec: KVCacheSpec) -> LayerTurns | None:
    """Those that calibration found, and the fixed ones of a format with these rotations; None when nothing is turned (yet)."""
    key = _fixed_matrix(rotations[0], spec.head_dim)
    value = _fixed_matrix(rotations[1], spec.head_dim_v)
    if key is None and value is None:
        return calibrated
    heads = spec.num_kv_heads

    def each(matrix: Tensor) -> Tensor:
        return matrix.contiguous().expand(heads, -1, -1)

    # Up to a factor they are orthogonal: the inverse is the transpose over the squared length of a row.
    found = calibrated or LayerTurns()
    if key is not None:
        found = replace(found, k_GDD=each(key), q_GDD=each(key / _row_square(key)))
    if value is not None:
        found = replace(found, v_GDD=each(value), out_GDD=each(value.t() / _row_square(value)))
    return found


def _row_square(matrix: Tensor) -> float:
    return float((matrix[0] ** 2).sum())


def _fixed_matrix(rotation: Rotation, dim: int) -> Tensor | None:
    if rotation == "hadamard":
        return hadamard(dim) / dim**0.5
    if rotation == "random_hadamard":
        return random_hadamard(dim)
    if rotation == "block_hadamard":
        return torch.block_diag(*[hadamard(_BLOCK) / _BLOCK**0.5] * (dim // _BLOCK))
    return None


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix of +-1, float32; size: a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def random_hadamard(dim: int) -> Tensor:
    """Random signs, then Hadamard's matrix in blocks of the largest power of two that divides `dim`; not normalised."""
    generator = torch.Generator().manual_seed(_SIGN_SEED)
    signs_D = torch.bernoulli(torch.full((dim,), 0.5), generator=generator) * 2 - 1
    block = dim & -dim
    return torch.block_diag(*[hadamard(block)] * (dim // block)) * signs_D
