"""From hidden states to vectors: the layers behind pooling, and what a request wants of their result.

Everything here is small and float32. Knows a `PoolingPlan` and its tensors; knows no model, no rows and no requests' lives.
Used by the runners of decoders and of encoders.

Shape letters: N states, E hidden, D numbers of a vector, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from halfbyte.errors import ModelFileError
from halfbyte.model_runner.pending import PendingStep
from halfbyte.model_runner.pooling_plan import HeadStep, PoolingPlan
from halfbyte.model_runner.safetensors_files import check_folder
from halfbyte.model_runner.source import ModelFiles
from halfbyte.pooling import Pooling, PoolingInfo, PoolingParams

_LOGITS_AT_ONCE = 64
_DUMMY_SCALE = 0.02

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: torch.softmax(x, -1),
}


class PoolingHead:
    """size: how many numbers its vectors have. class_ids: of a classifier that reads the logits of tokens."""

    def __init__(
        self,
        plan: PoolingPlan,
        files: ModelFiles,
        hidden_size: int,
        place: torch.device | str,
        *,
        class_ids: Sequence[int] = (),
        dummy: bool = False,
    ) -> None:
        self.plan = plan
        self._class_ids = torch.tensor(class_ids, dtype=torch.int64, device=place)
        self._steps: list[tuple[HeadStep, Tensor, Tensor | None]] = []
        size = hidden_size
        for step in plan.steps:
            weight, bias = _dummy_step(step, size, len(plan.labels)) if dummy else _read_step(files, step)
            _check_shapes(files, step, weight, bias, size)
            self._steps.append((step, weight.to(place), None if bias is None else bias.to(place)))
            size = weight.shape[0]
        self.size = len(plan.labels) if class_ids else size
        if plan.task == "classify" and self.size != len(plan.labels):
            raise ModelFileError(
                f"{files.path}: the classifier has {self.size} outputs, the configuration names {len(plan.labels)} labels"
            )

    @property
    def info(self) -> PoolingInfo:
        return self.plan.info(self.size)

    @property
    def ask(self) -> Pooling:
        """What a request asks for that says nothing."""
        info = self.info
        return info.ask(PoolingParams(), info.tasks[0])

    def send(
        self,
        pending: PendingStep,
        owners: Sequence[int],
        asked: Sequence[Pooling],
        states_NE: Tensor,
        logits: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Have `pending` bring the vectors of these states: state i is one that request `owners[i]` of the batch wants.

        logits: of states, for a classifier that reads them.
        """
        groups: dict[Pooling, list[int]] = {}
        for index, ask in enumerate(asked):
            groups.setdefault(Pooling(ask.task, ask.activates, False, ask.dimensions), []).append(index)
        values_ND = self._through(states_NE) if logits is None else self._of_classes(states_NE, logits)
        for ask, members in groups.items():
            whole = len(members) == len(asked)
            mine = values_ND if whole else torch.stack([values_ND[index] for index in members])
            pending.want_pooled([owners[index] for index in members], self._finish(mine, ask))

    def _through(self, states_NE: Tensor) -> Tensor:
        states_NE = states_NE.float()
        for step, weight, bias in self._steps:
            if step.eps is not None:
                states_NE = F.layer_norm(states_NE, weight.shape, weight, bias, step.eps)
            else:
                states_NE = _ACTIVATIONS[step.activation](F.linear(states_NE, weight, bias))
        return states_NE

    def _of_classes(self, states_NE: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
        scores_NO = torch.cat([logits(part)[:, self._class_ids] for part in states_NE.split(_LOGITS_AT_ONCE)])
        return scores_NO[:, 1:] - scores_NO[:, :1] if self.plan.difference else scores_NO

    def _finish(self, values_ND: Tensor, ask: Pooling) -> Tensor:
        if self.plan.task == "classify":
            return _ACTIVATIONS[self.plan.activation](values_ND) if ask.activates else values_ND
        if ask.dimensions is not None:
            values_ND = values_ND[:, : ask.dimensions]
        return F.normalize(values_ND, dim=-1) if ask.activates else values_ND.contiguous()


def _read_step(files: ModelFiles, step: HeadStep) -> tuple[Tensor, Tensor | None]:
    """(weight, bias) in float32."""
    folder = files.path / step.folder if step.folder else files.path
    found = read_tensors(folder, [f"{step.prefix}.weight", f"{step.prefix}.bias"])
    weight = found.get(f"{step.prefix}.weight")
    if weight is None:
        raise ModelFileError(f"{folder} does not hold {step.prefix}.weight, which its configuration describes")
    return weight, found.get(f"{step.prefix}.bias")


def read_tensors(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Those of these tensors that the folder's safetensors files hold, in float32."""
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for path, tensors in check_folder(folder).items():
        wanted = [name for name in names if name in tensors]
        if wanted:
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name).float().clone() for name in wanted}
    return found


def _check_shapes(files: ModelFiles, step: HeadStep, weight: Tensor, bias: Tensor | None, size: int) -> None:
    wanted = (size,) if step.eps is not None else (weight.shape[0], size)
    if tuple(weight.shape) != wanted or (bias is not None and bias.shape != weight.shape[:1]):
        raise ModelFileError(
            f"{files.path}: {step.prefix} has weights {list(weight.shape)}, but {size} numbers come from what is before it"
        )


def _dummy_step(step: HeadStep, size: int, num_labels: int) -> tuple[Tensor, Tensor | None]:
    if step.eps is not None:
        return torch.ones(size), None
    is_last = step.prefix.endswith(("score", "classifier", "out_proj"))
    generator = torch.Generator().manual_seed(0)
    return torch.empty(num_labels if is_last else size, size).normal_(0.0, _DUMMY_SCALE, generator=generator), None
