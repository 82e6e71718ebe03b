"""Cuts of the attention kernels that were measured on a GPU: the file that keeps them, and what a start takes from it.

`halfbyte preload --autotune` writes one file per architecture into the cache folder; a start reads it once, and never measures.
A file of other kernels, or of another version of Triton, says nothing of these and is not used. Knows no kernel and imports
neither torch nor triton by itself. Called by whoever makes the Triton attention back end, and by `halfbyte.engine.preload`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from halfbyte.errors import UserError
from halfbyte.kernels.triton.targets import Cut, Cuts
from halfbyte.platform import cache_folder

if TYPE_CHECKING:
    from halfbyte.kernels.attention.base import AttentionSpec

VERSION = 1
AUTOTUNE = "run halfbyte preload --autotune"

# The tokens of a tile are a whole share of a part, and products have at least so many rows.
_MAX_TILE, _MIN_ROWS, _MAX_ROWS, _MAX_WARPS, _MAX_STAGES = 256, 16, 256, 16, 8

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that are measured as one. Windows, caps and sinks leave a tile's products and reads as they are.

    heads: query heads per kv head. kv_format: of K and V, as the cache is arranged. dtype: of queries. max_queries: of a request
    that is decoded.
    """

    heads: int
    head_dim: int
    head_dim_v: int
    kv_format: str
    dtype: str
    max_queries: int = 1

    @classmethod
    def of(cls, spec: AttentionSpec, kv_format: str, dtype: object, max_queries: int = 1) -> LayerKind:
        """dtype: torch's, or its name."""
        name = str(dtype).removeprefix("torch.")
        return cls(spec.num_heads // spec.num_kv_heads, spec.head_dim, spec.head_dim_v, kv_format, name, max_queries)


@dataclass(frozen=True, slots=True)
class Choice:
    """The cut that was fastest, and the built-in one, each with the seconds that a step of one layer took with it."""

    cut: Cut
    seconds: float
    built_in: Cut
    built_in_seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found for one kind of layer.

    requests, context: of the step that decodes; prompt_queries: of the step of one prompt, over a context of prompt_context.
    """

    kind: LayerKind
    decode: Choice
    prompt: Choice
    requests: int
    context: int
    prompt_queries: int
    prompt_context: int


@dataclass(frozen=True, slots=True)
class Version:
    """What a file has to agree with. kernels: a digest of their sources. triton: its version."""

    version: int
    kernels: str
    triton: str


@dataclass(frozen=True, slots=True)
class Table:
    """The file. device: the name of the GPU that was measured. date: as 2026-11-30."""

    made_for: Version
    architecture: str
    device: str
    date: str
    measured: tuple[Measured, ...]


@dataclass(frozen=True, slots=True)
class _Head:
    """What any version of the file has."""

    made_for: Version


@dataclass(frozen=True, slots=True)
class Tiles:
    """The cuts of a start, by kind of layer. path: of the file that was there, None for none; date: None if it is not used."""

    path: Path | None = None
    date: str | None = None
    cuts: Mapping[LayerKind, Cuts] = field(default_factory=dict)

    def line(self, kinds: Collection[LayerKind]) -> str:
        """For the start-up log of a model with layers of these kinds."""
        if self.path is None:
            return "attention tiles: built in"
        if self.date is None:
            return f"attention tiles: built in: {self.path} is of other kernels and is not used: {AUTOTUNE}"
        num_found = sum(kind in self.cuts for kind in kinds)
        if not num_found:
            return f"attention tiles: built in: {self.path} has no layers like this model's: {AUTOTUNE}"
        share = "" if num_found == len(kinds) else f", for {num_found} of {len(kinds)} kinds of layer; built in for the rest"
        return f"attention tiles: tuned on {self.date} by {self.path}{share}"


BUILT_IN = Tiles()


def tiles_path(architecture: str) -> Path:
    """architecture: as `Platform.architecture` names it."""
    return cache_folder() / "attention" / f"{architecture}.json"


@cache
def current_version() -> Version:
    """Of the kernels of this package and the Triton that compiles them."""
    import triton

    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return Version(VERSION, found.hexdigest()[:16], triton.__version__)


def read_tiles(architecture: str, version: Version | None = None) -> Tiles:
    """What a start uses. version: None: `current_version`. UserError names a file that cannot be read or is damaged."""
    path = tiles_path(architecture)
    try:
        table = _read(path, version or current_version())
        if table is not None and table.architecture != architecture:
            raise ValueError(f"it is of {table.architecture}")
    except FileNotFoundError:
        return BUILT_IN
    except (OSError, ValueError) as error:
        raise UserError(f"the attention tiles of {path} cannot be used: {error}; delete the file, or {AUTOTUNE}") from None
    if table is None:
        return Tiles(path)
    cuts = {each.kind: Cuts(each.decode.cut, each.prompt.cut) for each in table.measured}
    return Tiles(path, table.date, cuts)


def keep_table(table: Table) -> Path:
    """Write the file, whole or not at all. What it holds of the same kernels and GPU for other kinds of layer stays."""
    path = tiles_path(table.architecture)
    now = {each.kind for each in table.measured}
    kept = tuple(each for each in _kept(path, table) if each.kind not in now)
    whole = replace(table, measured=(*kept, *table.measured))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as copy:
        copy.write(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")
    os.replace(copy.name, path)
    return path


def _kept(path: Path, table: Table) -> Sequence[Measured]:
    try:
        found = _read(path, table.made_for)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        log.warning("%s is written anew: %s", path, error)
        return ()
    if found is None or (found.device, found.architecture) != (table.device, table.architecture):
        return ()
    return found.measured


def _read(path: Path, version: Version) -> Table | None:
    """None for a table of other kernels. OSError, and ValueError for what is no such table."""
    content = path.read_bytes()
    if msgspec.json.decode(content, type=_Head).made_for != version:
        return None
    table = msgspec.json.decode(content, type=Table)
    for each in table.measured:
        rows = each.kind.heads * each.kind.max_queries
        if not (_is_cut(each.decode.cut, rows) and _is_cut(each.prompt.cut, each.kind.heads)):
            raise ValueError(f"no kernel can be cut like {each}")
    return table


def _is_cut(cut: Cut, rows: int) -> bool:
    """Whether a kernel can be cut so, for tiles of at least so many rows."""
    limits = ((cut.rows, _MIN_ROWS, _MAX_ROWS), (cut.tile, _MIN_ROWS, _MAX_TILE), (cut.num_warps, 1, _MAX_WARPS))
    are_powers = all(low <= number <= high and not number & (number - 1) for number, low, high in limits)
    return are_powers and cut.rows >= rows and 1 <= cut.stages <= _MAX_STAGES
