"""The file of `--kv-cache-plan`: the KV format of every layer, as `halfbyte kv-tune` writes it.

JSON with `version` 1 and `layers`, a list of format names in the order of the layers; what else there is tells how it was found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfbyte.errors import UserError

VERSION = 1


def read_plan(path: Path) -> list[str]:
    """The formats by layer. UserError says what is wrong with the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read --kv-cache-plan {path}: {error}", param="kv_cache_plan") from None
    layers = found.get("layers") if isinstance(found, dict) else None
    is_plan = isinstance(layers, list) and bool(layers) and all(isinstance(name, str) for name in layers)
    if not is_plan or found.get("version") != VERSION:
        raise UserError(
            f"--kv-cache-plan {path} is no plan of version {VERSION}; make one with halfbyte kv-tune", param="kv_cache_plan"
        )
    assert isinstance(layers, list)
    return layers


def write_plan(path: Path, layers: Sequence[str], notes: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({"version": VERSION, "layers": list(layers), **notes}, indent=1) + "\n", encoding="utf-8")
