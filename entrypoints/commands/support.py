"""`halfbyte support`: which models, KV formats and attention back ends this build has, and on which platforms they go together.

Everything comes from the registries and the `refuse` functions, so that the table cannot claim what a start would refuse.
README holds the `--markdown` form; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfbyte.entrypoints.flag_table import LOG_LEVEL
from halfbyte.entrypoints.flags import Flag, parse
from halfbyte.kernels.attention import BACKENDS, get_backend
from halfbyte.kvcache.formats import FORMATS, get_format
from halfbyte.kvcache.spec import KVCacheSpec
from halfbyte.model_runner.models import MODELS
from halfbyte.platform import Platform

FLAGS = (Flag(name="markdown", help="as tables for a README", kind="switch"), LOG_LEVEL)

# One machine of each kind; the answers of `refuse` depend on nothing else of it.
PLATFORMS: dict[str, Platform] = {
    "CPU": Platform(device="cpu", name="CPU", num_threads=8, memory_limit_bytes=32 * 2**30, native_bf16=True),
    **{
        f"SM{major}{minor}": Platform(
            device="cuda",
            name=f"SM{major}{minor}",
            num_threads=8,
            memory_limit_bytes=80 * 2**30,
            native_bf16=True,
            capability=(major, minor),
        )
        for major, minor in ((8, 0), (9, 0), (10, 0), (12, 0))
    },
    "ROCm": Platform(device="rocm", name="ROCm", num_threads=8, memory_limit_bytes=80 * 2**30, native_bf16=True),
}
_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 8, 128, 16


@dataclass(frozen=True, slots=True)
class Table:
    """A title, its header and its rows."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def run(argv: Sequence[str]) -> int:
    parsed = parse("support", "Show what this build supports, on which platforms.", FLAGS, argv)
    render = _markdown if parsed.command.get("markdown") else _plain
    print("\n\n".join("\n".join(render(table)) for table in tables()))
    return 0


def tables() -> list[Table]:
    return [_models(), _kv_formats()]


def _models() -> Table:
    """Architectures by the module that runs them: families that share one share a row."""
    by_module: dict[str, list[str]] = {}
    for architecture, target in MODELS.items():
        by_module.setdefault(target.partition(":")[0].rpartition(".")[2], []).append(architecture)
    rows = [(", ".join(architectures), f"model_runner/models/{module}.py") for module, architectures in by_module.items()]
    return Table("Models (safetensors folders, hub ids and GGUF files)", ("architecture", "file"), rows)


def _kv_formats() -> Table:
    header = ("--kv-cache-dtype", f"bytes per token and layer, {_KV_HEADS} heads of {_HEAD_DIM}", *PLATFORMS)
    return Table("KV cache formats, and the attention back ends that read them", header, [_kv_row(name) for name in FORMATS])


def _kv_row(name: str) -> list[str]:
    spec = _kv_spec(name)
    num_bytes = sum(plane.bytes for plane in get_format(name).planes(spec)) / _BLOCK_SIZE
    return [name, f"{num_bytes:g}", *(", ".join(_readers(spec, platform)) or "-" for platform in PLATFORMS.values())]


def _readers(spec: KVCacheSpec, platform: Platform) -> Iterator[str]:
    """The back ends that run plain attention over `spec` on `platform`."""
    from halfbyte.kernels.attention.base import AttentionSpec

    layer = AttentionSpec(2 * _KV_HEADS, _KV_HEADS, _HEAD_DIM, _HEAD_DIM, _HEAD_DIM**-0.5)
    if get_format(spec.format).refuse(spec, platform) is not None:
        return
    for name in BACKENDS:
        if get_backend(name).refuse(layer, spec, platform) is None:
            yield name


def _kv_spec(name: str) -> KVCacheSpec:
    return KVCacheSpec(_KV_HEADS, _HEAD_DIM, _HEAD_DIM, _BLOCK_SIZE, None, name)


def _markdown(table: Table) -> Iterator[str]:
    yield f"**{table.title}**"
    yield ""
    for row in (table.header, ["---"] * len(table.header), *table.rows):
        yield f"| {' | '.join(row)} |"


def _plain(table: Table) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]
    yield f"{table.title}:"
    for row in (table.header, *table.rows):
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
