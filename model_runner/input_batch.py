"""One step's ragged batch: which rows, which of their tokens, and the attention metadata of each KV group.

The host knows all counts; it sends one small table per step, from which the device gathers the rest (`InputKernels`). Knows
rows and block tables; knows no model. Called by the runner and the forward pass.

Shape letters: R requests of the batch, T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from halfbyte.kernels.attention.base import AttentionMetadata, FirstTokens
from halfbyte.kvcache.spec import KVGroup
from halfbyte.model_runner.block_tables import BlockTables
from halfbyte.model_runner.input_kernels import StepInputs
from halfbyte.model_runner.request_rows import RequestRows


@dataclass(frozen=True, slots=True)
class Counts:
    """What the host knows of a batch. Where a graph stands for many batches: what none of them exceeds.

    has_adapters: whether a request has one.
    """

    num_tokens: int
    query_lens: list[int]
    seq_lens: list[int]
    has_adapters: bool = False


@dataclass(slots=True)
class InputBatch:
    """The batch in its order, on the host.

    row_R: each request's row; first_R, last_R: its first and last token of the step; samples_R: whether it samples, which is
    when all known tokens are computed with this step.
    """

    request_ids: list[str]
    row_R: np.ndarray
    num_scheduled_R: np.ndarray
    num_computed_R: np.ndarray
    first_R: np.ndarray
    last_R: np.ndarray
    samples_R: np.ndarray
    counts: Counts

    def table(self) -> np.ndarray:
        """What the device needs of it, int64 [5, R]; see `InputKernels.step_inputs`."""
        return np.stack([self.row_R, self.num_scheduled_R, self.num_computed_R, self.first_R, self.last_R + 1])

    def padded_table(self, num_requests: int, spare_row: int) -> np.ndarray:
        """The same, filled up to `num_requests` with requests of the spare row."""
        table = padding(num_requests, spare_row, self.counts.num_tokens)
        table[:, : len(self.row_R)] = self.table()
        return table


def padding(num_requests: int, spare_row: int, num_tokens: int = 0) -> np.ndarray:
    """The table of requests without tokens, after `num_tokens` of others."""
    table = np.zeros((5, num_requests), dtype=np.int64)
    table[0], table[3:] = spare_row, num_tokens
    return table


def make_batch(rows: RequestRows, num_scheduled_tokens: Mapping[str, int]) -> InputBatch:
    row_R = rows.index(num_scheduled_tokens)
    num_scheduled_R = np.fromiter(num_scheduled_tokens.values(), dtype=np.int64, count=len(row_R))
    num_computed_R = rows.num_computed_tokens[row_R]
    seq_len_R = num_computed_R + num_scheduled_R
    end_R = np.cumsum(num_scheduled_R)
    return InputBatch(
        request_ids=list(num_scheduled_tokens),
        row_R=row_R,
        num_scheduled_R=num_scheduled_R,
        num_computed_R=num_computed_R,
        first_R=end_R - num_scheduled_R,
        last_R=end_R - 1,
        samples_R=seq_len_R == rows.num_tokens[row_R],
        counts=Counts(int(end_R[-1]), num_scheduled_R.tolist(), seq_len_R.tolist(), bool(rows.seat_of_row[row_R].any())),
    )


def attention_metadata(counts: Counts, inputs: StepInputs, tables: BlockTables, index: int, group: KVGroup) -> AttentionMetadata:
    """What attention needs to know of KV group number `index`."""
    first = None
    if group.first_tokens:
        first = FirstTokens(group.first_tokens, group.first_block_size, tables.first_slots(index, inputs))
    max_seq_len = max(counts.seq_lens)
    return AttentionMetadata(
        query_start_loc=inputs.query_start_loc,
        seq_lens=inputs.seq_lens_R,
        block_table=tables.gather(index, inputs, max_seq_len),
        slot_mapping=tables.slots(index, inputs),
        block_size=group.block_size,
        query_lens_host=counts.query_lens,
        seq_lens_host=counts.seq_lens,
        max_query_len=max(counts.query_lens),
        max_seq_len=max_seq_len,
        num_decodes=counts.query_lens.count(1),
        group=index,
        max_context_len=tables.max_model_len,
        first=first,
    )
