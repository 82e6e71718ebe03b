"""A runner of a tiny model, on a device that a test brings, and a scheduler to drive it by hand.

The model's products are sums of their own here, whose order does not depend on how many rows there are: what differs in a bit
is a fault of the runner. Rows are driven through SchedulerOutput.

Shape letters: T tokens, R requests, L context positions, H heads, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halfbyte.config import EngineOptions
from halfbyte.kernels.attention import get_backend
from halfbyte.kernels.attention.base import AttentionMetadata, AttentionSpec
from halfbyte.kvcache.spec import KVCacheSpec
from halfbyte.kvcache.tensors import LayerCache
from halfbyte.model_runner.adapters import attach_adapters
from halfbyte.model_runner.decoder_config import DecoderConfig, RopeConfig
from halfbyte.model_runner.loader import load_model
from halfbyte.model_runner.runner import ModelRunner
from halfbyte.platform import platform_named
from halfbyte.resolve import ModelFacts, resolve
from halfbyte.types import GrownRow, ModelRunnerOutput, NewRow, PendingOutput, SamplingParams, SchedulerOutput

BLOCK_SIZE, VOCAB_SIZE, MAX_LEN = 4, 53, 64
POISON = 52  # a token whose embedding is NaN


class TableBackend:
    """Attention from tables alone, over their whole width: nothing is planned on the host, so that a graph can hold it."""

    name = "table"
    graph_support = "full"

    def has_reader(self, kv_format: str) -> bool:
        return False

    def arrange(self, kv_spec: KVCacheSpec) -> str:
        return kv_spec.format

    def refuse(self, *_: Any) -> None:
        return None

    def prepare(self, metadata: AttentionMetadata, window: int | None) -> None:
        return None

    def forward(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        cache.format.write(k_TGD, v_TGD, cache, metadata.slot_mapping)
        starts, seq_lens = metadata.query_start_loc.long(), metadata.seq_lens.long()
        token_T = torch.arange(len(q_THD))
        request_T = torch.searchsorted(starts[1:], token_T, right=True).clamp(max=len(seq_lens) - 1)
        position_T = token_T - starts[1:][request_T] + seq_lens[request_T]
        context_L = torch.arange(MAX_LEN)
        table = torch.nn.functional.pad(metadata.block_table, (0, MAX_LEN // BLOCK_SIZE - metadata.block_table.shape[1]))
        slots_TL = table[request_T][:, context_L // BLOCK_SIZE].long() * BLOCK_SIZE + context_L % BLOCK_SIZE
        is_seen_TL = context_L <= position_T[:, None]
        if spec.sliding_window is not None:
            is_seen_TL &= context_L > position_T[:, None] - spec.sliding_window
        k_TLGD, v_TLGD = cache.format.read(cache, torch.where(is_seen_TL, slots_TL, 0))
        group = spec.num_heads // spec.num_kv_heads
        scores_THL = (q_THD[:, None] * k_TLGD.repeat_interleave(group, 2)).sum(-1).transpose(1, 2) * spec.scale
        weights_THL = scores_THL.masked_fill(~is_seen_TL[:, None], -1e30).softmax(-1)
        return (weights_THL[..., None] * v_TLGD.repeat_interleave(group, 2).transpose(1, 2)).sum(2)


class DecodeBackend(TableBackend):
    name = "decode"
    graph_support = "decode"


class EagerBackend(TableBackend):
    name = "eager"
    graph_support = "none"


def row_by_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product whose bits do not depend on how many rows there are."""
    out = (x[..., None, :] * weight).sum(-1)
    return out if bias is None else out + bias


@contextmanager
def own_arithmetic() -> Iterator[None]:
    """Inside, models have these products, and the back ends above are found by name."""
    made = {kind.name: kind() for kind in (TableBackend, DecodeBackend, EagerBackend)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", row_by_row)
        patch.setattr("halfbyte.kernels.attention.selection.get_backend", lambda name: made.get(name) or get_backend(name))
        yield


def configuration(*, vocab_size: int = VOCAB_SIZE, **options: Any) -> Any:
    facts = ModelFacts(
        architecture="LlamaForCausalLM",
        dtype="float32",
        max_position=MAX_LEN,
        vocab_size=vocab_size,
        layer_windows=(6, None),
    )
    given = {"dtype": "float32", "block_size": BLOCK_SIZE, "max_num_seqs": 9, "max_num_batched_tokens": 24, **options}
    return resolve(EngineOptions(**given), facts, platform_named("sm90"), attention_backends=("table",))


def make_runner(
    device: Any, backend: type[TableBackend] = TableBackend, *, vocab_size: int = VOCAB_SIZE, **options: Any
) -> ModelRunner:
    """A runner of a tiny random model with one windowed and one full layer; its graphs are captured."""
    decoder = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_position=MAX_LEN,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        layer_windows=(6, None),
        attention_scale=0.5,
    )
    model, _ = load_model(None, decoder, "float32", "cpu", "dummy", backend())  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # far from uniform logits, so that a wrong read changes the argmax
        model.embed_tokens.weight[POISON] = torch.nan
    config = configuration(vocab_size=vocab_size, **options)
    adapters = None if config.lora is None else attach_adapters(model, config.lora, "float32")
    runner = ModelRunner(config, model, model.backend, device=device, adapters=adapters)
    runner.allocate_cache(200, MAX_LEN)
    runner.capture_graphs()
    return runner


class Driver:
    """A minimal scheduler whose steps are strict; `launch` does not wait. adapter_of: of requests that have one, by name."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.device: Any = runner.device
        self.next_block = 1
        self.held: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.adapter_of: dict[str, int] = {}

    def launch(self, counts: dict[str, int], enter: dict[str, tuple[list[int], SamplingParams]] | None = None) -> PendingOutput:
        scheduled = SchedulerOutput(num_scheduled_tokens=counts)
        for name, count in counts.items():
            start = self.computed.setdefault(name, 0)
            blocks = self._grow(name, start + count)
            if name in (enter or {}):
                tokens, params = enter[name]  # type: ignore[index]
                row = NewRow(name, tokens, len(tokens), start, blocks, params, frozenset({3}))
                row.adapter_id = self.adapter_of.get(name, 0)
                scheduled.new_rows.append(row)
            else:
                scheduled.grown_rows.append(GrownRow(name, start, blocks))
            self.computed[name] += count
        return self.run(scheduled)

    def run(self, scheduled: SchedulerOutput, mask: np.ndarray | None = None) -> PendingOutput:
        with self.device.step():
            self.runner.execute(scheduled)
            return self.runner.sample(mask)

    def step(self, counts: dict[str, int], enter: dict[str, tuple[list[int], SamplingParams]] | None = None) -> ModelRunnerOutput:
        return self.launch(counts, enter).result()

    def _grow(self, name: str, num_tokens: int) -> list[list[int]]:
        held = self.held.get(name, 0)
        missing = max(0, -(-num_tokens // BLOCK_SIZE) - held)
        self.held[name] = held + missing
        tables = []
        for _ in self.runner.layout.groups:
            tables.append(list(range(self.next_block, self.next_block + missing)))
            self.next_block += missing
        return tables
