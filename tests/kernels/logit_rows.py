"""Rows of logits on which choices of tokens go wrong, and how far results are apart. Used by the tests of sampling kernels.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(width: int, seed: int = 0) -> Tensor:
    """Plain ones; with ties; mostly dropped; all equal; with zeros of both signs, denormals and extremes; rising."""
    logits = torch.randn(6, width, generator=seeded(seed)) * 4
    logits[1] = logits[1].round()
    logits[2, torch.rand(width, generator=seeded(seed + 1)) < 0.9] = -torch.inf
    logits[2, width // 2] = 0.5
    logits[3] = -2.5
    odd = torch.tensor([0.0, -0.0, 1e-40, 3e-45, -1e-40, 3.4e38, -3.4e38, -torch.inf])
    logits[4] = odd[torch.randint(0, len(odd), (width,), generator=seeded(seed + 2))]
    logits[4, 0] = 0.0
    logits[5] = torch.linspace(-1, 1, width)
    return logits


def ulps(got: Tensor, expected: Tensor) -> float:
    """The greatest difference, in units of the last place of the larger of 1 and the value."""
    return float(((got.double() - expected.double()).abs() / (2.0**-23 * expected.abs().clamp(min=1.0).double())).max())
