"""What the Triton attention back end is given of a machine and a model: measured cuts at a start, or their measurement.

A start reads a file (`load_backend`); `halfbyte preload --autotune` makes it (`measure_layers`). Both know a model's layers from
its configuration alone. Called by the runner's loader and by `halfbyte.engine.preload`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date

import torch

from halfbyte.config import EngineConfig
from halfbyte.kernels.attention import get_backend
from halfbyte.kernels.attention.base import AttentionBackend, AttentionSpec
from halfbyte.kernels.attention.selection import arranged_spec
from halfbyte.kernels.attention.triton import TritonBackend
from halfbyte.kernels.attention.vendors import LayerFacts
from halfbyte.kernels.triton.tiles import LayerKind, Measured, Table, current_version, read_tiles
from halfbyte.kernels.triton.tuning import make_load, measure
from halfbyte.kvcache.formats import page_bytes
from halfbyte.kvcache.spec import KVCacheSpec, make_layout
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.layers.attention import attention_spec
from halfbyte.platform import Platform
from halfbyte.resolve import AUTO_FIT

Layer = tuple[AttentionSpec, KVCacheSpec]


def load_backend(
    config: EngineConfig, decoder: DecoderConfig, platform: Platform, num_first: int
) -> tuple[AttentionBackend, list[str]]:
    """The back end of `config`, and lines for the start-up log. UserError when the file of measured cuts is damaged."""
    if config.attention_backend != TritonBackend.name:
        return get_backend(config.attention_backend), []
    tiles = read_tiles(platform.architecture)
    return TritonBackend(tiles=tiles), [tiles.line(layers_by_kind(config, decoder, num_first))]


def layers_by_kind(config: EngineConfig, decoder: DecoderConfig, num_first: int) -> dict[LayerKind, Layer]:
    """One layer of each kind, of full attention where there is one: it reads most. num_first: of tokens that are kept apart."""
    attention = [attention_spec(decoder, layer) for layer in range(decoder.num_layers)]
    facts = (
        LayerFacts(spec, config.cache.block_size, first_tokens=num_first, first_format=config.model.dtype) for spec in attention
    )
    names = zip(config.cache.layer_dtypes, facts, strict=True)
    layout = make_layout([arranged_spec(TritonBackend.name, name, layer) for name, layer in names], page_bytes)
    found: dict[LayerKind, Layer] = {}
    for spec, kv_spec in sorted(zip(attention, layout.specs, strict=True), key=lambda layer: layer[0].sliding_window is not None):
        found.setdefault(LayerKind.of(spec, kv_spec.format, config.model.dtype), (spec, kv_spec))
    return found


def measure_layers(
    config: EngineConfig, decoder: DecoderConfig, platform: Platform, num_first: int, tell: Callable[[str], None]
) -> Table:
    """Measures each kind of layer on the GPU of this process, as long as compiling the candidates takes. `tell` hears of each."""
    longest = decoder.max_position if config.model.max_model_len == AUTO_FIT else config.model.max_model_len
    measured = []
    for kind, layer in layers_by_kind(config, decoder, num_first).items():
        tell(f"measuring {kind.heads} heads per kv head of {kind.head_dim} numbers over {kind.kv_format} KV, in {kind.dtype}")
        measured.append(_measure(kind, layer, config, longest, platform))
        torch.cuda.empty_cache()
    today = date.today().isoformat()
    return Table(current_version(), platform.architecture, platform.name, today, tuple(measured))


def _measure(kind: LayerKind, layer: Layer, config: EngineConfig, longest: int, platform: Platform) -> Measured:
    from halfbyte.kernels.triton.layer_timer import LayerTimer  # imports triton

    spec, kv_spec = layer
    token_bytes = -(-page_bytes(kv_spec) // kv_spec.block_size)
    load = make_load(config.scheduler.max_num_seqs, longest, config.scheduler.max_num_batched_tokens, token_bytes)
    timer = LayerTimer(spec, kv_spec, getattr(torch, config.model.dtype), load, torch.device("cuda"))
    vector_bytes = token_bytes // (2 * spec.num_kv_heads)
    return measure(kind, timer, load, platform.architecture, vector_bytes)
