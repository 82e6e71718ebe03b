"""The KV cache of a model before any weight is read: its formats, who reads them, and how the layers share blocks.

Knows configurations and registries; no weights and no memory. Called at start (`halfbyte.engine.build`) and by
`halfbyte kv-plan`, so that what is planned is what gets allocated. Imports torch when it is called, with the formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from halfbyte.config import EngineConfig, EngineOptions
from halfbyte.errors import Refusal, UnsupportedError
from halfbyte.kernels.attention.selection import AUTO, Reader, arranged_spec, model_rule, read_by, select_for_all
from halfbyte.kernels.attention.vendors import LayerFacts
from halfbyte.kvcache.formats import get_format, page_bytes
from halfbyte.kvcache.spec import KVLayout, make_layout
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.kv_scheme import KVScheme, kv_scheme
from halfbyte.model_runner.source import ModelFiles, read_json, read_optional_json
from halfbyte.platform import Platform
from halfbyte.resolve import ModelFacts


def model_facts(options: EngineOptions, files: ModelFiles, decoder: DecoderConfig, platform: Platform) -> ModelFacts:
    """What `resolve` has to know of the model. Where no format is asked for, that of its scales counts, else its rule.

    UnsupportedError when these scales are of a kind that no format reads.
    """
    takes_auto = options.kv_cache_dtype == AUTO and options.kv_cache_plan is None
    scheme = checkpoint_scheme(files) if takes_auto else None
    rule = model_rule(decoder.architecture, platform) if takes_auto else None
    kv_format, origin = (None, "default") if rule is None else (rule.kv_format, rule_origin(decoder))
    return ModelFacts(
        architecture=decoder.architecture,
        dtype=decoder.checkpoint_dtype,
        max_position=decoder.max_position,
        vocab_size=decoder.vocab_size,
        layer_windows=tuple(decoder.layer_windows),
        kv_format=kv_format if scheme is None else scheme.kv_format,
        kv_origin=origin if scheme is None else "checkpoint",
    )


def rule_origin(decoder: DecoderConfig) -> str:
    """Where a format comes from that a `ModelRule` names."""
    return f"rule for {decoder.architecture}"


def checkpoint_scheme(files: ModelFiles) -> KVScheme | None:
    """What a Hugging Face folder says of its KV cache."""
    if files.kind != "hf":
        return None
    return kv_scheme(read_json(files.path / "config.json"), read_optional_json(files.path / "hf_quant_config.json"))


def choose_backend(
    config: EngineConfig,
    files: ModelFiles,
    decoder: DecoderConfig,
    platform: Platform,
    asked: str,
    absent: Mapping[str, Refusal] = MappingProxyType({}),
) -> Reader:
    """The best back end, or the one that was asked for, if it reads each layer in its format. absent: those that cannot run.

    UnsupportedError with every reason, also when a format would misread the scales of the checkpoint.
    """
    _refuse_misread_scales(files, config.cache.layer_dtypes)
    layers: dict[str, list[LayerFacts]] = {}
    for name, layer in _layers(config, decoder):
        layers.setdefault(name, []).append(layer)
    return select_for_all(platform, layers, asked, absent)


def backend_refusals(config: EngineConfig, decoder: DecoderConfig, platform: Platform, backend: str) -> list[Refusal]:
    """Why this back end does not run the model."""
    answers = [read_by(backend, platform, *layer) for layer in dict.fromkeys(_layers(config, decoder))]
    return list(dict.fromkeys(answer for answer in answers if isinstance(answer, Refusal)))


def kv_layout(config: EngineConfig, decoder: DecoderConfig) -> KVLayout:
    """As the attention back end of `config` arranges it. UnsupportedError when a block holds none of the first tokens."""
    specs = [arranged_spec(config.attention_backend, name, layer) for name, layer in _layers(config, decoder)]
    return make_layout(specs, page_bytes)


def _layers(config: EngineConfig, decoder: DecoderConfig) -> list[tuple[str, LayerFacts]]:
    """The format of each layer, and what the layer asks of a back end."""
    from halfbyte.model_runner.layers.attention import attention_spec
    from halfbyte.model_runner.runner import first_tokens

    return [
        (
            name,
            LayerFacts(
                attention_spec(decoder, index),
                config.cache.block_size,
                first_tokens=first_tokens(config),
                first_format=config.model.dtype,
            ),
        )
        for index, name in enumerate(config.cache.layer_dtypes)
    ]


def _refuse_misread_scales(files: ModelFiles, names: Sequence[str]) -> None:
    """The checkpoint's scheme is looked at only where a format reads its scales: others run whatever it says."""
    codecs = {side.codec.name for name in names for side in get_format(name).sides or () if side.codec.uses_scale}
    scheme = checkpoint_scheme(files) if codecs else None
    if scheme is not None and (misread := [refusal for name in sorted(codecs) if (refusal := scheme.refuse(name))]):
        raise UnsupportedError(*misread)
