"""What encoders have in common: the batch of whole texts that they read, norms, and how they are loaded.

Knows configurations, files and tensors; knows no requests. The families are in `model_runner.models`; run by the encoder runner.

Shape letters: T tokens of the step, E hidden, N texts of one length, L that length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfbyte.errors import ModelFileError
from halfbyte.kernels.attention import get_backend
from halfbyte.kernels.encoder_attention import attend_texts
from halfbyte.model_runner.checkpoint import checkpoint_tensors
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.encoder_config import EncoderConfig
from halfbyte.model_runner.layers.context import AttentionLayer, ForwardContext
from halfbyte.model_runner.layers.model import Model
from halfbyte.model_runner.layers.weights import LoadReport, load_weights, materialise, prepack_weights, weight, weight_map
from halfbyte.model_runner.loader import load_model
from halfbyte.model_runner.models import ENCODERS
from halfbyte.model_runner.source import ModelFiles

_DUMMY_SCALE = 0.02

ENCODER_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True)
class Texts:
    """Whole texts, one behind the other. positions_T count from 0 in each. types_T: 1 for tokens of a second text, else 0.

    places: length -> where the tokens of the texts of that length are, [N, L].
    """

    token_ids_T: Tensor
    positions_T: Tensor
    types_T: Tensor
    places: Mapping[int, Tensor]


class LayerNorm(nn.Module):
    """Mean 0 and variance 1 over the last dimension, then scaled per channel."""

    bias: nn.Parameter | None

    def __init__(self, num_channels: int, eps: float, *, has_bias: bool = True) -> None:
        super().__init__()
        self.weight = weight(num_channels)
        self.bias = weight(num_channels) if has_bias else None
        self.eps = eps

    def forward(self, x_TE: Tensor) -> Tensor:
        return F.layer_norm(x_TE, self.weight.shape, self.weight, self.bias, self.eps)


class Table(nn.Module):
    """Learned vectors, looked up by number."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = weight(count, size)

    def forward(self, index_T: Tensor) -> Tensor:
        return F.embedding(index_T, self.weight)


class Encoder(nn.Module):
    """Reads texts in both directions. Module names are those of the family's checkpoints, as `checkpoint_name` has them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, texts: Texts) -> Tensor:
        """Hidden states [T, E] of the last layer."""
        raise NotImplementedError

    @staticmethod
    def checkpoint_name(name: str) -> str:
        """The name that a tensor of a checkpoint has in this module tree."""
        return name


@dataclass(slots=True)
class _WithinTexts(ForwardContext):
    """Attention of a decoder's layers over whole texts, without a cache."""

    places: Mapping[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: AttentionLayer, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        window = layer.spec.sliding_window
        reach = None if window is None else window - 1
        return attend_texts(q_THD, k_TGD, v_TGD, self.places, reach, layer.spec.scale)


class BothWays(nn.Module):
    """A decoder's layers that see in both directions: EmbeddingGemma."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, texts: Texts) -> Tensor:
        out_TE: Tensor = self.model(texts.token_ids_T, texts.positions_T, _WithinTexts([], [], [], texts.places))
        return out_TE


def load_encoder(
    files: ModelFiles, config: EncoderConfig | DecoderConfig, dtype: str, device: torch.device, load_format: str
) -> tuple[nn.Module, LoadReport]:
    """What makes hidden states of `Texts`, with its weights. load_format "dummy": small seeded random weights.

    ModelFileError when tensors are missing.
    """
    if isinstance(config, DecoderConfig):
        decoder = replace(config, tie_embeddings=True)  # there are no logits to make
        layers, report = load_model(files, decoder, dtype, device, load_format, get_backend("reference"))
        model: nn.Module = BothWays(layers)
    else:
        model, report = _load(files, config, dtype, device, load_format)
    if (device.type, dtype) == ("cpu", "float32"):
        prepack_weights(model)
    return model, report


def _load(
    files: ModelFiles, config: EncoderConfig, dtype: str, device: torch.device, load_format: str
) -> tuple[Encoder, LoadReport]:
    module, _, name = ENCODERS[config.architecture].partition(":")
    encoder_class: type[Encoder] = getattr(import_module(module), name)
    model = encoder_class(config).eval()
    materialise(model, getattr(torch, dtype), device)
    report = _fill(model, device) if load_format == "dummy" else load_weights(model, _renamed(files, encoder_class))
    if report.missing or report.mis_shaped:
        wrong = [*(f"{name} is missing" for name in report.missing), *report.mis_shaped]
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ModelFileError(
            f"{files.path} does not hold the weights that its configuration ({config.architecture}) describes: "
            f"{', '.join(wrong[:5])}{more}"
        )
    return model, report


def _renamed(files: ModelFiles, encoder_class: type[Encoder]) -> Iterator[tuple[str, object]]:
    for name, tensor in checkpoint_tensors(files):
        yield encoder_class.checkpoint_name(name), tensor


def _fill(model: Encoder, device: torch.device) -> LoadReport:
    generator = torch.Generator(device).manual_seed(0)
    report = LoadReport(num_bytes=sum(p.numel() * p.element_size() for p in model.parameters()))
    for target in weight_map(model).values():
        offset = float(isinstance(target.module, LayerNorm) and target.name == "weight")
        target.rows.normal_(0.0, _DUMMY_SCALE, generator=generator).add_(offset)
        report.num_tensors += 1
    return report
