"""Who reads which KV format: for a platform, a back end and a kind of layer a `Reader` or a `Refusal`, and the best of them.

Pure. The answer of a back end is what it and the format themselves say (`refuse`), and for vendors' kernels also what is known
of those (`vendors`); nothing falls back silently. Knows formats and back ends by their registries alone. Called by
`halfbyte support` and `halfbyte kv-plan`; what `auto` takes is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from halfbyte.errors import Refusal, UnsupportedError, UserError
from halfbyte.kernels.attention import BACKENDS, get_backend
from halfbyte.kernels.attention.vendors import VENDORS, LayerFacts, priority, vendor_refusal
from halfbyte.kvcache.formats import get_format
from halfbyte.kvcache.spec import KVCacheSpec
from halfbyte.platform import Platform
from halfbyte.resolve import MLA_RECORD

AUTO = "auto"
_NOTHING: Mapping[str, Refusal] = {}

# The formats that hold the latent of MLA as one plain vector, beside the records made for it.
_MLA_PLAIN = frozenset({"bfloat16", "float16", "float32", "fp8_e4m3"})

Outcome = Literal["reads natively", "reads through our kernels"]


@dataclass(frozen=True, slots=True)
class Reader:
    """A back end that reads a format. is_vendors: its kernels are a vendor's, not ours.

    is_fast: it has a reader made for the format; else the format's law decodes, in PyTorch, what attention then reads.
    """

    backend: str
    is_vendors: bool
    is_fast: bool

    @property
    def outcome(self) -> Outcome:
        return "reads natively" if self.is_vendors else "reads through our kernels"


def read_by(backend: str, platform: Platform, kv_format: str, layer: LayerFacts) -> Reader | Refusal:
    """Whether `backend`, of `BACKENDS` or of `VENDORS`, reads such a layer's cache; `get_format` knows `kv_format`."""
    kv_format = get_format(kv_format).name  # aliases have no rules of their own
    refusal = _kind_refusal(kv_format, layer) or get_format(kv_format).refuse(kv_spec(kv_format, layer), platform)
    if refusal is None and backend in VENDORS:
        refusal = vendor_refusal(backend, platform.architecture, kv_format, layer)
    if refusal is None:
        refusal = _own_refusal(backend, platform, kv_format, layer)
    if refusal is not None:
        return refusal
    return Reader(backend, backend in VENDORS, get_backend(backend).has_reader(kv_format))


def readings(
    platform: Platform, kv_format: str, layers: Sequence[LayerFacts], absent: Mapping[str, Refusal] = _NOTHING
) -> dict[str, Reader | Refusal]:
    """What each back end says of a model with these kinds of layers: the platform's in its order, then all others.

    A back end runs all layers or none. absent: those of the build that the machine cannot run, and why; what a back end cannot
    do anyway is said first.
    """
    found: dict[str, Reader | Refusal] = {}
    preferred = (name for name in priority(platform) if name in BACKENDS)
    for name in dict.fromkeys((*preferred, *BACKENDS, *VENDORS)):
        answers = [read_by(name, platform, kv_format, layer) for layer in layers]
        refusal = next((answer for answer in answers if isinstance(answer, Refusal)), absent.get(name))
        found[name] = answers[0] if refusal is None else refusal
    return found


def select(
    platform: Platform,
    kv_format: str,
    layers: Sequence[LayerFacts],
    asked: str = AUTO,
    absent: Mapping[str, Refusal] = _NOTHING,
) -> Reader:
    """The back end that runs: the one that was asked for, or the best that does not refuse.

    Best: a reader made for the format before one that decodes first, then the platform's `priority`. UnsupportedError with the
    reason of each back end, or of the one that was asked for; UserError for a name that is none.
    """
    return select_for_all(platform, {kv_format: layers}, asked, absent)


def select_for_all(
    platform: Platform,
    layers: Mapping[str, Sequence[LayerFacts]],
    asked: str = AUTO,
    absent: Mapping[str, Refusal] = _NOTHING,
) -> Reader:
    """`select` for a model whose layers, here by their KV format, differ in it: one back end runs them all."""
    by_format = [readings(platform, name, list(dict.fromkeys(each)), absent) for name, each in layers.items()]
    names = [name for name in by_format[0] if asked in (AUTO, name)]
    if not names:
        possible = ", ".join((AUTO, *BACKENDS))
        raise UserError(f"--attention-backend must be one of {possible}, got {asked!r}", param="attention_backend")
    able: dict[str, Reader] = {}
    refused: list[Refusal] = []
    for name in names:
        readers = [answer for found in by_format if isinstance(answer := found[name], Reader)]
        refused += [answer for found in by_format if isinstance(answer := found[name], Refusal)]
        if len(readers) == len(by_format):
            able[name] = min(readers, key=lambda reader: reader.is_fast)  # as slow as its slowest
    reader = best(able)
    if reader is None:
        raise UnsupportedError(*dict.fromkeys(refused))
    return reader


def best(found: Mapping[str, Reader | Refusal]) -> Reader | None:
    """The one that `select` takes."""
    readers = [answer for answer in found.values() if isinstance(answer, Reader)]
    return min(readers, key=lambda reader: not reader.is_fast, default=None)  # the first of equals


def refusals(found: Mapping[str, Reader | Refusal]) -> list[Refusal]:
    """Each reason once: what the format itself refuses, every back end repeats."""
    return list(dict.fromkeys(answer for answer in found.values() if isinstance(answer, Refusal)))


def kv_spec(kv_format: str, layer: LayerFacts) -> KVCacheSpec:
    """The cache of such a layer, as the format itself arranges it."""
    attention = layer.attention
    return KVCacheSpec(
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        head_dim_v=attention.head_dim_v,
        block_size=layer.block_size,
        sliding_window=attention.sliding_window,
        format=kv_format,
        first_tokens=layer.first_tokens,
        first_format=layer.first_format,
    )


def arranged_spec(backend: str, kv_format: str, layer: LayerFacts) -> KVCacheSpec:
    """The same as `backend`, one of the build, arranges it: what gets allocated."""
    spec = kv_spec(kv_format, layer)
    return replace(spec, format=get_backend(backend).arrange(spec))


def _own_refusal(backend: str, platform: Platform, kv_format: str, layer: LayerFacts) -> Refusal | None:
    """What keeps this build from running it."""
    if backend not in BACKENDS:
        return Refusal(f"{backend}: not in this build", f"this build has {', '.join(BACKENDS)}")
    if not layer.is_causal:
        return Refusal(f"{backend}: non-causal not supported", "use a model that generates from left to right")
    return get_backend(backend).refuse(layer.attention, arranged_spec(backend, kv_format, layer), platform)


def _kind_refusal(kv_format: str, layer: LayerFacts) -> Refusal | None:
    """Formats and MLA: a latent needs a record of its own, or a format that keeps one plain vector."""
    is_record = kv_format.endswith(MLA_RECORD)
    if is_record and not layer.is_mla:
        return Refusal(
            f"kv_cache_dtype {kv_format} not supported without MLA: it is a record of one latent", _plain_fix(kv_format)
        )
    if layer.is_mla and not is_record and kv_format not in _MLA_PLAIN:
        return Refusal(
            f"kv_cache_dtype {kv_format} not supported with MLA: a latent needs a record of its own", _record_fix(kv_format)
        )
    return None


def _plain_fix(kv_format: str) -> str:
    return f"use --kv-cache-dtype {kv_format.removesuffix(MLA_RECORD)}"


def _record_fix(kv_format: str) -> str:
    record = "nvfp4_ds_mla" if kv_format.startswith("nvfp4") else "fp8_ds_mla"
    return f"use --kv-cache-dtype {record}"


@dataclass(frozen=True, slots=True)
class ModelRule:
    """For one architecture on some platforms: what `--kv-cache-dtype auto` takes. An explicit value wins over it.

    reason, cost: with figures that were measured with vLLM.
    """

    architecture: str
    platforms: frozenset[str]
    kv_format: str
    reason: str
    cost: str


MODEL_RULES: tuple[ModelRule, ...] = (
    ModelRule(
        architecture="GlmMoeDsaForCausalLM",
        platforms=frozenset({"sm100", "sm103"}),
        kv_format="fp8_e4m3",
        reason="halves the latent cache (458,880 tokens: 40.13 -> 20.69 GiB per GPU); throughput is 2.3 to 5.5 % higher",
        cost="median TTFT is 6.9 to 11.1 % longer (prompts of 8k tokens, 1 to 16 requests at once)",
    ),
)


def model_rule(architecture: str, platform: Platform) -> ModelRule | None:
    """The rule of `MODEL_RULES` that holds for this model here."""
    matching = (rule for rule in MODEL_RULES if rule.architecture == architecture and platform.architecture in rule.platforms)
    return next(matching, None)
