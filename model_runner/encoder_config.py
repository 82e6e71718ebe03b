"""`EncoderConfig`: what an encoder looks like, in one frozen record: BERT, RoBERTa, DistilBERT, ModernBERT.

Knows how `config.json` spells it. It must not know weights, devices or torch. Called by the start of an engine; the models read
the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfbyte.errors import ModelFileError, Refusal, UnsupportedError, UserError
from halfbyte.model_runner.safetensors_files import stored_dtype
from halfbyte.model_runner.source import ModelFiles, read_json, token_id_list

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_MODEL_TYPES = {
    "Bert": "bert",
    "Roberta": "roberta",
    "XLMRoberta": "xlm-roberta",
    "DistilBert": "distilbert",
    "ModernBert": "modernbert",
}
_DISTILBERT_NAMES = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "activation": "hidden_act",
}
_DTYPES = ("bfloat16", "float16", "float32")
_MAX_SIZE = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """max_position: longest text in tokens. position_offset: what is added to a token's place in the table of positions.
    num_types: kinds of tokens that an embedding tells apart, 0 for none. thetas: rotary bases of full and of local layers, None
    where positions are learned. layer_reaches: how far a layer's tokens see on either side, None: all of the text.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position: int
    hidden_act: str
    norm_eps: float
    checkpoint_dtype: str
    position_offset: int = 0
    num_types: int = 0
    thetas: tuple[float, float] | None = None
    layer_reaches: tuple[int | None, ...] = ()
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    eos_token_ids: tuple[int, ...] = ()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def encoder_config(files: ModelFiles, hf_overrides: Mapping[str, Any]) -> EncoderConfig:
    """UnsupportedError for a feature that this build does not run, ModelFileError for a broken file, UserError for an override
    that the configuration does not know."""
    path = files.path / "config.json"
    raw = read_json(path)
    architecture = str({**raw, **hf_overrides}["architectures"][0])
    family = architecture.removesuffix("Model").removesuffix("ForSequenceClassification")
    values = _filled(str(path), family, raw, hf_overrides)
    values["dtype"] = values.get("dtype") or stored_dtype(files.path) or "float32"
    return _Reader(str(path), architecture, family, values).config()


def _filled(where: str, family: str, raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """With the defaults that transformers gives the family."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[_MODEL_TYPES[family]]
    if unknown := [key for key in overrides if key not in {*raw, *config_class().to_dict()}]:
        raise UserError(f"hf_overrides: the configuration of {family} has no {', '.join(unknown)}", param="hf_overrides")
    given = {key: value for key, value in {**raw, **overrides}.items() if key not in ("model_type", "auto_map")}
    try:
        return dict(config_class(**given).to_dict())
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ModelFileError(f"{where} is not a valid configuration: {' '.join(str(error).split())[:300]}") from None


class _Reader:
    def __init__(self, where: str, architecture: str, family: str, values: dict[str, Any]) -> None:
        self.where = where
        self.architecture = architecture
        self.family = family
        self.values = values
        if family == "DistilBert":
            self.values |= {name: values[own] for own, name in _DISTILBERT_NAMES.items() if own in values}

    def config(self) -> EncoderConfig:
        values, is_modern = self.values, self.family == "ModernBert"
        if values.get("is_decoder") or values.get("add_cross_attention"):
            raise self.refuse("it is set up as a decoder")
        if (kind := values.get("position_embedding_type") or "absolute") != "absolute":
            raise self.refuse(f"position_embedding_type {kind!r} is not supported")
        hidden_size, num_heads = self.count("hidden_size"), self.count("num_attention_heads")
        if hidden_size % num_heads:
            raise ModelFileError(f"{self.where}: hidden_size {hidden_size} does not divide into {num_heads} heads")
        activation = values.get("hidden_activation" if is_modern else "hidden_act")
        if activation not in ACTIVATIONS:
            raise self.refuse(f"activation {activation!r} is not supported, but {', '.join(ACTIVATIONS)}")
        if values["dtype"] not in _DTYPES:
            raise self.refuse(f"weights in {values['dtype']!r} are not supported, but {', '.join(_DTYPES)}")
        offset = values["pad_token_id"] + 1 if "Roberta" in self.family else 0
        positions = self.count("max_position_embeddings")
        if positions <= offset:
            raise ModelFileError(f"{self.where}: max_position_embeddings {positions} leaves none after the first {offset}")
        return EncoderConfig(
            architecture=self.architecture,
            vocab_size=self.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.count("intermediate_size"),
            num_layers=self.count("num_hidden_layers"),
            num_heads=num_heads,
            max_position=positions - offset,
            hidden_act=ACTIVATIONS[activation],
            norm_eps=float(values.get("norm_eps" if is_modern else "layer_norm_eps", 1e-12)),
            checkpoint_dtype=values["dtype"],
            position_offset=offset,
            num_types=0 if is_modern or self.family == "DistilBert" else self.count("type_vocab_size"),
            eos_token_ids=token_id_list(values.get("eos_token_id")),
            **(self.modern() if is_modern else {}),
        )

    def modern(self) -> dict[str, Any]:
        """What ModernBERT has and the others have not."""
        values = self.values
        kinds, ropes = values["layer_types"], values["rope_parameters"]
        reach = self.count("local_attention") // 2
        thetas = []
        for name in ("full_attention", "sliding_attention"):
            if (scaling := ropes[name].get("rope_type", "default")) != "default":
                raise self.refuse(f"rotary scaling {scaling!r} is not supported")
            thetas.append(float(ropes[name]["rope_theta"]))
        return {
            "thetas": tuple(thetas),
            "layer_reaches": tuple(reach if kind == "sliding_attention" else None for kind in kinds),
            **{name: bool(values[name]) for name in ("attention_bias", "mlp_bias", "norm_bias")},
        }

    def count(self, name: str) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_SIZE:
            raise ModelFileError(f"{self.where}: {name} must be an integer from 1 to {_MAX_SIZE}, got {value!r}")
        return value

    def refuse(self, reason: str) -> UnsupportedError:
        return UnsupportedError(Refusal(f"{self.where}: {reason}", ""))
