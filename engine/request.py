"""The scheduler's view of one request, and the queue of those that wait.

Knows tokens and counts; knows no text, no device and no policy beyond the order of the queue. Owned by the scheduler, which
alone changes it; the KV cache manager reads it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from halfbyte.engine.grammar.constraint import RequestConstraint
from halfbyte.types import EngineOutput, EngineRequest, FinishReason, TokenLogprobs


class RequestStatus(Enum):
    """WAITING: holds no blocks and no row. PREEMPTED: the same, after it had some. RUNNING: in the runner."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A request from its arrival to its last token. `token_ids` is the prompt and the outputs.

    max_len: how many those may become. num_in_flight_tokens: sampled by steps whose results have not arrived; they follow
    token_ids, their values are unknown. num_computed_tokens: leading tokens whose KV is in its blocks, or will be when the
    steps in flight are done. num_cached_tokens: how many of those the prefix cache gave when it first ran. rank: its place in
    the order of service; smaller is served first and preempted last. prompt_logprobs: collected over the chunks of the prompt,
    delivered with the first token; pooled: the same for vectors. constraint: has followed the outputs in token_ids.
    awaited_unit: digest of the last unit of its prefix that a running request computes for both.
    """

    source: EngineRequest
    rank: tuple[int, float, int]
    token_ids: list[int]
    max_len: int
    stop_token_ids: frozenset[int]
    constraint: RequestConstraint | None = None
    status: RequestStatus = RequestStatus.WAITING
    num_in_flight_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    scheduled_s: float | None = None
    was_reported: bool = False
    awaited_unit: bytes | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: bytes = b""

    @property
    def request_id(self) -> str:
        return self.source.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.source.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known ones and those in flight."""
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def num_open_tokens(self) -> int:
        """Those that are to be computed: none when the last that it may have is known or in flight."""
        num_tokens = self.num_tokens
        return num_tokens - self.num_computed_tokens if num_tokens < self.max_len else 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.source.prompt_token_ids)

    def report(self, token_ids: list[int], finish_reason: FinishReason | None, pooled: bytes | None = None) -> EngineOutput:
        """An output of it; its first one says when it was first scheduled."""
        scheduled_s = None if self.was_reported else self.scheduled_s
        self.was_reported = True
        return EngineOutput(
            request_id=self.request_id,
            new_token_ids=token_ids,
            finish_reason=finish_reason,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            scheduled_s=scheduled_s,
            pooled=pooled,
        )

    @property
    def cache_salt(self) -> str | None:
        return self.source.cache_salt

    @property
    def skip_prefix_cache(self) -> bool:
        """Prompt logprobs need the logits of every prompt position, so until they are delivered nothing is skipped; some kinds
        of pooling need every hidden state."""
        if (pooling := self.source.pooling) is not None:
            return pooling.reads_all
        return self.source.sampling.prompt_logprobs is not None and not self.num_output_tokens

    def drop_undelivered(self) -> None:
        """Forget what was collected over the prompt's chunks: they are computed again."""
        self.prompt_logprobs.clear()
        self.pooled = b""


class WaitingQueue:
    """Requests without blocks in the order of their rank. A preempted request keeps its rank, so it returns to the front."""

    def __init__(self) -> None:
        self._members: dict[str, Request] = {}
        self._heap: list[tuple[tuple[int, float, int], str]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._members.values(), key=lambda request: request.rank))

    def push(self, request: Request) -> None:
        if not self._members:
            self._heap.clear()
        self._members[request.request_id] = request
        heapq.heappush(self._heap, (request.rank, request.request_id))

    def first(self) -> Request:
        """The request to serve next; the queue must not be empty. Entries of removed requests are dropped on the way."""
        while True:
            rank, request_id = self._heap[0]
            request = self._members.get(request_id)
            if request is not None and request.rank == rank:
                return request
            heapq.heappop(self._heap)

    def remove(self, request: Request) -> None:
        del self._members[request.request_id]
