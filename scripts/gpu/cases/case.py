"""One case, and tensors without numbers for it. Called by the modules beside it, which know what is launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfbyte.platform import Platform
from scripts.gpu.rules import Expect


@dataclass(frozen=True, slots=True)
class Case:
    """name: family, then what is special. launch: calls production code. expects: kernel -> what is asked of it beside the rest.

    is_sampled: whether `--changed` looks at it though nothing changed.
    """

    name: str
    launch: Callable[[Platform], None]
    expects: Mapping[str, Expect] = field(default_factory=dict)
    is_sampled: bool = False

    @property
    def family(self) -> str:
        return self.name.split()[0]


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def indices(*shape: int) -> Tensor:
    return numbers(*shape, dtype=torch.int64)
