"""What fails a rule today and is let pass, each up to what was measured, and why.

More than that fails; an excuse that nothing needs any more fails, too, when all kernels are looked at. The table in
docs/results lists them. Called by scripts/aot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from scripts.gpu.rules import Failure


@dataclass(frozen=True, slots=True)
class Excuse:
    """kernels and figure: patterns of a line of the baseline ("case / kernel") and of a rule's figure. targets: those it is for.

    most: the greatest value; of figures that are no number, the values themselves do not matter.
    """

    kernels: str
    targets: tuple[str, ...]
    figure: str
    most: int
    because: str

    def covers(self, failure: Failure) -> bool:
        is_meant = fnmatchcase(failure.kernel, self.kernels) and fnmatchcase(failure.figure, self.figure)
        is_small = not failure.value.isdigit() or int(failure.value) <= self.most
        return is_meant and failure.target in self.targets and is_small


def sort_out(failures: Iterable[Failure]) -> tuple[list[Failure], set[Excuse]]:
    """Failures without an excuse, and the excuses that were needed."""
    left, needed = [], set()
    for failure in failures:
        covering = [excuse for excuse in EXCUSES if excuse.covers(failure)]
        needed |= set(covering)
        if not covering:
            left.append(failure)
    return left, needed


_AMPERE = ("sm80", "sm86", "sm89")
_DATACENTER_BLACKWELL = ("sm100", "sm103")
_SMALL_BLACKWELL = ("sm120", "sm121")
_NVIDIA = (*_AMPERE, "sm90", *_DATACENTER_BLACKWELL, *_SMALL_BLACKWELL)
_BY_WARPS = (*_AMPERE, *_SMALL_BLACKWELL)  # a warp multiplies out of its registers, others out of memory

_ALL, _LOOP = "local_instructions", "local_instructions_in_loop"
_FULL = "all 255 registers are in use"
_SCALES = "a lane loads 8 bytes of codes and one of scales at a time"

EXCUSES: tuple[Excuse, ...] = (
    Excuse("prompt * D256 / attend_prompts", _NVIDIA, _ALL, 58, _FULL),
    Excuse("decode turboquant_k8v4 D128 / attend_parts", (*_AMPERE, "sm90"), _ALL, 6, _FULL),
    Excuse("decode k:bfloat16,v:kv4 D128 / attend_parts", _DATACENTER_BLACKWELL, _ALL, 8, _FULL),
    Excuse("decode k:kv6,v:fp8_e5m2 D128 / attend_parts", _SMALL_BLACKWELL, _ALL, 18, _FULL),
    Excuse("prompt k:kv6,v:fp8_e5m2 D128 / attend_prompts", _SMALL_BLACKWELL, _ALL, 8, _FULL),
    Excuse("prompt *_per_token_head D128 / attend_prompts", _SMALL_BLACKWELL, _ALL, 6, _FULL),
    Excuse("decode * / merge_parts", _DATACENTER_BLACKWELL, _ALL, 4, "outside of the loop, with 48 registers in use"),
    Excuse("prompt bfloat16 D64 window sinks / attend_prompts", _DATACENTER_BLACKWELL, _ALL, 6, "outside of the loop"),
    Excuse("prompt nvfp4* D128 / attend_prompts", _BY_WARPS, "*-bit loads in the loop", 4, _SCALES),
    Excuse("prompt kv* D128* / attend_prompts", _BY_WARPS, "*-bit loads in the loop", 4, _SCALES),
    Excuse("prompt k:* D128 / attend_prompts", _BY_WARPS, "8-bit loads in the loop", 2, _SCALES),
)
