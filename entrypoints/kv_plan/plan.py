"""The arithmetic of `halfbyte kv-plan`: of each KV format its bytes and what a memory makes of them, or why it is refused.

No byte formula stands here: bytes are those of the format's planes, blocks and tokens those that the engine would allocate and
report (`engine.kv_layout`, `size_cache`), readers those that it would take. Imports torch when it is called, with the formats
and back ends. Must not know how a plan is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from halfbyte.config import EngineConfig, EngineOptions
from halfbyte.engine.kv_layout import choose_backend, kv_layout, model_facts, rule_origin
from halfbyte.errors import CapacityError, Refusal, UnsupportedError
from halfbyte.kernels.attention import BACKENDS
from halfbyte.kernels.attention.selection import Reader, model_rule
from halfbyte.kvcache.formats import FORMATS, get_format, page_bytes
from halfbyte.kvcache.sizing import KVCapacity, blocks_for_request, size_cache
from halfbyte.kvcache.spec import KVCacheSpec, KVLayout
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.source import ModelFiles
from halfbyte.platform import Platform
from halfbyte.resolve import AUTO_FIT, kv_cache_dtype_refusal, resolve


@dataclass(frozen=True, slots=True)
class Roofline:
    """A decode step reads all weights and the K and V of `batch_size` contexts: no machine of this speed makes tokens faster."""

    bytes_per_s: float
    weight_bytes: int
    batch_size: int
    context: int


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned for. config: what the engine would make of `options`. memory_bytes: of the KV cache alone."""

    options: EngineOptions
    files: ModelFiles
    decoder: DecoderConfig
    platform: Platform
    config: EngineConfig
    memory_bytes: int | None = None
    roofline: Roofline | None = None


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers with equal caches. bytes_per_token: of one of them, scales and padding included."""

    sliding_window: int | None
    num_layers: int
    bytes_per_token: Fraction


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """One format that the platform accepts for this model.

    tokens_by_bytes: memory / bytes per token, whatever blocks and windows are. capacity: what the engine would allocate and
    report; None without a memory, or when `too_small` says why nothing can be served. max_tokens_per_s: the roofline's; None
    when it is not asked for, or when `batch_too_large`.
    """

    name: str
    reader: Reader
    kinds: tuple[LayerKind, ...]
    block_bytes: int
    tokens_by_bytes: int | None
    capacity: KVCapacity | None
    too_small: str | None
    max_tokens_per_s: float | None
    batch_too_large: bool

    @property
    def bytes_per_token(self) -> Fraction:
        """Of all layers."""
        return sum((kind.num_layers * kind.bytes_per_token for kind in self.kinds), Fraction())


@dataclass(frozen=True, slots=True)
class RefusedFormat:
    """A format that no back end reads here, with every reason."""

    name: str
    refusals: tuple[Refusal, ...]


def resolved(options: EngineOptions, files: ModelFiles, decoder: DecoderConfig, platform: Platform) -> EngineConfig:
    """What the engine would make of these options on that platform. UserError as at a start."""
    facts = model_facts(options, files, decoder, platform)
    return resolve(options, facts, platform, kv_formats=tuple(FORMATS), attention_backends=tuple(BACKENDS))


def longest_context(config: EngineConfig, decoder: DecoderConfig) -> int:
    """The tokens of a full-length request; where that is fitted to the memory, of the model's longest."""
    return decoder.max_position if config.model.max_model_len == AUTO_FIT else config.model.max_model_len


def auto_format(question: Question) -> tuple[str, str]:
    """What `--kv-cache-dtype auto` takes, and why."""
    name, origin = question.config.cache.kv_cache_dtype, question.config.origins["kv_cache_dtype"]
    rule = model_rule(question.decoder.architecture, question.platform)
    if rule is not None and origin == rule_origin(question.decoder):
        return name, f"{rule.reason}; {rule.cost}"
    return name, f"from the {origin}"


def plan_format(name: str, question: Question) -> FormatPlan | RefusedFormat:
    """UserError when there is no such format anywhere."""
    try:
        name = get_format(name).name
    except KeyError:
        refusal = kv_cache_dtype_refusal(name, tuple(FORMATS))
        return RefusedFormat(name, (refusal,) if refusal is not None else ())
    options, files, decoder, platform = question.options, question.files, question.decoder, question.platform
    config = resolved(replace(options, kv_cache_dtype=name), files, decoder, platform)
    try:
        reader = choose_backend(config, files, decoder, platform, options.attention_backend)
        layout = kv_layout(replace(config, attention_backend=reader.backend), decoder)
    except UnsupportedError as error:
        return RefusedFormat(name, error.refusals)
    kinds = _kinds(layout.specs)
    capacity, too_small = _capacity(layout, question)
    fits = capacity is None or question.roofline is None or _batch_fits(capacity, question, question.roofline)
    return FormatPlan(
        name=name,
        reader=reader,
        kinds=kinds,
        block_bytes=layout.block_bytes,
        tokens_by_bytes=_tokens_by_bytes(kinds, question),
        capacity=capacity,
        too_small=too_small,
        max_tokens_per_s=_max_tokens_per_s(kinds, question.roofline) if fits and too_small is None else None,
        batch_too_large=not fits,
    )


def _kinds(specs: Sequence[KVCacheSpec]) -> tuple[LayerKind, ...]:
    """In the order of their first layers."""
    counts: dict[KVCacheSpec, int] = {}
    for spec in specs:
        counts[spec] = counts.get(spec, 0) + 1
    return tuple(
        LayerKind(spec.sliding_window, count, Fraction(page_bytes(spec), spec.block_size)) for spec, count in counts.items()
    )


def _tokens_by_bytes(kinds: Sequence[LayerKind], question: Question) -> int | None:
    per_token = sum((kind.num_layers * kind.bytes_per_token for kind in kinds), Fraction())
    return None if question.memory_bytes is None else int(question.memory_bytes / per_token)


def _capacity(layout: KVLayout, question: Question) -> tuple[KVCapacity | None, str | None]:
    """The engine's capacity, or why it could not start."""
    if question.memory_bytes is None:
        return None, None
    length, budget = question.config.model.max_model_len, question.config.scheduler.max_num_batched_tokens
    try:
        capacity = size_cache(layout, question.memory_bytes, length, question.decoder.max_position, budget)
    except CapacityError as error:
        return None, str(error)
    return capacity, None


def _batch_fits(capacity: KVCapacity, question: Question, roofline: Roofline) -> bool:
    """Whether that many requests of that context find room at once."""
    budget = question.config.scheduler.max_num_batched_tokens
    blocks = blocks_for_request(capacity.layout, roofline.context, budget)
    return roofline.batch_size * blocks <= capacity.num_blocks - 1


def _max_tokens_per_s(kinds: Sequence[LayerKind], roofline: Roofline | None) -> float | None:
    """batch / (weight bytes + batch x KV bytes of a context) x bandwidth; layers with a window read no more than that."""
    if roofline is None:
        return None
    context_bytes = Fraction()
    for kind in kinds:
        num_keys = roofline.context if kind.sliding_window is None else min(roofline.context, kind.sliding_window)
        context_bytes += kind.num_layers * num_keys * kind.bytes_per_token
    step_bytes = roofline.weight_bytes + roofline.batch_size * context_bytes
    return float(roofline.batch_size * Fraction(roofline.bytes_per_s) / step_bytes)
