"""How parameters get their memory and their values: declared without memory, materialised once, then written by name.

A module tree mirrors the names of a Hugging Face checkpoint. Where one parameter stacks several checkpoint tensors, its
module is a `StackedWeight` and says which rows belong to which name. Knows no files and no model family. Called by the loader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

# Checkpoints of the bare model lack the prefix; multimodal ones nest the text model.
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
# Tables that old checkpoints carry and that follow from the configuration.
_DERIVED = (".rotary_emb.inv_freq",)


def weight(*shape: int) -> nn.Parameter:
    """Declares a parameter. It has no memory until `materialise`."""
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


class StackedWeight(nn.Module):
    """A module whose parameters stack checkpoint tensors by rows. shards: checkpoint module name -> number of rows."""

    def __init__(self, shards: Mapping[str, int]) -> None:
        super().__init__()
        self.shards = dict(shards)


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where a checkpoint tensor goes: `num_rows` rows of `parameter` from `start`."""

    parameter: nn.Parameter
    start: int
    num_rows: int

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
                    targets[_checkpoint_name(f"{parent}.{shard}.{name}")] = WeightTarget(parameter, start, num_rows)
                    start += num_rows
            else:
                targets[_checkpoint_name(f"{path}.{name}")] = WeightTarget(parameter, 0, parameter.shape[0])
    return targets


def load_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> LoadReport:
    """Copies checkpoint tensors into the (materialised) parameters, casting to their dtype. Raises nothing: see the report."""
    targets = weight_map(model)
    missing = dict.fromkeys(targets)
    report = LoadReport(num_bytes=sum(p.nbytes for p in model.parameters()))
    with torch.no_grad():
        for given, tensor in tensors:
            name = _checkpoint_name(given)
            target = targets.get(name)
            if target is None:
                if not name.endswith(_DERIVED):
                    report.unused.append(given)
                continue
            missing.pop(name, None)
            if tensor.shape != target.rows.shape:
                report.mis_shaped.append(f"{given} (file {list(tensor.shape)}, model {list(target.rows.shape)})")
                continue
            target.rows.copy_(tensor)
            report.num_tensors += 1
    report.missing = list(missing)
    return report


def materialise(model: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Gives every parameter uninitialised memory of `dtype` on `device`, and moves the (computed) buffers there."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            memory = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _checkpoint_name(name: str) -> str:
    """The name as a causal language model's checkpoint spells it."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    return name if name.startswith("lm_head.") else f"model.{name}"
