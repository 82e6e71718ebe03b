"""`halfbyte support`: which models, KV formats and attention back ends this build has, and on which platforms they go together.

Everything comes from the registries and from `kernels.attention.selection`, so that the table cannot claim what a start would
refuse. README holds the `--markdown` form; a test compares them. With `--model` it looks at one model's tokenizer and template
instead, without its weights: which structured decisions that can answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from halfbyte.config import EngineOptions
from halfbyte.entrypoints.flag_table import LOG_LEVEL
from halfbyte.entrypoints.flags import Flag, UsageError, parse
from halfbyte.errors import UserError
from halfbyte.kernels.attention import BACKENDS
from halfbyte.kernels.attention.selection import MODEL_RULES, Reader, best, kv_spec, readings, refusals
from halfbyte.kernels.attention.vendors import VENDORS, LayerFacts
from halfbyte.kvcache.formats import FORMATS, get_format, page_bytes
from halfbyte.model_runner.models import ENCODERS, MODELS
from halfbyte.platform import PLATFORM_NAMES, platform_named

FLAGS = (
    Flag(name="markdown", help="as tables for a README", kind="switch"),
    Flag(name="json", help="as JSON, with every refusal", kind="switch"),
    Flag(name="platform", help="what each back end says on this platform", choices=lambda: PLATFORM_NAMES),
    Flag(name="kv-cache-dtype", help="what each back end says of this KV format, or of k:NAME,v:NAME"),
    Flag(name="model", help="which structured decisions this model can answer; its weights are not read"),
    LOG_LEVEL,
)

# The layers that the table is about: (query heads, KV heads, head size of K and of V, tokens per block).
_PLAIN_LAYER = (16, 8, 128, 128, 16)
_MLA_LAYER = (128, 1, 576, 512, 64)

_LEGEND = (
    "N: read natively, by a vendor's kernels; as K where their package is not installed. "
    "K: through our kernels, made for the format. "
    "L: through our kernels, the format's law in PyTorch (`reference`): right, and slow. -: refused. sm: CUDA, gfx: ROCm. "
    "`*_ds_mla` are for models with MLA: one latent of 512 + 64 numbers. "
    "`halfbyte support --platform P --kv-cache-dtype F` says who reads, or why nobody does."
)


@dataclass(frozen=True, slots=True)
class Table:
    """A title, its header, its rows, and what its signs mean."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def run(argv: Sequence[str]) -> int:
    given = parse("support", "Show what this build supports, on which platforms.", FLAGS, argv).command
    forms = [name for name in ("markdown", "json") if given.get(name)]
    asks_for_details = "platform" in given or "kv_cache_dtype" in given
    if "model" in given:
        if asks_for_details or given.get("markdown"):
            raise UsageError("--model is about decisions: leave out --markdown, --platform and --kv-cache-dtype")
        print("\n".join(_decisions(given["model"], as_json=bool(given.get("json")))))
        return 0
    if len(forms) > 1 or (asks_for_details and given.get("markdown")):
        raise UsageError("--markdown is a form of the whole table: leave out --json, --platform and --kv-cache-dtype")
    platforms = [given["platform"]] if "platform" in given else list(PLATFORM_NAMES)
    formats = [_format_name(given["kv_cache_dtype"])] if "kv_cache_dtype" in given else list(FORMATS)
    if given.get("json"):
        print(json.dumps(_as_object(platforms, formats), indent=2))
    elif asks_for_details:
        print("\n\n".join("\n".join(_details(platform, name)) for name in formats for platform in platforms))
    else:
        render = _markdown if given.get("markdown") else _plain
        print("\n\n".join("\n".join(render(table)) for table in tables()))
    return 0


@dataclass(frozen=True, slots=True)
class _Facts:
    """What `Decider` wants to know; a server adds how its engine was started."""

    architecture: str
    logprobs_mode: str = "raw_logprobs"
    batch_invariant: bool = False


def _decisions(model: str, *, as_json: bool) -> Iterator[str]:
    from halfbyte.engine.front import load_front
    from halfbyte.engine.limits import Limits
    from halfbyte.entrypoints.chat_template import ChatTemplate
    from halfbyte.entrypoints.decisions.decider import Decider
    from halfbyte.entrypoints.decisions.settings import DecisionSettings
    from halfbyte.entrypoints.decisions.temperatures import find_temperatures
    from halfbyte.model_runner.decoder_config import config_from_files

    front = load_front(EngineOptions(model=model))
    config = config_from_files(front.files, {})
    limits = Limits(config.vocab_size, config.max_position, max_logprobs=0)
    template = cache(lambda: ChatTemplate.for_tokenizer(front.tokenizer))
    temperatures = find_temperatures(front.files)
    decider = Decider(front.tokenizer, template, limits, _Facts(config.architecture), DecisionSettings(), temperatures)
    if as_json:
        told = {name: value for name, value in msgspec.to_builtins(decider.describe()).items() if name != "repeatable"}
        yield json.dumps({"model": model, "architecture": config.architecture, "decisions": told}, indent=2)
        return
    yield f"structured decisions with {model} ({config.architecture}, reader {decider.reader_name}):"
    for kind, support in decider.support.items():
        temperature = f", temperature {decider.temperatures.of(kind):g}" if temperatures.source else ""
        yield f"  {kind}: {support.refusal or f'{support.max_options} options at most'}{temperature}"


def tables() -> list[Table]:
    return [_models(), _kv_formats(), _vendors(), _model_rules()]


def _format_name(name: str) -> str:
    try:
        return get_format(name).name
    except KeyError:
        raise UserError(f"--kv-cache-dtype must be one of {', '.join(FORMATS)}, got {name!r}", param="kv_cache_dtype") from None


def _models() -> Table:
    """Architectures by the module that runs them: families that share one share a row."""
    by_module: dict[str, list[str]] = {}
    for architecture, target in (MODELS | ENCODERS).items():
        by_module.setdefault(target.partition(":")[0].rpartition(".")[2], []).append(architecture)
    rows = [(", ".join(architectures), f"model_runner/models/{module}.py") for module, architectures in by_module.items()]
    return Table("Models (safetensors folders, hub ids and GGUF files)", ("architecture", "file"), rows)


def _kv_formats() -> Table:
    header = ("--kv-cache-dtype", "bytes", *PLATFORM_NAMES)
    rows = [(name, f"{_bytes_per_token(name):g}", *(_mark(platform, name) for platform in PLATFORM_NAMES)) for name in FORMATS]
    return Table(
        "KV cache formats: bytes per token and layer of 8 heads of 128, and how each platform reads them", header, rows, _LEGEND
    )


def _vendors() -> Table:
    rows = [(name, vendor.title, ", ".join(vendor.reads), _here(name, BACKENDS)) for name, vendor in VENDORS.items()]
    return Table("Vendors' attention kernels whose limits are known", ("name", "kernels", "formats", "here"), rows)


def _model_rules() -> Table:
    header = ("architecture", "here", "platforms", "auto", "why", "cost")
    rows = [
        (rule.architecture, _here(rule.architecture, MODELS), ", ".join(sorted(rule.platforms)), rule.kv_format)
        + (rule.reason, rule.cost)
        for rule in MODEL_RULES
    ]
    return Table("Models whose `--kv-cache-dtype auto` differs (figures: measured with vLLM)", header, rows)


def _here(name: str, registry: Mapping[str, str]) -> str:
    return "yes" if name in registry else "not in this build"


@cache
def _layer(name: str) -> LayerFacts:
    """What the table asks of a format: plain attention, and of a record of MLA's latent, MLA."""
    from halfbyte.kernels.attention.base import AttentionSpec

    is_mla = name.endswith("_ds_mla")
    heads, kv_heads, head_dim, head_dim_v, block_size = _MLA_LAYER if is_mla else _PLAIN_LAYER
    return LayerFacts(AttentionSpec(heads, kv_heads, head_dim, head_dim_v, head_dim**-0.5), block_size, is_mla)


def _readings(platform: str, name: str) -> Mapping[str, Any]:
    return readings(platform_named(platform), name, [_layer(name)])


def _bytes_per_token(name: str) -> float:
    layer = _layer(name)
    return page_bytes(kv_spec(name, layer)) / layer.block_size


def _mark(platform: str, name: str) -> str:
    reader = best(_readings(platform, name))
    if reader is None:
        return "-"
    return "N" if reader.is_vendors else "K" if reader.is_fast else "L"


def _details(platform: str, name: str) -> Iterator[str]:
    """Who reads, and what each back end says."""
    found = _readings(platform, name)
    reader = best(found)
    if reader is None:
        yield f"{name} on {platform}: refused"
        yield from (f"  {refusal}" for refusal in refusals(found))
        return
    yield f"{name} on {platform}: {reader.backend} {reader.outcome}"
    for backend, answer in found.items():
        yield f"  {backend} {answer.outcome}" if isinstance(answer, Reader) else f"  {answer}"


def _as_object(platforms: Sequence[str], formats: Sequence[str]) -> dict[str, Any]:
    return {
        "models": list(MODELS),
        "encoders": list(ENCODERS),
        "backends": list(BACKENDS),
        "kv_formats": {
            name: {
                "bytes_per_token": _bytes_per_token(name),
                "platforms": {platform: _cell_object(platform, name) for platform in platforms},
            }
            for name in formats
        },
        "model_rules": [
            {"architecture": rule.architecture, "platforms": sorted(rule.platforms), "kv_cache_dtype": rule.kv_format}
            | {"reason": rule.reason, "cost": rule.cost}
            for rule in MODEL_RULES
        ],
    }


def _cell_object(platform: str, name: str) -> dict[str, Any]:
    found = _readings(platform, name)
    reader = best(found)
    return {
        "outcome": "refused" if reader is None else reader.outcome,
        "backend": reader and reader.backend,
        "is_fast": reader is not None and reader.is_fast,
        "refusals": [{"reason": refusal.reason, "fix": refusal.fix} for refusal in refusals(found)],
    }


def _markdown(table: Table) -> Iterator[str]:
    yield f"**{table.title}**"
    yield ""
    for row in (table.header, ["---"] * len(table.header), *table.rows):
        yield f"| {' | '.join(row)} |"
    if table.note:
        yield ""
        yield table.note


def _plain(table: Table) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]
    yield f"{table.title}:"
    for row in (table.header, *table.rows):
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if table.note:
        yield f"  {table.note}"
