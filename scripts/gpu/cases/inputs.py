"""Preparing a step: edits of rows, positions and tokens, slots, block tables.

Shape letters: R requests, T tokens, N edits, W entries of a table.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from halfbyte.kernels.triton import input_batch
from halfbyte.kvcache.spec import KVGroup
from halfbyte.platform import Platform
from scripts.gpu.cases.case import Case, indices, numbers

ROWS, MAX_TOKENS, ENTRIES, REQUESTS, NUM_TOKENS, EDITS = 65, 8192, 512, 24, 48, 24
_GROUPS = {"": KVGroup((0,), None, 16), " first tokens": KVGroup((0,), None, 64, first_tokens=64, first_block_size=16)}


def input_cases() -> Iterator[Case]:
    yield Case("inputs rows", _rows)
    yield Case("inputs step", _step)
    yield from (_places(name, group) for name, group in _GROUPS.items())


def _rows(platform: Platform) -> None:
    token_ids = numbers(ROWS, MAX_TOKENS, dtype=torch.int32)
    input_batch.write_rows(token_ids, indices(EDITS, 4), numbers(NUM_TOKENS, dtype=torch.int32))
    input_batch.clear_rows(token_ids, indices(EDITS), ENTRIES)


def _step(platform: Platform) -> None:
    i_T, token_ids = indices(NUM_TOKENS), numbers(ROWS, MAX_TOKENS, dtype=torch.int32)
    query_start_loc, seq_lens_R = numbers(REQUESTS + 1, dtype=torch.int32), numbers(REQUESTS, dtype=torch.int32)
    input_batch.step_inputs(indices(5, REQUESTS), token_ids, i_T, i_T, i_T, query_start_loc, seq_lens_R)


def _places(name: str, group: KVGroup) -> Case:
    def launch(platform: Platform) -> None:
        tables = numbers(ROWS, ENTRIES, dtype=torch.int32)
        row_T, positions_T, slots_T = (indices(NUM_TOKENS) for _ in range(3))
        input_batch.slots(tables, group, row_T, positions_T, slots_T)
        if group.first_tokens:
            input_batch.first_slots(tables, group, row_T, positions_T, slots_T)
        seq_lens_R, table_RW = numbers(REQUESTS, dtype=torch.int32), numbers(REQUESTS, ENTRIES, dtype=torch.int32)
        input_batch.gather_tables(tables, group, indices(REQUESTS), seq_lens_R, table_RW)

    return Case(f"inputs places{name}", launch)
