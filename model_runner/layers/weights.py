"""How parameters get their memory and their values: declared without memory, materialised once, then written by name.

A module tree mirrors the names of a Hugging Face checkpoint. Where one parameter stacks several checkpoint tensors, its
module is a `StackedWeight` and says which rows belong to which name. Knows no files and no model family. Called by the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfbyte.kernels.layers import TORCH_LAYERS, LayerKernels, layer_kernels
from halfbyte.kernels.linear import prepack

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.weights import PackedMatrix

# Checkpoints of the bare model lack the prefix; multimodal ones nest the text model.
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
# Tables that old checkpoints carry and that follow from the configuration.
_DERIVED = (".rotary_emb.inv_freq",)


def weight(*shape: int) -> nn.Parameter:
    """Declares a parameter. It has no memory until `materialise`."""
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


class KernelModule(nn.Module):
    """A module that computes with the kernels of its device, which `materialise` gives it: the laws until then."""

    kernels: LayerKernels = TORCH_LAYERS


class MatrixModule(nn.Module):
    """A module whose `weight` is a matrix [outputs, inputs], which compiled kernels keep in a form of their own.

    packed: that form, by the row where each piece starts; empty when the parameter itself holds the numbers.
    """

    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.packed: dict[int, PackedMatrix] = {}

    @property
    def matrices(self) -> list[PackedMatrix]:
        """The packed pieces in the order of their rows."""
        return [self.packed[start] for start in sorted(self.packed)]


class StackedWeight(MatrixModule):
    """A module whose parameters stack checkpoint tensors by rows. shards: checkpoint module name -> number of rows."""

    def __init__(self, shards: Mapping[str, int]) -> None:
        super().__init__()
        self.shards = dict(shards)


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where a checkpoint tensor goes: `num_rows` rows of `module`'s parameter `name` from `start`."""

    module: nn.Module
    name: str
    start: int
    num_rows: int

    @property
    def parameter(self) -> nn.Parameter:
        parameter: nn.Parameter = getattr(self.module, self.name)
        return parameter

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.parameter.shape[1:])

    @property
    def rows(self) -> Tensor:
        return self.parameter.data.narrow(0, self.start, self.num_rows)


@dataclass(slots=True)
class LoadReport:
    """What loading did. unused: checkpoint tensors that the model has no place for. missing and mis_shaped: errors.

    num_tensors and num_bytes count the checkpoint tensors that were used and the memory of the parameters.
    """

    unused: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mis_shaped: list[str] = field(default_factory=list)
    num_tensors: int = 0
    num_bytes: int = 0


def weight_map(model: nn.Module) -> dict[str, WeightTarget]:
    """Checkpoint tensor name -> its place, for every parameter of `model`."""
    targets: dict[str, WeightTarget] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, StackedWeight):
                parent, start = path.rpartition(".")[0], 0
                for shard, num_rows in module.shards.items():
                    targets[checkpoint_name(f"{parent}.{shard}.{name}")] = WeightTarget(module, name, start, num_rows)
                    start += num_rows
            else:
                targets[checkpoint_name(f"{path}.{name}")] = WeightTarget(module, name, 0, parameter.shape[0])
    return targets


def copy_rows(target: WeightTarget, tensor: Tensor) -> None:
    """Into the (materialised) parameter, cast to its dtype."""
    target.rows.copy_(tensor)


def load_weights(
    model: nn.Module, tensors: Iterable[tuple[str, Any]], put: Callable[[WeightTarget, Any], None] = copy_rows
) -> LoadReport:
    """Hands every checkpoint tensor and its place to `put`. Raises nothing: see the report.

    tensors: (name, Tensor, or another thing with a shape that `put` knows).
    """
    targets = weight_map(model)
    missing = dict.fromkeys(targets)
    report = LoadReport()
    with torch.no_grad():
        for given, tensor in tensors:
            name = checkpoint_name(given)
            target = targets.get(name)
            if target is None:
                if not name.endswith(_DERIVED):
                    report.unused.append(given)
                continue
            missing.pop(name, None)
            if tuple(tensor.shape) != target.shape:
                report.mis_shaped.append(f"{given} (file {list(tensor.shape)}, model {list(target.shape)})")
                continue
            put(target, tensor)
            report.num_tensors += 1
    report.num_bytes = weight_bytes(model)
    report.missing = list(missing)
    return report


def weight_bytes(model: nn.Module) -> int:
    """Memory of the parameters that have any, and of what was packed."""
    dense = sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)
    modules = (module for module in model.modules() if isinstance(module, MatrixModule))
    return dense + sum(matrix.nbytes for module in modules for matrix in module.packed.values())


def materialise(model: nn.Module, dtype: torch.dtype, device: torch.device | str, *, matrices: bool = True) -> None:
    """Gives every parameter uninitialised memory of `dtype` on `device`, and moves the (computed) buffers there.

    Modules that compute get the kernels of the device, which may raise UnsupportedError. matrices: whether those of a
    MatrixModule get their memory too, or wait for their packed form.
    """
    kernels = layer_kernels(device)
    for module in model.modules():
        if isinstance(module, KernelModule):
            module.kernels = kernels
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, MatrixModule) and name == "weight" and not matrices:
                continue
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def prepack_weights(model: nn.Module) -> None:
    """Puts the loaded float32 matrices of linear layers into oneDNN's layout, one at a time. The embedding stays as it is."""
    for module in model.modules():
        if isinstance(module, StackedWeight) and torch.backends.mkldnn.is_available():
            module.weight = nn.Parameter(prepack(module.weight.data), requires_grad=False)


def checkpoint_name(name: str) -> str:
    """The name as a causal language model's checkpoint spells it."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    return name if name.startswith("lm_head.") else f"model.{name}"
