"""The output of a step that the device may still be computing: what is wanted of it is copied once, and read when it is there.

Knows which tensors hold what; computes nothing. Filled by the step's sampling; the engine takes the result.

Shape letters: N rows or positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import numpy as np
from torch import Tensor

from halfbyte.model_runner.device import Device, HostCopy
from halfbyte.model_runner.logprobs import Lookup
from halfbyte.types import ModelRunnerOutput

_Arrays = Sequence[np.ndarray]


class PendingStep:
    """Implements `halfbyte.types.PendingOutput`. Places are those of requests in the batch."""

    def __init__(self, request_ids: list[str]) -> None:
        self._output = ModelRunnerOutput(request_ids, [[] for _ in request_ids], [None] * len(request_ids))
        self._bad: set[int] = set()
        self._tensors: list[Tensor] = []
        self._readers: list[tuple[int, Callable[[_Arrays], None]]] = []
        self._sent: list[HostCopy] = []

    def want_tokens(self, places: list[int], token_N: Tensor, finite_N: Tensor) -> None:
        """The token of each of these requests, which fails alone where its logits were no numbers."""
        self._want([token_N, finite_N], partial(self._read_tokens, places))

    def want_logprobs(self, places: list[int], found: Lookup) -> None:
        """The entries of those requests' tokens."""
        self._want(found.tensors, partial(self._read_logprobs, places, found))

    def want_prompt_logprobs(self, places: list[int], found: Lookup, finite_N: Tensor) -> None:
        """The entries of prompt tokens, each with the request that it belongs to."""
        self._want([finite_N, *found.tensors], partial(self._read_prompt_logprobs, places, found))

    def want_pooled(self, owners: list[int], values_ND: Tensor) -> None:
        """Row i is a vector of request `owners[i]`, which fails alone where it has something else than numbers."""
        self._want([values_ND], partial(self._read_pooled, owners))

    def send(self, device: Device) -> None:
        """Begin to copy what is wanted since the last time; its memory on the device is free when it has arrived."""
        self._sent.append(device.download(self._tensors))
        self._tensors = []

    def result(self) -> ModelRunnerOutput:
        """Wait for all that was sent. A request whose logits were no numbers has no tokens."""
        assert not self._tensors, "what is wanted has been sent"
        arrays = [array for copy in self._sent for array in copy.wait()]
        start = 0
        for count, read in self._readers:
            read(arrays[start : start + count])
            start += count
        self._sent, self._readers = [], []
        output = self._output
        for place in self._bad:
            output.token_ids[place], output.logprobs[place] = [], None
        output.bad_rows = frozenset(output.request_ids[place] for place in self._bad)
        return output

    def _want(self, tensors: Sequence[Tensor], read: Callable[[_Arrays], None]) -> None:
        self._tensors += tensors
        self._readers.append((len(tensors), read))

    def _read_tokens(self, places: list[int], arrays: _Arrays) -> None:
        token_N, finite_N = arrays
        for place, token, is_finite in zip(places, token_N.tolist(), finite_N.tolist(), strict=True):
            self._output.token_ids[place] = [token]
            if not is_finite:
                self._bad.add(place)

    def _read_logprobs(self, places: list[int], found: Lookup, arrays: _Arrays) -> None:
        for place, entry in zip(places, found.entries(arrays), strict=True):
            self._output.logprobs[place] = [entry]

    def _read_pooled(self, owners: list[int], arrays: _Arrays) -> None:
        [values_ND] = arrays
        for place, members in groupby(range(len(owners)), key=owners.__getitem__):  # those of a request lie side by side
            rows = list(members)
            mine = slice(rows[0], rows[-1] + 1)
            self._output.pooled[self._output.request_ids[place]] = values_ND[mine].tobytes()
            if not np.isfinite(values_ND[mine]).all():
                self._bad.add(place)

    def _read_prompt_logprobs(self, places: list[int], found: Lookup, arrays: _Arrays) -> None:
        finite_N, *rest = arrays
        for place, entry, is_finite in zip(places, found.entries(rest), finite_N.tolist(), strict=True):
            self._output.prompt_logprobs.setdefault(self._output.request_ids[place], []).append(entry)
            if not is_finite:
                self._bad.add(place)
