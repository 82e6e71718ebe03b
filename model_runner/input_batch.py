"""One step's ragged batch: which rows, which of their tokens, and the attention metadata of each KV group.

The host knows all counts; it sends one small table per step, and the tokens are gathered on the device from rows and block
tables, in whole tensors. Knows rows and block tables; knows no model. Called by the runner.

Shape letters: R requests of the batch, T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halfbyte.kernels.attention.base import AttentionMetadata, FirstTokens
from halfbyte.kvcache.spec import KVGroup
from halfbyte.model_runner.block_tables import BlockTables
from halfbyte.model_runner.request_rows import RequestRows


@dataclass(slots=True)
class InputBatch:
    """The batch in its order: counts on the host (numpy), tokens on the device.

    row_R: each request's row; first_R, last_R: its first and last token of the step; samples_R: whether it samples, which is
    when all known tokens are computed with this step. idx_mapping is row_R on the device.
    """

    request_ids: list[str]
    row_R: np.ndarray
    num_scheduled_R: np.ndarray
    num_computed_R: np.ndarray
    first_R: np.ndarray
    last_R: np.ndarray
    samples_R: np.ndarray
    idx_mapping_R: Tensor
    query_start_loc: Tensor
    seq_lens_R: Tensor
    row_T: Tensor
    positions_T: Tensor
    token_ids_T: Tensor


def make_batch(rows: RequestRows, num_scheduled_tokens: Mapping[str, int], device: torch.device) -> InputBatch:
    row_R = rows.index(num_scheduled_tokens)
    num_scheduled_R = np.fromiter(num_scheduled_tokens.values(), dtype=np.int64, count=len(row_R))
    num_computed_R = rows.num_computed_tokens[row_R]
    end_R = np.cumsum(num_scheduled_R)
    first_R = end_R - num_scheduled_R
    num_tokens = int(end_R[-1])

    table = torch.from_numpy(np.stack([row_R, num_scheduled_R, num_computed_R, first_R, end_R])).to(device)
    idx_mapping_R, scheduled_R, computed_R, start_R, stop_R = table
    request_T = torch.repeat_interleave(scheduled_R, output_size=num_tokens)
    row_T = idx_mapping_R[request_T]
    positions_T = torch.arange(num_tokens, device=device) + (computed_R - start_R)[request_T]
    return InputBatch(
        request_ids=list(num_scheduled_tokens),
        row_R=row_R,
        num_scheduled_R=num_scheduled_R,
        num_computed_R=num_computed_R,
        first_R=first_R,
        last_R=end_R - 1,
        samples_R=num_computed_R + num_scheduled_R == rows.num_tokens[row_R],
        idx_mapping_R=idx_mapping_R,
        query_start_loc=torch.cat([start_R[:1], stop_R]).int(),
        seq_lens_R=(computed_R + scheduled_R).int(),
        row_T=row_T,
        positions_T=positions_T,
        token_ids_T=rows.token_ids[row_T, positions_T].long(),
    )


def attention_metadata(batch: InputBatch, tables: BlockTables, index: int, group: KVGroup) -> AttentionMetadata:
    """What attention needs to know of KV group number `index`."""
    seq_len_R = batch.num_computed_R + batch.num_scheduled_R
    max_seq_len = int(seq_len_R.max())
    first = None
    if group.first_tokens:
        slots_T = tables.first_slots(index, batch.row_T, batch.positions_T)
        first = FirstTokens(group.first_tokens, group.first_block_size, slots_T)
    return AttentionMetadata(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens_R,
        block_table=tables.gather(index, batch.idx_mapping_R, max_seq_len),
        slot_mapping=tables.slots(index, batch.row_T, batch.positions_T),
        block_size=group.block_size,
        query_lens_host=batch.num_scheduled_R.tolist(),
        seq_lens_host=seq_len_R.tolist(),
        max_query_len=int(batch.num_scheduled_R.max()),
        max_seq_len=max_seq_len,
        num_decodes=int((batch.num_scheduled_R == 1).sum()),
        first=first,
    )
