"""Loading a model: build it without memory, give it memory once, write every parameter, report what did not fit.

Knows models and checkpoints; knows nothing of requests or caches. Called by the runner at start-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.errors import ModelFileError
from halfbyte.kernels.attention.base import AttentionBackend
from halfbyte.model_runner.checkpoint import checkpoint_tensors
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.kv_scales import KVScales
from halfbyte.model_runner.layers.model import Model
from halfbyte.model_runner.layers.norm import RMSNorm
from halfbyte.model_runner.layers.weights import (
    LoadReport,
    WeightTarget,
    copy_rows,
    load_weights,
    materialise,
    weight_map,
)
from halfbyte.model_runner.models import get_model_class
from halfbyte.model_runner.source import ModelFiles

if TYPE_CHECKING:
    from halfbyte.model_runner.cpu_model import PackingLoader

_NAMES_SHOWN = 5
_DUMMY_SEED = 0
_DUMMY_SCALE = 0.02


def load_model(
    files: ModelFiles,
    config: DecoderConfig,
    dtype: str | torch.dtype,
    device: torch.device | str,
    load_format: str,
    backend: AttentionBackend,
    packing: PackingLoader | None = None,
    scales: KVScales | None = None,
) -> tuple[Model, LoadReport]:
    """The model with its weights in `dtype` on `device`. load_format "dummy": small seeded random weights, no file is read.

    scales: takes those of the KV cache. packing: takes the matrices, which then exist in its form only; all else is float32.
    ModelFileError when a tensor is missing or has the wrong shape. Tensors without a place are only reported.
    """
    torch_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model = get_model_class(config.architecture)(config, backend).eval()
    materialise(model, torch_dtype if packing is None else torch.float32, device, matrices=packing is None)
    put = copy_rows if packing is None else packing.put
    if load_format == "dummy":
        return model, _fill_randomly(model, put)
    keeps_blocks = packing is not None and packing.keeps_blocks
    tensors = checkpoint_tensors(files, keeps_blocks=keeps_blocks)
    report = load_weights(model, tensors if scales is None else scales.take_from(tensors), put)
    if report.missing or report.mis_shaped:
        raise ModelFileError(_complaint(files, config, report))
    return model, report


def _complaint(files: ModelFiles, config: DecoderConfig, report: LoadReport) -> str:
    parts = []
    for what, names in (("missing", report.missing), ("of the wrong shape", report.mis_shaped)):
        if names:
            more = f", and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            parts.append(f"{len(names)} tensors {what}: {', '.join(names[:_NAMES_SHOWN])}{more}")
    return f"{files.path} does not hold the weights that its configuration ({config.architecture}) describes: {'; '.join(parts)}"


def _fill_randomly(model: Model, put: Callable[[WeightTarget, Tensor], None]) -> LoadReport:
    """The same weights on every machine of a kind, near what a fresh model would have: norms about 1, the rest about 0.

    They are made where they stay, as billions of random numbers take a CPU minutes.
    """
    [kind] = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    generator = torch.Generator(kind).manual_seed(_DUMMY_SEED)
    report = LoadReport()
    for target in weight_map(model).values():
        module = target.module
        offset = 1.0 if isinstance(module, RMSNorm) and not module.unit_offset else 0.0
        numbers = torch.empty(target.shape, device=kind).normal_(0.0, _DUMMY_SCALE, generator=generator)
        put(target, numbers.add_(offset))
        report.num_tensors += 1
    report.num_bytes = model.weight_bytes
    return report
