"""The LoRA adapters of a model: memory at each of its linear layers, who sits where, and loading one from its folder.

Every adapter has a seat, the same at all layers, from when it is loaded until it is removed. Memory for all seats is taken at
start, so that the cache's size is exact whatever is loaded later. Knows linear layers; knows no names that users gave, and no
requests. Called by the runner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.config import LoraConfig
from halfbyte.errors import ModelFileError, OverloadedError
from halfbyte.kernels.cpu.lora import PackedLora
from halfbyte.kernels.cpu.weights import WeightMemory
from halfbyte.kernels.layers import layer_kernels
from halfbyte.kernels.lora import LoraPart, LoraWeights, StackedLora
from halfbyte.model_runner.adapter_files import Shape, StoredPart, read_adapter
from halfbyte.model_runner.cpu_model import CpuModel
from halfbyte.model_runner.layers.linear import Linear, LinearLora
from halfbyte.model_runner.layers.model import Model
from halfbyte.model_runner.layers.weights import checkpoint_name


@dataclass(frozen=True, slots=True)
class _Site:
    """A linear layer's adapters, and the names that its parts have in the checkpoint."""

    weights: LoraWeights
    modules: tuple[str, ...]


class Adapters:
    """Adapters by their ids. modules: what they may change."""

    def __init__(self, sites: list[_Site], modules: Mapping[str, Shape], config: LoraConfig) -> None:
        self._sites = sites
        self._modules = modules
        self._max_rank = config.max_lora_rank
        self._free = list(range(config.num_seats, 0, -1))
        self._seat_of: dict[int, int] = {}
        self.num_seats = config.num_seats

    @property
    def nbytes(self) -> int:
        return sum(site.weights.nbytes for site in self._sites)

    def seat_of(self, adapter_id: int) -> int:
        """0 for the model as it is."""
        return self._seat_of[adapter_id] if adapter_id else 0

    @torch.inference_mode()
    def add(self, adapter_id: int, path: str) -> None:
        """Load the adapter in the folder `path`. Errors change nothing: as `read_adapter`; OverloadedError without a seat."""
        weights, parts = read_adapter(path, self._modules, self._max_rank)
        loaded = _load(weights, parts)
        if not self._free:
            raise OverloadedError("requests still run on adapters that were replaced or unloaded; try again when they are done")
        seat = self._seat_of[adapter_id] = self._free.pop()
        for site in self._sites:
            site.weights.put(seat, [loaded.get(module) for module in site.modules])

    def remove(self, adapter_id: int) -> None:
        self._free.append(self._seat_of.pop(adapter_id))

    def attach(self, model: Model | CpuModel) -> None:
        """Put them beside the layers of `model`, which takes the place of one of the same form."""
        for (_, layer), site in zip(_linear_layers(model), self._sites, strict=True):
            if isinstance(model, CpuModel):
                assert isinstance(site.weights, PackedLora)
                site.weights.engine = model.engine
                layer.packed_lora = site.weights
            else:
                assert isinstance(site.weights, StackedLora)
                layer.lora = LinearLora(site.weights, layer_kernels(layer.weight.device))

    def move(self, place: torch.device) -> None:
        """Where weights are tensors of a device: to another."""
        for site in self._sites:
            if isinstance(site.weights, StackedLora):
                site.weights.move(place)


def attach_adapters(model: Model | CpuModel, config: LoraConfig, dtype: str) -> Adapters:
    """Give every linear layer of the model room for adapters in `dtype`. To be called before the first step."""
    memory = WeightMemory()
    sites: list[_Site] = []
    modules: dict[str, Shape] = {}
    size = config.num_seats, config.max_lora_rank, getattr(torch, dtype)
    for path, layer in _linear_layers(model):
        num_inputs, outputs = layer.weight.shape[1], tuple(layer.shards.values())
        names = tuple(checkpoint_name(f"{path.rpartition('.')[0]}.{shard}") for shard in layer.shards)
        weights: LoraWeights
        if isinstance(model, CpuModel):
            weights = PackedLora(model.engine, outputs, num_inputs, *size, model.product_type, memory)
        else:
            weights = StackedLora(outputs, num_inputs, *size, layer.weight.device)
        sites.append(_Site(weights, names))
        modules |= {name: Shape(num_outputs, num_inputs) for name, num_outputs in zip(names, outputs, strict=True)}
    adapters = Adapters(sites, modules, config)
    adapters.attach(model)
    return adapters


def _linear_layers(model: Model | CpuModel) -> Iterator[tuple[str, Linear]]:
    inner = model.model if isinstance(model, CpuModel) else model
    return ((path, layer) for path, layer in inner.named_modules() if isinstance(layer, Linear))


def _load(weights: Path, parts: Mapping[str, StoredPart]) -> dict[str, LoraPart]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="pt") as file:

            def read(name: str) -> Tensor:
                tensor: Tensor = file.get_tensor(name)
                return tensor

            return {module: LoraPart(read(part.a), read(part.b), part.scale) for module, part in parts.items()}
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{weights} cannot be read: {error}") from None
