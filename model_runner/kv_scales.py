"""The KV scales of a checkpoint: recognised by name while its tensors stream by, then checked and sorted into layers.

Knows how checkpoints spell these names, and the shapes and values that make sense. It must not know models, formats or
devices. Called by `loader`: `KVScales.take_from` around the tensors, `layer_scales` when all have passed.

Shape letters: L layers, G kv heads, H query heads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import ModelFileError
from halfbyte.kvcache.scales import LayerScales

# A layer of the language model; towers of a multimodal checkpoint have prefixes of their own.
_LAYER = re.compile(r"(?:(?:model|language_model|backbone)\.)*layers\.(\d{1,6})\.(?:self_attn|mixer)\.(.+)")

# Names inside an attention module, and the sides that have them.
_SPELLINGS = (
    ("{side}_scale", "qkv"),  # llm-compressor
    ("attn.{side}_scale", "qkv"),
    ("{side}_proj.{side}_scale", "qkv"),  # ModelOpt
    ("qkv_proj.{side}_scale", "kv"),
    ("qkqkv_proj.{side}_scale", "kv"),
    ("{side}_proj.output_scale", "qkv"),  # Quark
    ("{side}.scale", "q"),
    ("{side}_cache.scale", "kv"),
)
# Name -> what it scales: q, k, v, both of them ("kv", deprecated), or the weights of the softmax ("prob").
_SCALES = {name.format(side=side): side for name, sides in _SPELLINGS for side in sides}
_SCALES |= {"kv_scale": "kv"} | dict.fromkeys(("prob_scale", "attn.prob_scale", "prob_output_scale"), "prob")
# Symmetric numbers have none; checkpoints of some versions carry zeros.
_SCALES |= dict.fromkeys((f"{parent}{side}_zero_point" for parent in ("", "attn.") for side in "qkv"), "zero_point")


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor scales queries, keys, values or attention weights, or is a zero point beside these."""
    return _parse(name) is not None


def _parse(name: str) -> tuple[int, str] | None:
    """The layer and what is scaled there."""
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _SCALES:
        return None
    return int(match[1]), _SCALES[match[2]]


class KVScales:
    """Collects the scales of one checkpoint. Values are checked by `layer_scales`, which knows the model's shape."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], tuple[str, Tensor]] = {}

    @property
    def num_layers(self) -> int:
        """Layers of which there is a scale of K or V."""
        return len({layer for layer, what in self._found if what in ("k", "v", "kv")})

    def take_from(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Passes everything on but the scales, which it keeps."""
        for name, tensor in tensors:
            if is_kv_scale(name):
                self.add(name, tensor)
            else:
                yield name, tensor

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor for which `is_kv_scale`; it is copied. ModelFileError when another name gave this scale another value."""
        parsed = _parse(name)
        if parsed is None or parsed[1] == "zero_point":
            return
        scale = tensor.to("cpu", torch.float32, copy=True)
        known, value = self._found.setdefault(parsed, (name, scale))
        if value is not scale and not torch.equal(value.flatten(), scale.flatten()):
            raise ModelFileError(f"{known} and {name} are the same scale with different values")

    def layer_scales(self, num_layers: int, num_kv_heads: int, num_heads: int) -> tuple[list[LayerScales], list[str]]:
        """The scales of every layer, and lines for the log. A side without a scale takes that of the other; without both it is 1.

        ModelFileError names a scale that is not positive and finite, or neither one number nor one per head.
        """
        layers = []
        for layer in range(num_layers):
            k_G = self._first(layer, ("k", "kv", "v"), num_kv_heads)
            v_G = self._first(layer, ("v", "kv", "k"), num_kv_heads)
            if k_G is None or v_G is None:
                layers.append(LayerScales.ones(num_kv_heads))
            else:
                layers.append(LayerScales(k_G, v_G, calibrated=True))
        return layers, [_summary(layers), *self._remarks(num_layers, num_kv_heads, num_heads)]

    def _first(self, layer: int, kinds: Sequence[str], num_heads: int) -> Tensor | None:
        """The first of these that the checkpoint has."""
        return next((self._read(layer, what, num_heads) for what in kinds if (layer, what) in self._found), None)

    def _read(self, layer: int, what: str, num_heads: int) -> Tensor:
        """A stored scale, [], [1], [H] or [H, 1, 1], as one number per head."""
        name, scale = self._found[layer, what]
        if scale.numel() not in (1, num_heads) or max(scale.shape, default=1) != scale.numel():
            expected = f"one number, or one per head: [{num_heads}] or [{num_heads}, 1, 1]"
            raise ModelFileError(f"{name} has shape {list(scale.shape)}, expected is {expected}")
        for value in scale.flatten().tolist():
            if not 0.0 < value < math.inf:
                raise ModelFileError(f"{name} holds {value}, expected are positive finite numbers")
        return scale.flatten().expand(num_heads).contiguous()

    def _remarks(self, num_layers: int, num_kv_heads: int, num_heads: int) -> Iterator[str]:
        """Scales that stand for another side too, and those without a use."""
        has = {what: {layer for layer, kind in self._found if kind == what} for what in ("k", "v", "kv", "q", "prob")}
        inside = set(range(num_layers))
        if one_sided := ((has["k"] ^ has["v"]) - has["kv"]) & inside:
            yield f"KV scales: layers {_list(one_sided)} have one of K or V only, which stands for both"
        if outside := set().union(*has.values()) - inside:
            yield f"KV scales: those of layers {_list(outside)} are not used, the model has {num_layers} layers"
        if queries := [self._read(layer, "q", num_heads) for layer in has["q"] & inside]:
            per_group = torch.stack([q_H.view(num_kv_heads, -1).amax(1) for q_H in queries])
            count = f"{len(queries)} of {num_layers} layers"
            yield f"KV scales: those of Q in {count} ({_range(per_group)}) are not used, queries are not quantised"
        if weights := [self._read(layer, "prob", 1) for layer in has["prob"] & inside]:
            yield f"KV scales: those of the softmax in {len(weights)} of {num_layers} layers are not used, it is not quantised"


def _summary(layers: Sequence[LayerScales]) -> str:
    calibrated = [scales for scales in layers if scales.calibrated]
    line = f"KV scales: {len(calibrated)} of {len(layers)} layers calibrated"
    if calibrated:
        k_LG, v_LG = torch.stack([scales.k_G for scales in calibrated]), torch.stack([scales.v_G for scales in calibrated])
        line += f", K {_range(k_LG)}, V {_range(v_LG)}"
    if len(calibrated) == len(layers):
        return line
    rest = _list(index for index, scales in enumerate(layers) if not scales.calibrated)
    return f"{line}; {f'layers {rest} have' if calibrated else 'all have'} scale 1, which may cost accuracy"


def _list(layers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(layers)))


def _range(scales: Tensor) -> str:
    return f"{scales.min().item():.3g} to {scales.max().item():.3g}"
