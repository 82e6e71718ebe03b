"""A step's ragged batch as FlashInfer's kernels take it: decodes and prefills apart, tables also as runs of pages.

What the kernels plan on the host comes from the host lists, what they read on the device is made there from one small table:
nothing is read back. Knows no kernel and no layer; made once per step and KV group by `backend`.

Shape letters: R requests of a part, P pages of a part, W entries of a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from halfbyte.kernels.attention.base import AttentionMetadata


class Part:
    """The requests of one phase, in the step's order. Where these are all of the batch, nothing is sent to the device for xqa and
    trtllm decodes, whose calls a graph can hold.

    rows: their tokens among the step's, a slice where they lie side by side. Pages that no query of a request can see, because
    they slid out of the window, are not listed in `page_indptr` and `pages`.
    """

    def __init__(self, metadata: AttentionMetadata, places: list[int], window: int | None) -> None:
        """places: of the part's requests in the batch."""
        lens = [(metadata.query_lens_host[place], metadata.seq_lens_host[place]) for place in places]
        token_starts = _starts(metadata.query_lens_host)
        size = metadata.block_size
        firsts = [0 if window is None else max(0, seq - query + 1 - window) // size for query, seq in lens]
        counts = [-(-seq // size) - first for (_, seq), first in zip(lens, firsts, strict=True)]
        self._metadata = metadata
        self._is_all = len(places) == len(metadata.query_lens_host) == len(metadata.block_table)
        self.num_requests = len(places)
        self.max_query_len = max(query for query, _ in lens)
        self.query_indptr = _indptr([query for query, _ in lens])  # int32 [R + 1], on the host, as the two below
        self.page_indptr = _indptr(counts)
        self.last_page_lens = torch.tensor([(seq - 1) % size + 1 for _, seq in lens], dtype=torch.int32)
        begin, num_tokens = token_starts[places[0]], sum(query for query, _ in lens)
        self._num_pages = sum(counts)
        is_run = places[-1] - places[0] + 1 == len(places)
        self._columns = [places, [token_starts[place] for place in places], [query for query, _ in lens], firsts, counts]
        self.rows = slice(begin, begin + num_tokens) if is_run else self._scattered_rows(num_tokens)

    @cached_property
    def _table(self) -> Tensor:
        """int64 [5, R], on the device. Not pinned: the driver has a copy of so few bytes before the call returns."""
        return torch.tensor(self._columns, dtype=torch.int64).to(self._metadata.block_table.device, non_blocking=True)

    def _scattered_rows(self, num_tokens: int) -> Tensor:
        _, start_R, query_R, _, _ = self._table
        return _ranges(start_R, query_R, num_tokens)

    @cached_property
    def pages(self) -> Tensor:
        """int32 [P], on the device: of each request in turn."""
        place_R, _, _, first_R, count_R = self._table
        place_P = torch.repeat_interleave(place_R, count_R, output_size=self._num_pages)
        return self._metadata.block_table[place_P, _ranges(first_R, count_R, self._num_pages)]

    @cached_property
    def block_table(self) -> Tensor:
        """int32 [R, W], on the device."""
        return self._metadata.block_table if self._is_all else self._metadata.block_table[self._table[0]]

    @cached_property
    def seq_lens(self) -> Tensor:
        """int32 [R], on the device."""
        return self._metadata.seq_lens if self._is_all else self._metadata.seq_lens[self._table[0]]

    @cached_property
    def query_starts(self) -> Tensor:
        """int32 [R + 1], on the device: where each request's queries begin among the part's."""
        return _running_sum(self._table[2])

    @cached_property
    def seq_starts(self) -> Tensor:
        """int32 [R + 1], on the device: the same of contexts."""
        return _running_sum(self.seq_lens)

    @property
    def max_seq_len(self) -> int:
        """A bound: what the table can hold."""
        return self._metadata.block_table.shape[1] * self._metadata.block_size


@dataclass(slots=True)
class StepPlan:
    """group, window: of the layers. planned: what kernels that plan on the host made of a part, by phase and kind of layer."""

    group: int
    window: int | None
    decodes: Part | None
    prefills: Part | None
    planned: dict[Any, Any] = field(default_factory=dict)


def split(metadata: AttentionMetadata, window: int | None) -> StepPlan:
    """A request with one token in this step is a decode, whatever it was before."""
    lens = metadata.query_lens_host
    decodes = [place for place, num in enumerate(lens) if num == 1]
    prefills = [place for place, num in enumerate(lens) if num > 1]
    first, second = (Part(metadata, places, window) if places else None for places in (decodes, prefills))
    return StepPlan(metadata.group, window, first, second)


def _starts(lens: list[int]) -> list[int]:
    starts = [0]
    for length in lens:
        starts.append(starts[-1] + length)
    return starts


def _indptr(lens: list[int]) -> Tensor:
    return torch.tensor(_starts(lens), dtype=torch.int32)


def _ranges(first_R: Tensor, num_R: Tensor, total: int) -> Tensor:
    """first .. first + num of each, one after the other, [total]; total: the sum of num_R, which the host knows."""
    shift_R = first_R - (num_R.cumsum(0) - num_R)
    return torch.arange(total, device=first_R.device) + torch.repeat_interleave(shift_R, num_R, output_size=total)


def _running_sum(lens_R: Tensor) -> Tensor:
    return torch.nn.functional.pad(lens_R.cumsum(0), (1, 0)).int()
