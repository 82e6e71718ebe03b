"""One generation as its consumer sees it: an asynchronous iterator over the deltas of its n sequences.

Made by `AsyncEngine.generate`, fed by the engine's dispatcher on the loop's thread. Leaving it early (`aclose`, or the
end of the consumer's task) aborts what is still running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from halfbyte.adapters import LoadedAdapter
from halfbyte.engine.metrics import RequestMetrics
from halfbyte.engine.output_processor import SequenceDelta


class Generation:
    """Yields SequenceDelta until each of `request_ids` has had its finish, or raises what ended it."""

    def __init__(
        self,
        request_ids: list[str],
        metrics: RequestMetrics,
        abandon: Callable[[Generation], None],
        adapter: LoadedAdapter | None = None,
    ) -> None:
        self.request_ids = request_ids
        self.metrics = metrics
        self.adapter = adapter
        self.started = False
        self._num_open = len(request_ids)
        self._deltas: asyncio.Queue[SequenceDelta | Exception] = asyncio.Queue()
        self._abandon = abandon
        self._ended = False

    @property
    def finished(self) -> bool:
        """Every sequence's last delta was delivered (though perhaps not yet consumed)."""
        return self._num_open == 0

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> SequenceDelta:
        if self._ended or (self.finished and self._deltas.empty()):
            raise StopAsyncIteration
        try:
            item = await self._deltas.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(item, Exception):
            self._ended = True
            raise item
        return item

    async def aclose(self) -> None:
        """Stop here: sequences that still run are aborted, and nothing more is yielded."""
        if not self._ended:
            self._ended = True
            self._abandon(self)

    def deliver(self, delta: SequenceDelta) -> None:
        self.started = True
        self._num_open -= delta.finish_reason is not None
        self._deltas.put_nowait(delta)

    def fail(self, error: Exception) -> None:
        self._deltas.put_nowait(error)
