"""`EncoderRunner`: one device, one encoder, no cache. Texts come whole, and leave as vectors in the same step.

Keeps nothing between steps, so that there are no rows, no blocks, and nothing to release. Knows nothing of requests' lives, text
or sockets. Driven by the engine core, one thread.

Shape letters: T tokens of the step, E hidden, N texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halfbyte.config import EngineConfig
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.device import Accelerator, make_device
from halfbyte.model_runner.encoder_config import EncoderConfig
from halfbyte.model_runner.layers.encoder import Texts, load_encoder
from halfbyte.model_runner.pending import PendingStep
from halfbyte.model_runner.pooling_head import PoolingHead
from halfbyte.model_runner.pooling_plan import PoolingPlan
from halfbyte.model_runner.source import ModelFiles
from halfbyte.platform import trim_heap
from halfbyte.types import MemoryPart, ModelRunnerOutput, NewRow, PendingOutput, SamplingParams, SchedulerOutput


class EncoderRunner:
    """Implements `halfbyte.types.Runner`. report: lines for the start-up log."""

    def __init__(
        self, config: EngineConfig, files: ModelFiles, encoder: EncoderConfig | DecoderConfig, plan: PoolingPlan
    ) -> None:
        settings = config.model
        self._device = make_device(settings.device)
        if settings.device == "cpu":
            torch.set_num_threads(settings.num_threads)
        place, load_format = self._device.place, settings.load_format
        self._load = partial(load_encoder, files, encoder, settings.dtype, place, load_format)
        self._model: nn.Module | None
        self._model, loaded = self._load()
        self._offloaded = False
        self._plan = plan
        self.head = PoolingHead(plan, files, encoder.hidden_size, place, dummy=load_format == "dummy")
        self._step: tuple[list[NewRow], Tensor] | None = None
        threads = f", {settings.num_threads} threads" if settings.device == "cpu" else ""
        self.report = [
            f"kernels: torch{threads}; linear {settings.dtype}; attention over whole texts, no KV cache",
            f"weights: {loaded.num_tensors} tensors, {loaded.num_bytes:,} bytes",
        ]
        heads = tuple(step.prefix for step in plan.steps)
        if unused := [name for name in loaded.unused if not name.startswith(heads or ("\0",))]:
            self.report.append(f"weights: {len(unused)} tensors of the file are not used: {', '.join(unused[:5])}")

    @torch.inference_mode()
    def execute(self, scheduled: SchedulerOutput) -> None:
        self._step = None
        if not scheduled.num_scheduled_tokens:
            return
        entered = {row.request_id: row for row in scheduled.new_rows}
        rows = [entered[request_id] for request_id in scheduled.num_scheduled_tokens]
        for row in rows:
            assert scheduled.num_scheduled_tokens[row.request_id] == len(row.token_ids), "texts come whole"
        assert self._model is not None, "a step was asked of a runner that sleeps"
        self._step = rows, self._model(self._texts(rows))

    @torch.inference_mode()
    def sample(self, grammar_mask: Any | None = None) -> PendingOutput:
        if self._step is None:
            return ModelRunnerOutput([], [], [])
        (rows, hidden_TE), self._step = self._step, None
        pending = PendingStep([row.request_id for row in rows])
        owners, asked, states = [], [], []
        end = 0
        for place, row in enumerate(rows):
            assert row.pooling is not None, "an encoder has no other requests"
            start, end = end, end + len(row.token_ids)
            part_TE = hidden_TE[start:end]
            if row.pooling.task != "token_embed":
                part_TE = self._state(part_TE)
            states.append(part_TE)
            owners += [place] * len(part_TE)
            asked += [row.pooling] * len(part_TE)
        self.head.send(pending, owners, asked, torch.cat(states))
        pending.send(self._device)
        return pending

    def warm_up(self) -> None:
        """A step of a text that nobody sent, so that the first real one is not the slow one."""
        row = NewRow("dummy", [0, 0], 2, 0, [], SamplingParams(), frozenset(), pooling=self.head.ask)
        self.execute(SchedulerOutput(new_rows=[row], num_scheduled_tokens={"dummy": 2}))
        self.sample().result()

    @property
    def missing(self) -> tuple[MemoryPart, ...]:
        """The weights, between `sleep` and `wake_up`. There is no cache that could be missing."""
        return ("weights",) if self._model is None or self._offloaded else ()

    def sleep(self, level: int) -> None:
        """As a decoder's runner does it; at level 1 a CPU has nothing to give back."""
        self._step = None
        if level == 2:
            self._model, self._offloaded = None, False
        elif not self._device.is_host and self._model is not None:
            self._model.to("cpu")
            self._offloaded = True
        if isinstance(self._device, Accelerator):
            self._device.trim()
        trim_heap()

    def wake_up(self, part: MemoryPart) -> None:
        """Fetch the weights from the host or from the checkpoint."""
        if part not in self.missing:
            return
        if self._model is None:
            self._model, _ = self._load()
        else:
            self._model.to(self._device.place)
        self._offloaded = False
        self.warm_up()

    def close(self) -> None:
        """Drop the model."""
        self._model = None

    def _state(self, text_TE: Tensor) -> Tensor:
        """[1, E]: what the text's states come to."""
        match self._plan.mode:
            case "cls":
                return text_TE[:1]
            case "last":
                return text_TE[-1:]
        return text_TE.float().mean(0, keepdim=True)

    def _texts(self, rows: Sequence[NewRow]) -> Texts:
        lengths = [len(row.token_ids) for row in rows]
        types = np.zeros(sum(lengths), dtype=np.int64)
        starts_of: dict[int, list[int]] = {}
        start = 0
        for row, length in zip(rows, lengths, strict=True):
            if row.pooling is not None and row.pooling.second_from is not None:
                types[start + row.pooling.second_from : start + length] = 1
            starts_of.setdefault(length, []).append(start)
            start += length
        upload = self._device.upload
        return Texts(
            token_ids_T=upload(np.concatenate([np.array(row.token_ids, dtype=np.int64) for row in rows])),
            positions_T=upload(np.concatenate([np.arange(length) for length in lengths])),
            types_T=upload(types),
            places={length: upload(np.array(starts)[:, None] + np.arange(length)) for length, starts in starts_of.items()},
        )
