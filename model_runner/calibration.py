"""Calibration of KV formats: what a model's queries, keys and values look like, and the matrices and scales that follow from it.

K is centred, and turned by T = H (S_K^-1 # S_Q)^(1/2), where S_K and S_Q are the second moments of centred keys and of queries
after rotation, # is the geometric mean of matrices and H an orthonormal matrix that spreads each number over all others.
(S_K^-1 # S_Q)^(1/2) is the T that makes tr(T S_K T') tr(T^-T S_Q T^-1) least: the noise that a quantiser of like noise in all
directions brings into the logits. Statistics are kept as a small safetensors file, keyed by a fingerprint of the weights.

Knows matrices and files; knows no tokens. Called by `kv_calibration` of the engine, with heads that the runner has seen.

Shape letters: T tokens, H heads, G kv heads, N = H / G, D head dim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.errors import ModelFileError
from halfbyte.kernels.attention.base import AttentionSpec
from halfbyte.kvcache.formats.base import Codec, Side
from halfbyte.kvcache.formats.numbers import E4M3_MAX
from halfbyte.kvcache.scales import LayerScales
from halfbyte.kvcache.turns import LayerTurns, hadamard

VERSION = "1"
# Of the mean diagonal, added to moments that stem from few tokens. More for keys: a direction in which the calibration's keys
# hardly vary must not make other keys coarse.
_K_RIDGE, _Q_RIDGE = 1e-2, 1e-3
_TINY = 1e-12
_HEADROOM = 32  # block scales saturate beyond what was seen, single numbers do so anyway


class HeadMoments:
    """Sums over the tokens seen of one layer, in float64."""

    def __init__(self, spec: AttentionSpec) -> None:
        heads, dim = spec.num_kv_heads, spec.head_dim
        self.spec = spec
        self.num_tokens = 0
        self.k_sum_GD = torch.zeros(heads, dim, dtype=torch.float64)
        self.kk_GDD = torch.zeros(heads, dim, dim, dtype=torch.float64)
        self.qq_GDD = torch.zeros(heads, dim, dim, dtype=torch.float64)
        self.k_most_G = torch.zeros(heads)
        self.v_most_G = torch.zeros(heads)

    def add(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Heads as attention sees them: after norms and rotation."""
        q_THD, k_TGD, v_TGD = q_THD.cpu(), k_TGD.cpu(), v_TGD.cpu()
        k_GTD = k_TGD.transpose(0, 1).float()
        q_GMD = q_THD.unflatten(1, (self.spec.num_kv_heads, -1)).permute(1, 0, 2, 3).flatten(1, 2).float()
        self.num_tokens += k_TGD.shape[0]
        self.k_sum_GD += k_GTD.double().sum(1)
        self.kk_GDD += k_GTD.mT @ k_GTD
        self.qq_GDD += q_GMD.mT @ q_GMD
        self.k_most_G = torch.maximum(self.k_most_G, k_TGD.abs().amax((0, 2)).float())
        self.v_most_G = torch.maximum(self.v_most_G, v_TGD.abs().amax((0, 2)).float())


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Of one layer, float32. k_mean_GD: zero where keys must not be centred. k_turn_GDD: T. k_most_G, v_most_G: magnitudes."""

    k_mean_GD: Tensor
    k_turn_GDD: Tensor
    k_most_G: Tensor
    v_most_G: Tensor

    def turns(self) -> LayerTurns:
        k_GDD = self.k_turn_GDD.double()
        shift_GD = (k_GDD @ self.k_mean_GD.double()[..., None])[..., 0]
        q_GDD = torch.linalg.inv(k_GDD).mT
        return LayerTurns(k_GDD=self.k_turn_GDD, k_shift_GD=shift_GD.float(), q_GDD=q_GDD.float().contiguous())

    def scales(self, k: Side, v: Side) -> LayerScales:
        """Static scales for codecs that use any. Turned keys need none: their numbers are about 1."""
        k_G = torch.ones_like(self.k_most_G) if k.rotation == "calibrated" else _scale(k.codec, self.k_most_G)
        return LayerScales(k_G, _scale(v.codec, self.v_most_G), calibrated=True)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Statistics of all layers. fingerprint: of the weights. num_tokens: on which they were measured."""

    layers: tuple[LayerStatistics, ...]
    fingerprint: str
    num_tokens: int

    @property
    def digest(self) -> bytes:
        """Names the numbers themselves: KV made with one calibration means nothing under another."""
        found = hashlib.sha256(self.fingerprint.encode())
        for layer in self.layers:
            for name in LayerStatistics.__slots__:
                found.update(getattr(layer, name).contiguous().numpy().tobytes())
        return found.digest()

    def save(self, path: Path) -> None:
        """Write the file whole, or not at all; an OSError says why it cannot be written."""
        from safetensors.torch import save

        tensors = {
            f"layers.{index}.{name}": getattr(layer, name).contiguous()
            for index, layer in enumerate(self.layers)
            for name in LayerStatistics.__slots__
        }
        metadata = {"halfbyte_kv_calibration": VERSION, "fingerprint": self.fingerprint, "num_tokens": str(self.num_tokens)}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(save(tensors, metadata))
        partial.replace(path)


def load_calibration(path: Path, specs: Sequence[AttentionSpec]) -> Calibration:
    """The file's statistics for layers of these shapes. ModelFileError says what is wrong with it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("halfbyte_kv_calibration") != VERSION:
                raise ModelFileError(f"{path} is no KV calibration of this version; make one with halfbyte calibrate")
            layers = [
                LayerStatistics(*(file.get_tensor(f"layers.{index}.{name}") for name in LayerStatistics.__slots__))
                for index in range(len(specs))
            ]
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"cannot read the KV calibration {path}: {error}") from None
    for index, (layer, spec) in enumerate(zip(layers, specs, strict=True)):
        heads, dim = spec.num_kv_heads, spec.head_dim
        shapes = ((heads, dim), (heads, dim, dim), (heads,), (heads,))
        for name, shape in zip(LayerStatistics.__slots__, shapes, strict=True):
            tensor = getattr(layer, name)
            if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or not tensor.isfinite().all():
                raise ModelFileError(
                    f"{path}: layers.{index}.{name} must be finite float32 {list(shape)}, got {list(tensor.shape)}"
                )
    num_tokens = metadata.get("num_tokens", "")
    return Calibration(tuple(layers), metadata.get("fingerprint", ""), int(num_tokens) if num_tokens.isdecimal() else 0)


def statistics_of(moments: HeadMoments) -> LayerStatistics:
    """Mean and matrix of one layer from what was seen."""
    spec = moments.spec
    # A soft cap and a sink see the logits themselves, so that a constant in all of them matters.
    is_centred = spec.soft_cap is None and not spec.sinks
    mean_GD = moments.k_sum_GD / moments.num_tokens if is_centred else torch.zeros_like(moments.k_sum_GD)
    kk_GDD = moments.kk_GDD / moments.num_tokens - mean_GD[:, :, None] * mean_GD[:, None, :]
    qq_GDD = moments.qq_GDD / (moments.num_tokens * spec.num_heads // spec.num_kv_heads)
    spread_DD = spreading(spec.head_dim).double()
    turns = torch.stack([_to_unit(spread_DD @ balancing(*both), both[0]) for both in zip(kk_GDD, qq_GDD, strict=True)])
    return LayerStatistics(mean_GD.float(), turns.float(), moments.k_most_G, moments.v_most_G)


def balancing(kk_DD: Tensor, qq_DD: Tensor) -> Tensor:
    """(S_K^-1 # S_Q)^(1/2), with A # B = A^(1/2) (A^(-1/2) B A^(-1/2))^(1/2) A^(1/2); float64, symmetric."""
    kk_DD, qq_DD = _ridged(kk_DD, _K_RIDGE), _ridged(qq_DD, _Q_RIDGE)
    root_DD, inverse_DD = _power(kk_DD, 0.5), _power(kk_DD, -0.5)
    return _power(inverse_DD @ _power(root_DD @ qq_DD @ root_DD, 0.5) @ inverse_DD, 0.5)


def spreading(dim: int) -> Tensor:
    """An orthonormal matrix whose rows are nearly flat: Hadamard's where the size is a power of two, else that of the cosine
    transform (DCT-II)."""
    if dim & (dim - 1) == 0:
        return hadamard(dim) / dim**0.5
    row_D1, column_D = torch.arange(dim, dtype=torch.float64)[:, None], torch.arange(dim, dtype=torch.float64)
    matrix_DD = torch.cos(torch.pi / dim * (column_D + 0.5) * row_D1) * (2 / dim) ** 0.5
    matrix_DD[0] *= 0.5**0.5
    return matrix_DD.float()


def _to_unit(turn_DD: Tensor, kk_DD: Tensor) -> Tensor:
    """The same direction, such that turned keys have a mean square of 1: block scales then lie well inside E4M3."""
    mean_square = (turn_DD @ kk_DD @ turn_DD.mT).diagonal().mean().clamp(min=_TINY)
    return turn_DD / mean_square.sqrt()


def _scale(codec: Codec, most_G: Tensor) -> Tensor:
    """What puts the greatest magnitude seen at the greatest number of the codec; of one with block scales, far below."""
    if not codec.uses_scale:
        return torch.ones_like(most_G)
    greatest = E4M3_MAX if codec.bits == 8 else E4M3_MAX * 6 / _HEADROOM
    return (most_G / greatest).clamp(min=_TINY)


def _ridged(matrix_DD: Tensor, ridge: float) -> Tensor:
    mean = matrix_DD.diagonal().mean().clamp(min=_TINY)
    return matrix_DD + ridge * mean * torch.eye(matrix_DD.shape[0], dtype=matrix_DD.dtype)


def _power(matrix_DD: Tensor, power: float) -> Tensor:
    """Of a symmetric positive matrix."""
    values_D, vectors_DD = torch.linalg.eigh((matrix_DD + matrix_DD.mT) / 2)
    values_D = values_D.clamp(min=float(values_D.max()) * 1e-9)
    return (vectors_DD * values_D**power) @ vectors_DD.mT
