"""A launch as a value: the grid, the kernel, its arguments and options, before anything runs.

Launchers make one and run it; whoever wants to compile a kernel for a GPU that is not there takes it as it is. Knows no kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from halfbyte.kernels.triton.numbers import FUSION_OFF


class Launch(NamedTuple):
    """grid: programs along up to three axes, none of them 0.

    is_exact: whether products and sums are rounded one by one, as PyTorch rounds them; else a sum of a product is rounded once.
    """

    grid: tuple[int, ...]
    kernel: Any
    arguments: tuple[Any, ...]
    num_warps: int = 4
    is_exact: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """What the compilation takes beside the arguments."""
        return {"num_warps": self.num_warps, **(FUSION_OFF if self.is_exact else {})}

    def compile(self) -> None:
        """As `run` would; nothing runs. Raises what the compiler raises."""
        self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.options)
