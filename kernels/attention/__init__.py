"""The attention back ends by name. To add one: a file in this folder and a line in `BACKENDS`."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfbyte.kernels.attention.base import AttentionBackend

BACKENDS: dict[str, str] = {
    "cpu": "halfbyte.kernels.attention.cpu:CpuBackend",
    "flashinfer": "halfbyte.kernels.attention.flashinfer.backend:FlashInferBackend",
    "flash_attn": "halfbyte.kernels.attention.flash_attn:FlashAttnBackend",
    "triton": "halfbyte.kernels.attention.triton:TritonBackend",
    "reference": "halfbyte.kernels.attention.reference:ReferenceBackend",
}


@cache
def get_backend(name: str) -> AttentionBackend:
    """The back end called `name` (a key of `BACKENDS`), made once: what a step needs lives in its metadata."""
    module, _, attribute = BACKENDS[name].partition(":")
    made: AttentionBackend = getattr(import_module(module), attribute)()
    return made
