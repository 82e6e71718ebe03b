"""The KV formats by name. To add one: a file in this folder and a line in `FORMATS`; the conformance suite picks it up."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfbyte.kvcache.formats.base import KVFormat

FORMATS: dict[str, str] = {
    "bfloat16": "halfbyte.kvcache.formats.dense:DenseFormat",
    "float16": "halfbyte.kvcache.formats.dense:DenseFormat",
    "float32": "halfbyte.kvcache.formats.dense:DenseFormat",
}


@cache
def get_format(name: str) -> KVFormat:
    """The format called `name` (a key of `FORMATS`), made once: formats hold no state."""
    module, _, attribute = FORMATS[name].partition(":")
    made: KVFormat = getattr(import_module(module), attribute)(name)
    return made
