"""`DecoderConfig`: what a decoder-only model looks like, in one frozen record, whatever file it came from.

Knows how `config.json` and GGUF metadata spell the same facts, and which architectures this build runs. It must not know
weights, devices or torch. Called by the loader and the models (which read only the record) and by the engine's start-up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from halfbyte.errors import ModelFileError, Refusal, UnsupportedError, UserError
from halfbyte.model_runner.kv_scheme import quantizes_only_kv
from halfbyte.model_runner.models import ENCODERS
from halfbyte.model_runner.safetensors_files import stored_dtype
from halfbyte.model_runner.source import ModelFiles, read_json, read_optional_json, token_id_list


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one kind of layer, rotate-half layout (the first half of the head pairs with the second).

    scaling: None for plain rotary, else a mapping with "rope_type" in linear, dynamic, yarn, llama3, "factor", and the
    type's own keys as `config.json` names them; "original_max_position_embeddings" is always present for dynamic, yarn and
    llama3, and "max_position_embeddings" for all.
    """

    theta: float
    scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape and the constants of a decoder.

    architecture: a key of `models.MODELS`. layer_windows[i]: None, or w: a query at position p of layer i sees the keys
    p - w + 1 .. p. Layers with a window use `local_rope` where it is set, every other layer `rope`.
    attention_scale multiplies q . k. embed_scale multiplies the embeddings after it is rounded to the model dtype
    (1.0: no scaling). A soft cap c maps x to c * tanh(x / c). attention_bias is for q, k and v, output_bias for o.
    hidden_act: "silu" or "gelu_pytorch_tanh" (gate activation). norm_unit_offset: checkpoints store w for a norm that
    multiplies by 1 + w. reads_both_ways: tokens see those after them, too, so that it only pools; a window w is then one to each
    side. max_position: longest context in tokens. checkpoint_dtype: float32, float16 or bfloat16.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    layer_windows: tuple[int | None, ...] = ()
    attention_scale: float = 1.0
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_unit_offset: bool = False
    hidden_act: str = "silu"
    tie_embeddings: bool = False
    embed_scale: float = 1.0
    checkpoint_dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    reads_both_ways: bool = False


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture fixes that its configuration does not say. None: the configuration says it."""

    model_type: str
    attention_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    norm_unit_offset: bool = False
    scales_embeddings: bool = False
    windows: Literal["none", "all", "by_type"] = "none"
    # Whether max_position_embeddings is the length before rotary scaling, as for everyone but Gemma 3.
    scaled_length: bool = True


_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family("llama", mlp_bias=None),
    "MistralForCausalLM": _Family("mistral", attention_bias=False, output_bias=False, windows="all"),
    "Qwen2ForCausalLM": _Family("qwen2", attention_bias=True, output_bias=False, windows="by_type"),
    "Qwen3ForCausalLM": _Family("qwen3", qk_norm=True, windows="by_type"),
}
_FAMILIES["Gemma3ForCausalLM"] = _FAMILIES["Gemma3TextModel"] = _Family(
    "gemma3_text", qk_norm=True, norm_unit_offset=True, scales_embeddings=True, windows="by_type", scaled_length=False
)

# The same layers without a head, or with a classifier's: models that pool.
POOLING_ARCHITECTURES: dict[str, str] = {
    f"{family}{ending}": f"{family}ForCausalLM"
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
    for ending in ("Model", "ForSequenceClassification")
}

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh", "gelu_new": "gelu_pytorch_tanh"}
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
_DTYPES = ("bfloat16", "float16", "float32")
_ROPE_OVERRIDES = ("rope_scaling", "rope_theta", "rope_parameters")
_MAX_SIZE = 1 << 31
_MAX_LAYERS = 10_000


def config_from_files(
    files: ModelFiles, hf_overrides: Mapping[str, Any] | None = None, *, may_read_both_ways: bool = False
) -> DecoderConfig:
    """The configuration of a located model. hf_overrides: keys as `config.json` spells them, for GGUF files too.

    may_read_both_ways: whether the model is to pool without a cache.

    UnsupportedError for an architecture or a feature that this build does not run, ModelFileError for a broken file,
    UserError for an override that the configuration does not know.
    """
    overrides = hf_overrides or {}
    if files.kind == "gguf":
        from halfbyte.model_runner.gguf_config import config_values

        stored = config_values(files.path)
        known = (*stored, *_ROPE_OVERRIDES)
        _refuse_unknown([key for key in overrides if key not in known], stored["architectures"][0])
        values = _with_overrides(stored, overrides)
        return _Reader(str(files.path), values).config(token_id_list(values.get("eos_token_id")))
    path = files.path / "config.json"
    values = _fill_defaults(path, read_json(path), overrides)
    if values.get("dtype") is None:
        values["dtype"] = stored_dtype(files.path) or "float32"
    generation = read_optional_json(files.path / "generation_config.json")
    eos = (*token_id_list(values.get("eos_token_id")), *token_id_list(generation.get("eos_token_id")))
    config = _Reader(str(path), values).config(tuple(dict.fromkeys(eos)))
    if config.reads_both_ways and not may_read_both_ways:
        raise UnsupportedError(Refusal(f"{path}: a model with bidirectional attention does not generate", "use --runner pooling"))
    return config


def _fill_defaults(path: Path, raw: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` with the defaults that transformers gives this architecture. No code of the model is ever run."""
    merged = _with_overrides(raw, overrides)
    architecture = _architecture(path, merged)
    for key in ("quantization_config", "compression_config"):
        if isinstance(merged.get(key), dict) and quantizes_only_kv(merged[key]):
            del merged[key]
        elif merged.get(key):
            method = merged[key].get("quant_method", "unknown") if isinstance(merged[key], dict) else "unknown"
            raise UnsupportedError(
                Refusal(f"{path}: weights quantised as {method!r} cannot be loaded", "use an unquantised checkpoint")
            )
    kinds = merged.get("layer_types")
    if _FAMILIES[architecture].windows == "all" and isinstance(kinds, list) and len(set(map(str, kinds))) > 1:
        raise UnsupportedError(Refusal(f"{path}: {architecture} with layers of different types is not supported", ""))
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[_FAMILIES[architecture].model_type]
    known = {*raw, *config_class().to_dict(), *_ROPE_OVERRIDES, "torch_dtype"} if overrides else set(merged)
    _refuse_unknown([key for key in overrides if key not in known], architecture)
    given = {key: value for key, value in merged.items() if key not in ("model_type", "auto_map", "trust_remote_code")}
    try:
        filled: dict[str, Any] = config_class(**given).to_dict()
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ModelFileError(f"{path} is not a valid configuration: {' '.join(str(error).split())[:300]}") from None
    filled["architectures"] = [architecture]
    return filled


def _architecture(path: Path, values: Mapping[str, Any]) -> str:
    """The first architecture that is named, or the usual one of the model type."""
    named = values.get("architectures")
    found = named[0] if isinstance(named, list) and named else None
    if found is None:
        by_type = {family.model_type: name for name, family in reversed(_FAMILIES.items())}
        found = by_type.get(str(values.get("model_type")), values.get("model_type"))
    found = POOLING_ARCHITECTURES.get(str(found), found)
    if found in _FAMILIES:
        return str(found)
    if found is None:
        raise ModelFileError(f"{path} names neither an architecture nor a model_type")
    hint = " (its text-only form, Gemma3ForCausalLM, is)" if found == "Gemma3ForConditionalGeneration" else ""
    raise UnsupportedError(
        Refusal(
            f"{path}: architecture {found} is not supported{hint}",
            f"supported are {', '.join(_FAMILIES)}; for pooling also {', '.join((*POOLING_ARCHITECTURES, *ENCODERS))}",
        )
    )


def _refuse_unknown(unknown: list[str], architecture: str) -> None:
    if unknown:
        raise UserError(f"hf_overrides: the configuration of {architecture} has no {', '.join(unknown)}", param="hf_overrides")


def _with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with `overrides` on top; objects are merged. Both spellings of rotary settings reach the one that is in force."""
    merged = _merge(raw, {key: value for key, value in overrides.items() if key not in _ROPE_OVERRIDES})
    current = raw.get("rope_parameters")
    if not isinstance(current, dict):
        merged.update({key: overrides[key] for key in _ROPE_OVERRIDES if key in overrides})
        if "rope_parameters" in overrides:
            merged.pop("rope_scaling", None)
        return merged
    merged["rope_parameters"] = current = _merge(current, overrides.get("rope_parameters") or {})
    full = current["full_attention"] if isinstance(current.get("full_attention"), dict) else current
    if "rope_scaling" in overrides:
        theta = full.get("rope_theta")
        full.clear()
        full.update(overrides["rope_scaling"] or {"rope_type": "default"}, rope_theta=theta)
    if "rope_theta" in overrides:
        full["rope_theta"] = overrides["rope_theta"]
    return merged


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = {key: _merge(value, {}) if isinstance(value, dict) else value for key, value in below.items()}
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


class _Reader:
    """Reads a complete configuration in `config.json` spelling, and says which key of which file is wrong."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = values
        self.architecture: str = values["architectures"][0]
        self.family = _FAMILIES[self.architecture]

    def fail(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: {message}")

    def refuse(self, reason: str, fix: str = "") -> UnsupportedError:
        return UnsupportedError(Refusal(f"{self.where}: {reason}", fix))

    def integer(self, key: str, high: int = _MAX_SIZE) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise self.fail(f"{key} must be an integer from 1 to {high}, got {value!r}")
        return value

    def number(self, values: Mapping[str, Any], key: str, low: float = 0.0) -> float:
        value = values.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= low:
            raise self.fail(f"{key} must be a number greater than {low}, got {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(self.values, key)

    def config(self, eos_token_ids: tuple[int, ...]) -> DecoderConfig:
        v, family = self.values, self.family
        hidden_size, num_heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads")
        head_dim = self.integer("head_dim") if v.get("head_dim") is not None else hidden_size // num_heads
        if num_heads % num_kv_heads or head_dim % 2 or head_dim == 0:
            raise self.fail(f"{num_heads} heads of dimension {head_dim} on {num_kv_heads} key/value heads do not fit together")
        rope, local_rope = self.ropes()
        windows = self.windows(has_local_rope=local_rope is not None)
        scalar = self.number(v, "query_pre_attn_scalar") if v.get("query_pre_attn_scalar") is not None else float(head_dim)
        attention_bias = bool(v.get("attention_bias")) if family.attention_bias is None else family.attention_bias
        output_bias = v.get("output_bias", attention_bias) if family.output_bias is None else family.output_bias
        bos = v.get("bos_token_id")
        return DecoderConfig(
            architecture=self.architecture,
            vocab_size=self.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.integer("intermediate_size"),
            num_layers=len(windows),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=self.max_position(rope),
            rms_norm_eps=self.number(v, "rms_norm_eps"),
            rope=rope,
            local_rope=local_rope,
            layer_windows=windows,
            attention_scale=scalar**-0.5,
            attn_soft_cap=self.optional_number("attn_logit_softcapping"),
            final_soft_cap=self.optional_number("final_logit_softcapping"),
            attention_bias=attention_bias,
            output_bias=bool(output_bias),
            mlp_bias=bool(v.get("mlp_bias")) if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            norm_unit_offset=family.norm_unit_offset,
            hidden_act=self.activation(),
            tie_embeddings=bool(v.get("tie_word_embeddings")),
            embed_scale=hidden_size**0.5 if family.scales_embeddings else 1.0,
            checkpoint_dtype=self.dtype(),
            eos_token_ids=eos_token_ids,
            bos_token_id=bos if isinstance(bos, int) else None,
            reads_both_ways=self.reads_both_ways,
        )

    @property
    def reads_both_ways(self) -> bool:
        asked = bool(self.values.get("use_bidirectional_attention"))
        if asked and self.family.model_type != "gemma3_text":
            raise self.refuse("bidirectional attention is not supported for this family")
        return asked

    def activation(self) -> str:
        name = self.values.get("hidden_activation") or self.values.get("hidden_act")
        if name not in _ACTIVATIONS:
            raise self.refuse(f"activation {name!r} is not supported", f"supported are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def dtype(self) -> str:
        name = self.values.get("dtype")
        if name not in _DTYPES:
            raise self.refuse(f"weights in {name!r} are not supported", f"supported are {', '.join(_DTYPES)}")
        return str(name)

    def windows(self, *, has_local_rope: bool) -> tuple[int | None, ...]:
        num_layers = self.integer("num_hidden_layers", _MAX_LAYERS)
        window = self.values.get("sliding_window")
        if self.family.windows == "none":
            return (None,) * num_layers
        if window is not None:
            window = self.integer("sliding_window")
            window = window // 2 + 1 if self.reads_both_ways else window
        if self.family.windows == "all":
            return (window,) * num_layers
        kinds = self.values.get("layer_types")
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise self.fail(f"layer_types must be a list of {num_layers} entries, one per layer")
        if other := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
            raise self.refuse(f"layers of type {other[0]!r} are not supported")
        if window is None and has_local_rope and "sliding_attention" in kinds:
            raise self.fail("layers of type sliding_attention need a sliding_window")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def ropes(self) -> tuple[RopeConfig, RopeConfig | None]:
        """(of full layers, of sliding layers where they differ)."""
        parameters = self.values.get("rope_parameters")
        if not isinstance(parameters, Mapping):
            raise self.fail(f"rope_parameters must be an object, got {parameters!r}")
        if "full_attention" not in parameters:
            return self.rope(parameters), None
        full, sliding = self.rope(parameters["full_attention"]), parameters.get("sliding_attention")
        return full, None if sliding is None else self.rope(sliding)

    def rope(self, parameters: Any) -> RopeConfig:
        if not isinstance(parameters, Mapping):
            raise self.fail(f"rope_parameters must hold objects, got {parameters!r}")
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if kind not in _ROPE_TYPES:
            raise self.refuse(f"rotary scaling {kind!r} is not supported", f"supported are {', '.join(_ROPE_TYPES)}")
        theta = self.number(parameters, "rope_theta")
        factor = parameters.get("partial_rotary_factor")
        partial = 1.0 if factor is None else self.number(parameters, "partial_rotary_factor")
        if kind == "default":
            return RopeConfig(theta=theta, partial_rotary_factor=partial)
        longest = self.integer("max_position_embeddings")
        scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", "type", "partial_rotary_factor")}
        scaling |= {"rope_type": kind, "max_position_embeddings": longest}
        if kind == "dynamic":
            scaling["original_max_position_embeddings"] = longest
        elif kind != "linear":
            scaling.setdefault("original_max_position_embeddings", longest)
            self.number(scaling, "original_max_position_embeddings")
        if kind != "yarn" or scaling.get("factor") is not None:
            scaling["factor"] = self.number(scaling, "factor")
        if kind == "llama3" and self.number(scaling, "high_freq_factor") <= self.number(scaling, "low_freq_factor"):
            raise self.fail("high_freq_factor must be greater than low_freq_factor")
        return RopeConfig(theta=theta, scaling=scaling, partial_rotary_factor=partial)

    def max_position(self, rope: RopeConfig) -> int:
        """The longest context: rotary scaling stretches what the configuration states, unless that is the result already."""
        longest = self.integer("max_position_embeddings")
        scaling = rope.scaling
        if scaling is None or not self.family.scaled_length or scaling["rope_type"] == "llama3" or scaling.get("factor") is None:
            return longest
        base = scaling["original_max_position_embeddings"] if scaling["rope_type"] == "yarn" else longest
        return max(longest, int(base * scaling["factor"]))
