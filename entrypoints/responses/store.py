"""Responses that are kept for their next turn: in memory, bounded in bytes and number, forgotten some time after their last use.

A response belongs to the API key that made it; to all others it does not exist. What is done lies here as JSON. Knows no HTTP, no
engine, and nothing of how a response is made. Used on the event loop alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import msgspec

from halfbyte.entrypoints.responses.items import response_of
from halfbyte.entrypoints.responses.wire import FunctionCallItem, Item, OutputItem, Response
from halfbyte.errors import NotFoundError, OverloadedError, UserError

MAX_RESPONSES = 16_384
ENTRY_BYTES = 2048  # what Python needs for an entry and its place in the tables, about
EVENT_BYTES = 48  # for an event, beside its text
_items = msgspec.json.Decoder(list[Item])
_encoder = msgspec.json.Encoder()


class _Output(msgspec.Struct):
    """The part of a response object that its next turn needs."""

    status: str
    output: list[OutputItem]


_output = msgspec.json.Decoder(_Output)


@dataclass(slots=True, eq=False)
class Entry:
    """One response. owner: the digest of its API key, b"" where there are no keys.

    items: its input as JSON. previous: the id of the response that it continues. answer: the response object as JSON, once it is
    done. events: of its stream, where these are kept.
    """

    id: str
    owner: bytes
    previous: str | None
    items: bytes
    background: bool = False
    live: Response | None = None  # while it is made
    answer: bytes = b""
    events: list[bytes] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    used_s: float = 0.0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_bytes(self) -> int:
        events = sum(map(len, self.events)) + EVENT_BYTES * len(self.events)
        return ENTRY_BYTES + len(self.items) + len(self.answer) + events

    @property
    def body(self) -> bytes:
        """The response object as it is now."""
        return self.answer if self.live is None else _encoder.encode(self.live)

    def tell(self, event: bytes) -> None:
        """Keep one event, and wake those who follow."""
        self.events.append(event)
        self._wake()

    def finish(self, response: Response) -> None:
        self.answer, self.live, self.task = _encoder.encode(response), None, None
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """The events from number `start` on, as they come, until the response is done."""
        while True:
            news = self._news
            if start < len(self.events):
                events = self.events[start:]
                start += len(events)
                yield b"".join(events)
            elif self.live is None:
                return
            else:
                await news.wait()

    def all_items(self) -> tuple[list[Item], str, list[OutputItem]]:
        """(input, status, output)."""
        told = _output.decode(self.body)
        return _items.decode(self.items), told.status, told.output


class ResponseStore:
    """max_bytes: 0 keeps nothing. ttl_s: how long a response is kept after its last use. clock: seconds."""

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._done: OrderedDict[str, Entry] = OrderedDict()  # the one that was used last stands last
        self._running: dict[str, Entry] = {}
        self._done_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of what is done; what is still being made is not kept yet."""
        return self._done_bytes

    def __len__(self) -> int:
        return len(self._done) + len(self._running)

    def check_room(self, entry: Entry) -> None:
        """UserError when this input is more than can ever be kept; OverloadedError when too many are in progress beside it."""
        items = entry.items
        if len(items) + ENTRY_BYTES > self.max_bytes:
            raise UserError(
                f"the input has {len(items)} bytes, more than --responses-store keeps ({self.max_bytes}); send store=false",
                param="store",
            )
        if entry.background:
            used = sum(len(running.items) + ENTRY_BYTES for running in self._running.values())
            if used + len(items) + ENTRY_BYTES > self.max_bytes or len(self._running) >= MAX_RESPONSES:
                raise OverloadedError("too many background responses are in progress")

    def open(self, entry: Entry) -> None:
        """Keep a response that is being made: it is neither evicted nor forgotten."""
        self._running[entry.id] = entry

    def keep(self, entry: Entry) -> None:
        """Keep a response that is done. The least lately used ones make room for it."""
        if self._running.pop(entry.id, entry) is not entry:
            return
        self._forget_old()
        entry.used_s = self._clock()
        self._done[entry.id] = entry
        self._done_bytes += entry.num_bytes
        while len(self._done) > 1 and (self._done_bytes > self.max_bytes or len(self) > MAX_RESPONSES):
            self._drop(next(iter(self._done)))

    def find(self, owner: bytes, response_id: str, param: str | None = None) -> Entry:
        """NotFoundError for one that is not kept (any more), or that another key made."""
        self._forget_old()
        entry = self._running.get(response_id) or self._done.get(response_id)
        if entry is None or entry.owner != owner:
            hint = "" if self.max_bytes else "; this server keeps none (--responses-store 0)"
            raise NotFoundError(f"no response {response_id[:80]!r} is kept here{hint}", param=param)
        if entry.live is None:
            entry.used_s = self._clock()
            self._done.move_to_end(response_id)
        return entry

    def remove(self, entry: Entry) -> None:
        if self._running.pop(entry.id, None) is None and entry.id in self._done:
            self._drop(entry.id)

    def conversation(self, owner: bytes, response_id: str) -> list[Item]:
        """The items up to and with this response's own. Calls that were cut are left out: nobody could answer them."""
        turns: list[list[Item]] = []
        following: str | None = response_id
        while following is not None:
            entry = self.find(owner, following, "previous_response_id")
            given, status, output = entry.all_items()
            if status not in ("completed", "incomplete"):
                raise UserError(
                    f"response {following!r} is {status}; only one that is completed or incomplete can be continued",
                    param="previous_response_id",
                )
            turns.append([*given, *(i for i in output if not isinstance(i, FunctionCallItem) or i.status == "completed")])
            following = entry.previous
        return [item for turn in reversed(turns) for item in turn]

    def item(self, owner: bytes, item_id: str) -> Item:
        """An item of a response that is kept. NotFoundError if there is none."""
        response_id = response_of(item_id)
        if response_id is not None:
            given, _, output = self.find(owner, response_id, "input").all_items()
            for item in (*given, *output):
                if item.id == item_id:
                    return item
        raise NotFoundError(f"no item {item_id[:80]!r} is kept here", param="input")

    def _forget_old(self) -> None:
        oldest = self._clock() - self._ttl_s
        while self._done and next(iter(self._done.values())).used_s <= oldest:
            self._drop(next(iter(self._done)))

    def _drop(self, response_id: str) -> None:
        self._done_bytes -= self._done.pop(response_id).num_bytes
