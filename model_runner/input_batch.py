"""One step's ragged batch: which rows, which of their tokens, and the attention metadata of each KV group.

Everything is computed on the host in whole arrays, once per step. Knows rows and block tables; knows no model. Called by the
runner.

Shape letters: R requests of the batch, T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from halfbyte.kernels.attention.base import AttentionMetadata
from halfbyte.model_runner.block_tables import BlockTables
from halfbyte.model_runner.request_rows import RequestRows


@dataclass(slots=True)
class InputBatch:
    """The batch in its order. first_R: each request's first token row of the step; samples_R: whether it samples."""

    request_ids: list[str]
    row_R: np.ndarray
    num_scheduled_R: np.ndarray
    num_computed_R: np.ndarray
    first_R: np.ndarray
    samples_R: np.ndarray
    row_T: np.ndarray
    position_T: np.ndarray
    token_ids_T: Tensor
    positions_T: Tensor

    @property
    def last_R(self) -> np.ndarray:
        """Each request's last token row of the step."""
        return self.first_R + self.num_scheduled_R - 1


def make_batch(rows: RequestRows, num_scheduled_tokens: Mapping[str, int], device: torch.device) -> InputBatch:
    row_R = rows.index(num_scheduled_tokens)
    num_scheduled_R = np.fromiter(num_scheduled_tokens.values(), dtype=np.int64, count=len(row_R))
    num_computed_R = rows.num_computed_tokens[row_R]
    end_R = np.cumsum(num_scheduled_R)
    first_R = end_R - num_scheduled_R
    row_T = np.repeat(row_R, num_scheduled_R)
    position_T = np.arange(int(end_R[-1])) + np.repeat(num_computed_R - first_R, num_scheduled_R)
    token_T = rows.token_ids[row_T, position_T].astype(np.int64)
    return InputBatch(
        request_ids=list(num_scheduled_tokens),
        row_R=row_R,
        num_scheduled_R=num_scheduled_R,
        num_computed_R=num_computed_R,
        first_R=first_R,
        samples_R=num_computed_R + num_scheduled_R == rows.num_tokens[row_R],
        row_T=row_T,
        position_T=position_T,
        token_ids_T=torch.from_numpy(token_T).to(device),
        positions_T=torch.from_numpy(position_T).to(device),
    )


def attention_metadata(
    batch: InputBatch, tables: BlockTables, group: int, block_size: int, device: torch.device
) -> AttentionMetadata:
    seq_len_R = batch.num_computed_R + batch.num_scheduled_R
    max_seq_len = int(seq_len_R.max())
    query_start_loc = np.append(batch.first_R, len(batch.row_T)).astype(np.int32)
    return AttentionMetadata(
        query_start_loc=torch.from_numpy(query_start_loc).to(device),
        seq_lens=torch.from_numpy(seq_len_R.astype(np.int32)).to(device),
        block_table=tables.gather(group, batch.row_R, max_seq_len).to(device),
        slot_mapping=tables.slots(group, batch.row_T, batch.position_T).to(device),
        block_size=block_size,
        query_lens_host=batch.num_scheduled_R.tolist(),
        seq_lens_host=seq_len_R.tolist(),
        max_query_len=int(batch.num_scheduled_R.max()),
        max_seq_len=max_seq_len,
        num_decodes=int((batch.num_scheduled_R == 1).sum()),
    )
