"""The KV formats by name. To add one: a file in this folder and a line in `FORMATS`; the conformance suite picks it up.

`ARRANGEMENTS` hold the numbers of a format in another order: users name the format, a back end chooses the arrangement.
"""

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
ARRANGEMENTS: dict[str, str] = {
    "bfloat16_pairs": "halfbyte.kvcache.formats.pairs:PairFormat",
}


@cache
def get_format(name: str) -> KVFormat:
    """The format or arrangement called `name`, made once: formats hold no state."""
    module, _, attribute = {**FORMATS, **ARRANGEMENTS}[name].partition(":")
    made: KVFormat = getattr(import_module(module), attribute)(name)
    return made
