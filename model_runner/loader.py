"""Loading a model: build it without memory, give it memory once, write every parameter, report what did not fit.

Knows models and checkpoints; knows nothing of requests or caches. Called by the runner at start-up.
"""

from __future__ import annotations

import torch

from halfbyte.errors import ModelFileError
from halfbyte.kernels.attention.base import AttentionBackend
from halfbyte.model_runner.checkpoint import checkpoint_tensors
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.layers.model import Model
from halfbyte.model_runner.layers.norm import RMSNorm
from halfbyte.model_runner.layers.weights import LoadReport, materialise
from halfbyte.model_runner.models import get_model_class
from halfbyte.model_runner.source import ModelFiles

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
) -> tuple[Model, LoadReport]:
    """The model with its weights in `dtype` on `device`. load_format "dummy": small seeded random weights, no file is read.

    ModelFileError when a tensor is missing or has the wrong shape. Tensors without a place are only reported.
    """
    torch_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model = get_model_class(config.architecture)(config, backend).eval()
    materialise(model, torch_dtype, device)
    if load_format == "dummy":
        return model, _fill_randomly(model)
    report = model.load_weights(checkpoint_tensors(files))
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


def _fill_randomly(model: Model) -> LoadReport:
    """The same weights on every machine, near what a fresh model would have: norms about 1, the rest about 0."""
    generator = torch.Generator().manual_seed(_DUMMY_SEED)
    report = LoadReport()
    for module in model.modules():
        offset = 1.0 if isinstance(module, RMSNorm) and not module.unit_offset else 0.0
        for parameter in module.parameters(recurse=False):
            noise = torch.empty(parameter.shape).normal_(0.0, _DUMMY_SCALE, generator=generator)
            parameter.data.copy_(noise.add_(offset))
            report.num_tensors += 1
            report.num_bytes += parameter.nbytes
    return report
