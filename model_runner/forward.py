"""The forward pass of a step: from its table on the device to hidden states.

Everything that depends on the step comes from the table, the rows and the block tables, so that this may be captured in a graph
with a table of its own. Knows the model, its rows and its cache; knows no requests. Called by the runner and its graphs.

Shape letters: R requests of the batch, T tokens of the step, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from halfbyte.kernels.attention.base import AttentionBackend
from halfbyte.kvcache.spec import KVLayout
from halfbyte.kvcache.tensors import LayerCache
from halfbyte.model_runner.block_tables import BlockTables
from halfbyte.model_runner.input_batch import Counts, attention_metadata
from halfbyte.model_runner.input_kernels import InputKernels, StepInputs
from halfbyte.model_runner.layers.context import ForwardContext
from halfbyte.model_runner.request_rows import RequestRows

# token_ids_T, positions_T and a context -> hidden_TE
ForwardModel = Callable[[Tensor, Tensor, ForwardContext], Tensor]


@dataclass(slots=True)
class Forward:
    """model: writes K and V into `caches`. context: what it is given to attend with."""

    model: ForwardModel
    backend: AttentionBackend
    layout: KVLayout
    caches: list[LayerCache]
    rows: RequestRows
    tables: BlockTables
    kernels: InputKernels
    context: type[ForwardContext] = ForwardContext

    def __call__(self, table_5R: Tensor, counts: Counts, *, is_padded: bool = False) -> Tensor:
        """Hidden states [T, E] after the final norm."""
        inputs = self.inputs(table_5R, counts.num_tokens, is_padded=is_padded)
        return self.model(inputs.token_ids_T, inputs.positions_T, self.context_of(inputs, counts))

    def inputs(self, table_5R: Tensor, num_tokens: int, *, is_padded: bool = False) -> StepInputs:
        return self.kernels.step_inputs(table_5R, self.rows.token_ids, num_tokens, is_padded=is_padded)

    def context_of(self, inputs: StepInputs, counts: Counts) -> ForwardContext:
        """With the metadata of each KV group, prepared by the back end."""
        metadata = [attention_metadata(counts, inputs, self.tables, *group) for group in enumerate(self.layout.groups)]
        for one, group in zip(metadata, self.layout.groups, strict=True):
            self.backend.prepare(one, group.sliding_window)
        seat_T = self.rows.seats(inputs.row_T) if counts.has_adapters else None
        return self.context(metadata, self.caches, self.layout.group_of_layer, seat_T=seat_T)
