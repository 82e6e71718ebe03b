"""Counter-based Gumbel noise as Triton device functions: the twin of `kernels.sampling.gumbel_noise`.

The hash of (seed, position, token id) has the law's bits on every target; the two logarithms are the target's own. Called by
the kernels that choose tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def gumbel(seed: tl.tensor, position: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise of each token, float32, always finite; seed and position are int64 numbers."""
    return -tl.log(_minus_log_of_rest(_uniform(seed, position, token)))


@triton.jit
def _uniform(seed: tl.tensor, position: tl.tensor, token: tl.tensor) -> tl.tensor:
    """As `kernels.sampling.uniform`: numbers in (0, 1)."""
    key = _mix_64(_mix_64(seed.to(tl.uint64) + _GOLDEN) + position.to(tl.uint64) * _GOLDEN)
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = _mix_32(_mix_32(token.to(tl.uint32) ^ low) ^ high) & 0x7FFFFFFF
    return tl.minimum((bits.to(tl.int32).to(tl.float32) + 0.5) * 2.0**-31, 1.0 - 2.0**-24)


@triton.jit
def _mix_64(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix_32(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _minus_log_of_rest(u: tl.tensor) -> tl.tensor:
    """-log(1 - u) for u in (0, 1), as exact near 0 as elsewhere: what 1 - u rounds off is made up for (Kahan, HP-15C)."""
    rest = 1.0 - u
    return tl.where(rest == 1.0, u, tl.div_rn(tl.log(rest) * u, rest - 1.0))
