"""What low-rank adapters add to a product, for a batch in which each token may have another adapter or none: the law.

An adapter sits in a seat, a number from 1 on; seat 0 is nobody's. A product's stacked weights are its parts. Knows tensors and
seats; knows no files and no requests. Called by model_runner.layers.linear.

Shape letters: T tokens, E inputs, O outputs, P parts, S seats, R the highest rank, N = P * R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraPart:
    """An adapter at one part of a product: y += scale * (x A^T) B^T."""

    a_RE: Tensor
    b_OR: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a_RE.shape[0]


class LoraWeights(Protocol):
    """The adapters at one product, by seat, in the form that the kernels of a device read. Its memory is there from the start."""

    @property
    def nbytes(self) -> int: ...

    def put(self, seat: int, parts: Sequence[LoraPart | None]) -> None:
        """The adapter that sits in `seat` from now on: one entry per part, None for what it leaves alone."""
        ...


class StackedLora:
    """Adapters stacked by seat, each as wide as the highest rank allows, zero beyond its own. outputs: of each part."""

    def __init__(
        self, outputs: Sequence[int], num_inputs: int, num_seats: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.outputs = tuple(outputs)
        self.max_rank = max_rank
        self.a_SNE = torch.zeros(num_seats, len(outputs) * max_rank, num_inputs, dtype=dtype, device=device)
        self.b_SOR = torch.zeros(num_seats, sum(outputs), max_rank, dtype=dtype, device=device)
        self.scale_SP = torch.zeros(num_seats, len(outputs), dtype=torch.float32, device=device)

    @property
    def num_seats(self) -> int:
        return self.a_SNE.shape[0]

    @property
    def nbytes(self) -> int:
        return self.a_SNE.nbytes + self.b_SOR.nbytes + self.scale_SP.nbytes

    def move(self, place: torch.device) -> None:
        self.a_SNE, self.b_SOR, self.scale_SP = (tensor.to(place) for tensor in (self.a_SNE, self.b_SOR, self.scale_SP))

    def put(self, seat: int, parts: Sequence[LoraPart | None]) -> None:
        a_NE, b_OR = self.a_SNE[seat - 1].zero_(), self.b_SOR[seat - 1].zero_()
        scales = [0.0 if part is None else part.scale for part in parts]
        self.scale_SP[seat - 1] = torch.tensor(scales)
        row = 0
        for index, (part, num_outputs) in enumerate(zip(parts, self.outputs, strict=True)):
            if part is not None:
                a_NE[index * self.max_rank :][: part.rank] = part.a_RE
                b_OR[row : row + num_outputs, : part.rank] = part.b_OR
            row += num_outputs


def add_lora(y_TO: Tensor, x_TE: Tensor, lora: StackedLora, seat_T: Tensor) -> Tensor:
    """y + scale * (x A^T) B^T of each token's adapter, in y's dtype; y itself for tokens without one.

    Sums are float32; what lies between the two products is rounded to x's dtype. seat_T: int32.
    """
    x_TE = x_TE.float()
    for seat in range(lora.num_seats):
        h_TPR = F.linear(x_TE, lora.a_SNE[seat].float()).unflatten(1, (-1, lora.max_rank)) * lora.scale_SP[seat][:, None]
        h_PTR = h_TPR.to(lora.a_SNE.dtype).float().transpose(0, 1)
        parts = lora.b_SOR[seat].float().split(lora.outputs)
        added_TO = torch.cat([F.linear(h_TR, b_OR) for h_TR, b_OR in zip(h_PTR, parts, strict=True)], 1)
        y_TO = torch.where((seat_T == seat + 1)[:, None], (y_TO.float() + added_TO).to(y_TO.dtype), y_TO)
    return y_TO
