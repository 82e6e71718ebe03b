"""The static scales of one layer's K and V: one multiplier per kv head, real = stored * scale.

Knows numbers only; where they come from (a checkpoint, a calibration) is the loader's matter. Read by KV formats, which say
what a stored number is: for an 8-bit format the code, for a 4-bit one the code times its block's scale.

Shape letters: G kv heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerScales:
    """float32 [G] each, positive and finite. A scale of the whole layer is repeated for its heads.

    calibrated: whether somebody measured them; without that they are 1.
    """

    k_G: Tensor
    v_G: Tensor
    calibrated: bool

    def to(self, device: torch.device) -> LayerScales:
        return LayerScales(self.k_G.to(device), self.v_G.to(device), self.calibrated)

    @classmethod
    def ones(cls, num_kv_heads: int) -> LayerScales:
        """What a layer has of which nobody measured anything."""
        return cls(torch.ones(num_kv_heads), torch.ones(num_kv_heads), calibrated=False)
