"""Looking at queries, keys and values on their way into attention, for calibration.

Knows both kinds of models; changes neither what they compute nor, once the tap is closed, how. Called by `kv_calibration`.

Shape letters: T tokens, H heads, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from halfbyte.kernels.attention.base import AttentionBackend
from halfbyte.model_runner.cpu_model import CpuModel
from halfbyte.model_runner.layers.attention import Attention
from halfbyte.model_runner.layers.model import Model

Heads = tuple[Tensor, Tensor, Tensor]  # q_THD, k_TGD, v_TGD of one layer, after norms and rotation


@contextmanager
def tap_heads(model: Model | CpuModel, max_tokens: int) -> Iterator[Callable[[int], list[Heads]]]:
    """Inside, the function that is given returns the heads of the last step, layer by layer; its argument: the step's tokens.

    Steps have at most `max_tokens` tokens.
    """
    if isinstance(model, CpuModel):
        model.tap_rows = max_tokens
        try:
            yield lambda num_tokens: _split(model, num_tokens)
        finally:
            model.tap_rows = 0
        return
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    watching = [_Watching(layer.backend) for layer in layers]
    for layer, watch in zip(layers, watching, strict=True):
        layer.backend = watch  # type: ignore[assignment]
    try:
        yield lambda num_tokens: [watch.seen for watch in watching]
    finally:
        for layer in layers:
            layer.backend = model.backend


def _split(model: CpuModel, num_tokens: int) -> list[Heads]:
    found = []
    for tap_TE, spec in zip(model.taps, model.attention_specs(), strict=True):
        sizes = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim_v)
        q, k, v = tap_TE[:num_tokens].split(sizes, 1)
        heads, kv_heads = (spec.num_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim)
        found.append((q.unflatten(1, heads), k.unflatten(1, kv_heads), v.unflatten(1, (spec.num_kv_heads, spec.head_dim_v))))
    return found


class _Watching:
    """A layer's back end that keeps what it was given last."""

    seen: Heads

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def forward(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *rest: Any) -> Tensor:
        self.seen = q_THD, k_TGD, v_TGD
        return self._backend.forward(q_THD, k_TGD, v_TGD, *rest)
