"""`halfbyte kv-eval` with formats beside the product's: what others build of as many bits, simulated for the comparison.

  q4_0_rotated          as llama.cpp quantises a rotated cache: blocks of 32 numbers, one float16 scale, whole numbers of 4 bits,
                        K and V turned by a Hadamard matrix
  q4_0_rotated_first    the same with the first 16 tokens in the model's dtype
  nvfp4_first           NVFP4 with the first 16 tokens in the model's dtype

Arguments are those of `halfbyte kv-eval`. The rotated ones are read by the reference back end only, and so
should be what they are compared with: pass --attention-backend reference.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from halfbyte.entrypoints.cli import main as halfbyte
from halfbyte.errors import Refusal
from halfbyte.kvcache.formats import FORMATS, get_format
from halfbyte.kvcache.formats.base import KVFormat, Side
from halfbyte.kvcache.formats.coded import PlanesFormat
from halfbyte.kvcache.formats.numbers import finite

BLOCK = 32
FIRST_TOKENS = 16
NAMES = ("q4_0_rotated", "q4_0_rotated_first", "nvfp4_first")


class Q40Codec:
    """The number of the greatest magnitude becomes exactly -8; a code is 8 more than the nearest whole number."""

    name = "q4_0"
    bits = 4
    uses_scale = False
    extra_unit = 2

    def extra_bytes(self, dim: int) -> int:
        return dim // BLOCK * 2

    def encode(self, x_D: Tensor, scale_1: Tensor) -> tuple[Tensor, Tensor]:
        x_K32 = finite(x_D).unflatten(-1, (-1, BLOCK))
        most_K1 = x_K32.gather(-1, x_K32.abs().argmax(-1, keepdim=True))
        unit_K1 = (most_K1 / -8).half()
        inverse_K1 = torch.where(unit_K1 == 0, 0, 1 / unit_K1.float())
        codes_K32 = torch.floor(x_K32 * inverse_K1 + 8.5).clamp(0, 15).to(torch.uint8)
        return codes_K32.flatten(-2), unit_K1.view(torch.uint8).flatten(-2)

    def decode(self, codes_D: Tensor, extra_E: Tensor, scale_1: Tensor) -> Tensor:
        unit_K1 = extra_E.contiguous().view(torch.float16).float()[..., None]
        return ((codes_D.float().unflatten(-1, (-1, BLOCK)) - 8) * unit_K1).flatten(-2)

    def refuse(self, dim: int) -> Refusal | None:
        return Refusal(f"q4_0 has blocks of {BLOCK} numbers, got head dim {dim}", "") if dim % BLOCK else None


def make(name: str) -> KVFormat:
    first_tokens = FIRST_TOKENS if name.endswith("_first") else 0
    if name == "nvfp4_first":
        sides = get_format("nvfp4").sides
        assert sides is not None
        return PlanesFormat(name, *sides, first_tokens=first_tokens)
    side = Side(Q40Codec(), "hadamard")
    return PlanesFormat(name, side, side, first_tokens=first_tokens)


def main(argv: Sequence[str]) -> int:
    FORMATS.update(dict.fromkeys(NAMES, f"{__name__}:make"))
    return halfbyte(["kv-eval", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
