"""What a checkpoint asks of the KV cache: the format that its scales were calibrated for, as `config.json` says it.

Knows how llm-compressor and ModelOpt write that down, and refuses by name what else they can write. It must not know tensors,
devices or torch. Called at start-up, before anything is loaded: by `--kv-cache-dtype auto`, which takes the format, and for
every format that reads the checkpoint's scales, which `KVScheme.refuse` may forbid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from halfbyte.errors import Refusal, UnsupportedError

Method = Literal["llm-compressor", "ModelOpt"]
Strategy = Literal["tensor", "attn_head"]

_KV_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
_MODELOPT_ALGORITHMS = {"FP8": "fp8_e4m3", "NVFP4": "nvfp4"}
_STRATEGIES: tuple[Strategy, ...] = ("tensor", "attn_head")
_NVFP4_BLOCK = 16
# Formats that would misread the scales of another. An nvfp4 scale is amax / (6 * 448), under which 8-bit numbers saturate.
_MISREADS = {"fp8_e4m3": ("fp8_e5m2",), "nvfp4": ("fp8_e4m3", "fp8_e5m2")}
_FIX = "pass a --kv-cache-dtype that needs no scales of the checkpoint, such as bfloat16"


@dataclass(frozen=True, slots=True)
class KVScheme:
    """kv_format: a KV format. strategy: whether a scale is of a layer or of a kv head. source: where it stands, for the log."""

    kv_format: str
    strategy: Strategy
    source: str

    def __str__(self) -> str:
        per = "kv head" if self.strategy == "attn_head" else "layer"
        return f"{self.kv_format}, a scale per {per} ({self.source})"

    def refuse(self, kv_format: str) -> Refusal | None:
        """Why `kv_format`, one that reads the checkpoint's scales, cannot read these; None when it can."""
        if kv_format not in _MISREADS[self.kv_format]:
            return None
        reason = f"the checkpoint's KV scales are for {self.kv_format} ({self.source}), {kv_format} would misread them"
        return Refusal(reason, f"use --kv-cache-dtype {self.kv_format} or bfloat16")


def kv_scheme(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None = None) -> KVScheme | None:
    """The scheme in `config.json` and in ModelOpt's `hf_quant_config.json`; None when neither asks for anything.

    UnsupportedError for a scheme that no format here implements, and for two that differ.
    """
    schemes = [_read(*request) for request in _requests(config, hf_quant_config or {})]
    for other in schemes[1:]:
        if (other.kv_format, other.strategy) != (schemes[0].kv_format, schemes[0].strategy):
            raise _refused(f"the checkpoint asks for two KV caches: {schemes[0]} and {other}")
    return schemes[0] if schemes else None


def quantizes_only_kv(quantization: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` leaves weights and the inputs of linear layers alone, so that they load as if it were not.

    A group that gives attention itself an input scheme is about queries, which stay as they are.
    """
    sections = _sections(quantization)
    touches_more = any(section.get(key) for section in sections for key in ("quant_algo", "sparsity_config", "transform_config"))
    if touches_more or _method(quantization) is None:
        return False
    groups = quantization.get("config_groups") or {}
    asks_for_kv = any(section.get(key) is not None for section in sections for key in _KV_KEYS)
    return asks_for_kv and isinstance(groups, Mapping) and all(map(_is_about_attention, groups.values()))


def _is_about_attention(group: Any) -> bool:
    if not isinstance(group, Mapping) or group.get("weights") or group.get("output_activations"):
        return False
    targets = group.get("targets")
    return isinstance(targets, list) and all(str(target).endswith("Attention") for target in targets)


def _method(quantization: Mapping[str, Any]) -> Method | None:
    """Whose words these are; None when it is nobody known here."""
    name = quantization.get("quant_method")
    if isinstance(name, str) and name.startswith("modelopt"):
        return "ModelOpt"
    return "llm-compressor" if name == "compressed-tensors" else None


def _sections(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """ModelOpt nests its settings under `quantization`, or does not."""
    nested = quantization.get("quantization")
    return [quantization, nested] if isinstance(nested, Mapping) else [quantization]


def _requests(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """(where it stands, the settings around it, value) of everything that is said about the KV cache."""
    places = {f"config.json: {key}": config.get(key) for key in ("quantization_config", "compression_config")}
    places["hf_quant_config.json"] = {**hf_quant_config, "quant_method": "modelopt"}
    for place, quantization in places.items():
        if isinstance(quantization, Mapping):
            for section in _sections(quantization):
                yield from ((f"{place}.{key}", quantization, section[key]) for key in _KV_KEYS if section.get(key) is not None)


def _read(where: str, quantization: Mapping[str, Any], value: Any) -> KVScheme:
    method = _method(quantization)
    if method is None:
        raise _refused(f"{where} {value!r} of quant_method {quantization.get('quant_method')!r} is not supported")
    source = f"{where}, {method}"
    if isinstance(value, Mapping):
        return KVScheme(_format(where, value, has_4_bits=method == "ModelOpt"), _strategy(where, value), source)
    if method == "ModelOpt" and isinstance(value, str) and value in _MODELOPT_ALGORITHMS:
        return KVScheme(_MODELOPT_ALGORITHMS[value], "tensor", source)
    supported = " and ".join(_MODELOPT_ALGORITHMS) if method == "ModelOpt" else "an object"
    raise _refused(f"{where} {value!r} is not supported, only {supported}")


def _format(where: str, scheme: Mapping[str, Any], *, has_4_bits: bool) -> str:
    """The format of a scheme that is an object. has_4_bits: whether 4-bit floats mean nvfp4, of which ModelOpt alone is known."""
    if scheme.get("dynamic"):
        raise _refused(f"{where}: dynamic scales are not supported, only those that the checkpoint holds")
    if not scheme.get("symmetric", True):
        raise _refused(f"{where}: asymmetric numbers are not supported, only those without a zero point")
    kind, num_bits, group_size = scheme.get("type"), scheme.get("num_bits"), scheme.get("group_size")
    if (kind, num_bits, group_size) == ("float", 8, None):
        return "fp8_e4m3"
    if has_4_bits and kind == "float" and num_bits == 4 and group_size in (None, _NVFP4_BLOCK):
        return "nvfp4"
    found = f"type {kind!r}, num_bits {num_bits!r}" + ("" if group_size is None else f", group_size {group_size!r}")
    supported = f"float of 8 bits, and of 4 bits in groups of {_NVFP4_BLOCK}" if has_4_bits else "float of 8 bits"
    raise _refused(f"{where}: {found} is not supported, only {supported}")


def _strategy(where: str, scheme: Mapping[str, Any]) -> Strategy:
    """One scale for the layer when nothing is said."""
    asked = scheme.get("strategy") or "tensor"
    for strategy in _STRATEGIES:
        if asked == strategy:
            return strategy
    raise _refused(f"{where}: strategy {asked!r} is not supported, only {' and '.join(_STRATEGIES)}")


def _refused(reason: str) -> UnsupportedError:
    return UnsupportedError(Refusal(reason, _FIX))
