"""A LoRA adapter's folder as PEFT writes it: what its configuration asks, which tensors it has, checked before one is read.

What this build cannot apply is refused by name: an adapter is applied whole or not at all. Messages name files, fields and
modules, never other contents. Knows the container; knows of models only names and sizes. Called by `adapters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.errors import ModelFileError, NotFoundError, Refusal, UnsupportedError
from halfbyte.log import one_line
from halfbyte.model_runner.layers.weights import checkpoint_name
from halfbyte.model_runner.safetensors_files import read_header
from halfbyte.model_runner.source import read_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLE_NAME = "adapter_model.bin"
_PREFIX = "base_model.model."
_SUFFIXES = {".lora_A.weight": "a", ".lora_B.weight": "b"}
_DTYPES = ("F32", "F16", "BF16")
_NAMES_SHOWN = 5
_MAX_NAME_CHARS = 120

# Fields of PEFT's LoraConfig that change what is computed, in a way that is not supported, unless they have no value.
_REFUSED_FIELDS = (
    *("use_dora", "modules_to_save", "layer_replication", "lora_bias", "use_qalora", "use_bdlora", "fan_in_fan_out"),
    *("trainable_token_indices", "target_parameters", "alora_invocation_tokens", "arrow_config", "monteclora_config"),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a linear module that an adapter may change."""

    num_outputs: int
    num_inputs: int


@dataclass(frozen=True, slots=True)
class StoredPart:
    """What a folder has for one module: its tensors' names, and what their product is multiplied with."""

    a: str
    b: str
    rank: int
    scale: float


def read_adapter(path: str, modules: Mapping[str, Shape], max_rank: int) -> tuple[Path, dict[str, StoredPart]]:
    """(the weight file, what it has for which of the modules). modules: by their names in the model's checkpoint.

    NotFoundError when there is no adapter, ModelFileError when it is damaged, UnsupportedError when it cannot be applied.
    """
    folder = _find(path)
    config = _Config(folder / CONFIG_NAME, max_rank)
    weights = folder / WEIGHTS_NAME
    if not weights.is_file():
        if (folder / _PICKLE_NAME).is_file():
            reason = f"{folder} holds no {WEIGHTS_NAME}; {_PICKLE_NAME} is a pickle, which can run code when it is read"
            raise UnsupportedError(Refusal(reason, "save the adapter as safetensors"))
        raise ModelFileError(f"{folder} holds no {WEIGHTS_NAME}")
    found: dict[str, dict[str, str]] = {}
    unknown = []
    header = read_header(weights)
    for name, tensor in header.items():
        module, side = _module_of(name)
        if module not in modules:
            unknown.append(name)
            continue
        if tensor.dtype not in _DTYPES:
            raise UnsupportedError(
                Refusal(f"{weights}: {_clip(name)} is stored as {tensor.dtype}", f"store adapters as {', '.join(_DTYPES)}")
            )
        if side in found.setdefault(module, {}):
            raise ModelFileError(f"{weights} has two tensors for the same matrix of {_clip(module)}")
        found[module][side] = name
    if unknown:
        reason = f"{weights}: the model has no modules for {_listed(unknown)}"
        raise UnsupportedError(
            Refusal(reason, f"adapters of this model have names like {_PREFIX}{next(iter(modules))}.lora_A.weight")
        )
    if not found:
        raise ModelFileError(f"{weights} holds no tensors")
    config.check_targets(modules, found)
    parts = {}
    for module, names in found.items():
        if len(names) < 2:
            raise ModelFileError(f"{weights} has only one of lora_A and lora_B for {_clip(module)}")
        shapes = header[names["a"]].shape, header[names["b"]].shape
        rank = _rank(weights, module, modules[module], *shapes)
        parts[module] = StoredPart(names["a"], names["b"], rank, config.scale(module, rank))
    return weights, parts


class _Config:
    """adapter_config.json, with everything refused that asks for more than A and B."""

    def __init__(self, path: Path, max_rank: int) -> None:
        self._path, self._max_rank = path, max_rank
        values = read_json(path)
        refused = [name for name in _REFUSED_FIELDS if values.get(name)]
        if values.get("peft_type") != "LORA":
            refused.insert(0, "a peft_type that is not LORA")
        if values.get("bias", "none") != "none":
            refused.append("bias")
        if refused:
            raise UnsupportedError(Refusal(f"{path} asks for {', '.join(refused)}", "only plain LoRA adapters are supported"))
        self._rank = self._number(values, "r")
        self._alpha = self._number(values, "lora_alpha", 8)
        self._is_rank_stabilised = bool(values.get("use_rslora"))
        self._ranks, self._alphas = (self._pattern(values, name) for name in ("rank_pattern", "alpha_pattern"))
        targets = values.get("target_modules")
        self._targets = [name for name in targets if isinstance(name, str)] if isinstance(targets, list) else []

    def check_targets(self, modules: Mapping[str, Shape], found: Mapping[str, Any]) -> None:
        """A module type that the configuration names and the model has must not be without tensors."""
        for target in self._targets:
            if any(_matches(target, name) for name in modules) and not any(_matches(target, name) for name in found):
                raise ModelFileError(f"{self._path} names the module {_clip(target)}, for which there are no tensors")

    def scale(self, module: str, rank: int) -> float:
        """By which the product of the module's A and B is multiplied. Errors when its rank is not as configured, or too high."""
        expected = self._find(self._ranks, module, self._rank)
        if rank != expected:
            raise ModelFileError(f"{self._path} says rank {expected:g} for {_clip(module)}, whose tensors have rank {rank}")
        if rank > self._max_rank:
            raise UnsupportedError(
                Refusal(f"{_clip(module)} has rank {rank}, --max-lora-rank is {self._max_rank}", "raise --max-lora-rank")
            )
        alpha = self._find(self._alphas, module, self._alpha)
        return alpha / math.sqrt(rank) if self._is_rank_stabilised else alpha / rank

    def _find(self, pattern: Mapping[str, float], module: str, otherwise: float) -> float:
        return next((value for key, value in pattern.items() if _matches(key, module)), otherwise)

    def _pattern(self, values: Mapping[str, Any], name: str) -> dict[str, float]:
        """Module names and numbers. PEFT reads the names as regular expressions; what is more than a name is refused."""
        given = values.get(name) or {}
        if not isinstance(given, dict):
            raise ModelFileError(f"{self._path}: {name} must be an object of module names and numbers")
        for key in given:
            if not key.removeprefix("^").replace(".", "").replace("_", "").isalnum():
                raise UnsupportedError(
                    Refusal(f"{self._path}: {name} has a key that is more than a module's name", "write one name per key")
                )
        return {key: self._number(given, key, what=name) for key in given}

    def _number(self, values: Mapping[str, Any], name: str, otherwise: float | None = None, what: str = "") -> float:
        value = values.get(name, otherwise)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise ModelFileError(f"{self._path}: {what or name} must be a number above 0")
        return float(value)


def _find(path: str) -> Path:
    """The folder. Whether a path does not exist or cannot be looked at is the same to who asks."""
    try:
        folder = Path(path).expanduser().resolve(strict=True)
        if (folder / CONFIG_NAME).is_file():
            return folder
    except (OSError, ValueError, RuntimeError):
        pass
    raise NotFoundError(f"no adapter at {one_line(path)}: it must be a local folder with {CONFIG_NAME}", param="lora_path")


def _module_of(name: str) -> tuple[str, str]:
    """(module in the model's checkpoint, "a" or "b") of a tensor; ("", "") when it has another form."""
    for suffix, side in _SUFFIXES.items():
        if name.startswith(_PREFIX) and name.endswith(suffix):
            return checkpoint_name(name.removeprefix(_PREFIX).removesuffix(suffix)), side
    return "", ""


def _rank(weights: Path, module: str, shape: Shape, a: tuple[int, ...], b: tuple[int, ...]) -> int:
    rank = a[0] if a else 0
    if rank < 1 or a != (rank, shape.num_inputs) or b != (shape.num_outputs, rank):
        raise UnsupportedError(
            Refusal(
                f"{weights}: A {list(a)} and B {list(b)} do not fit {_clip(module)},"
                f" which has {shape.num_inputs} inputs and {shape.num_outputs} outputs",
                "use an adapter of this model",
            )
        )
    return rank


def _matches(key: str, module: str) -> bool:
    """Whether a name of PEFT's stands for the module: the end of its path, or after ^ the whole of it."""
    if key.startswith("^"):
        return module == key[1:]
    return module == key or module.endswith(f".{key}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN + 3 else ""
    return ", ".join(_clip(name) for name in (names[:_NAMES_SHOWN] if more else names)) + more


def _clip(name: str) -> str:
    text = one_line(name)
    return text if len(text) <= _MAX_NAME_CHARS else f"{text[:_MAX_NAME_CHARS]}..."
