"""What is compiled. To add kernels: a module here with a function that yields their cases, and that function in `FAMILIES`.

A case calls what a layer or the runner calls, with tensors of real shapes on "meta", which hold no numbers: its launches are
recorded, not run. What is tuned by architecture goes by the `Platform` that a case is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from scripts.gpu.cases.attention import attention_cases
from scripts.gpu.cases.case import Case
from scripts.gpu.cases.inputs import input_cases
from scripts.gpu.cases.kv import write_cases
from scripts.gpu.cases.layers import layer_cases
from scripts.gpu.cases.moe import moe_cases
from scripts.gpu.cases.sampling import sampling_cases

FAMILIES: tuple[Callable[[], Iterator[Case]], ...] = (
    attention_cases,
    write_cases,
    layer_cases,
    moe_cases,
    sampling_cases,
    input_cases,
)


def all_cases() -> dict[str, Case]:
    found = [case for family in FAMILIES for case in family()]
    by_name = {case.name: case for case in found}
    assert len(by_name) == len(found), "two cases of one name"
    return by_name
