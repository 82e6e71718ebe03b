"""8-bit floating-point numbers with static scales, one per kv head: E4M3 and E5M2.

stored = x / scale, rounded to nearest even and saturating; real = stored * scale. Scales come from the checkpoint or from
calibration; without any they are 1, which suits numbers up to 448 (57344).
"""

from __future__ import annotations

from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kvcache.formats.base import Side
from halfbyte.kvcache.formats.coded import PlanesFormat
from halfbyte.kvcache.formats.numbers import finite, from_e4m3, from_e5m2, to_e4m3, to_e5m2


class Fp8Codec:
    """A byte per number, none beside them."""

    bits = 8
    uses_scale = True
    extra_unit = 1

    def __init__(self, name: str) -> None:
        self.name = name
        self._to, self._from = {"fp8_e4m3": (to_e4m3, from_e4m3), "fp8_e5m2": (to_e5m2, from_e5m2)}[name]

    def extra_bytes(self, dim: int) -> int:
        return 0

    def encode(self, x_D: Tensor, scale_1: Tensor) -> tuple[Tensor, Tensor]:
        codes_D = self._to(finite(x_D) / scale_1)
        return codes_D, codes_D[..., :0]

    def decode(self, codes_D: Tensor, extra_E: Tensor, scale_1: Tensor) -> Tensor:
        return self._from(codes_D) * scale_1

    def refuse(self, dim: int) -> Refusal | None:
        return None


def make(name: str) -> PlanesFormat:
    return PlanesFormat(name, Side(Fp8Codec(name)), Side(Fp8Codec(name)))
