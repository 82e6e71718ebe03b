"""What is kept of responses: bounded in bytes, number and time, and only for whom they belong to."""

from __future__ import annotations

import gc
import tracemalloc
import uuid
from typing import Any

import msgspec
import pytest

from halfbyte.entrypoints.responses import store as module
from halfbyte.entrypoints.responses.items import ItemIds, response_of
from halfbyte.entrypoints.responses.store import ENTRY_BYTES, Entry, ResponseStore
from halfbyte.entrypoints.responses.wire import InputText, MessageItem, OutputText, Response
from halfbyte.errors import NotFoundError, OverloadedError, UserError

REQUIRED = dict.fromkeys(field.name for field in msgspec.structs.fields(Response) if field.required)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def response_of_id(name: str, **fields: Any) -> Response:
    return Response(**(REQUIRED | {"id": name, "created_at": 1, "status": "completed"} | fields))


def entry_of(previous: str | None = None, owner: bytes = b"a", text: str = "x", **fields: Any) -> Entry:
    """A response that is done, and says `text` to `text`."""
    name = f"resp_{uuid.uuid4().hex}"
    ids = ItemIds(name)
    given = [MessageItem(id=ids.new(MessageItem), role="user", content=[InputText(text)])]
    entry = Entry(name, owner, previous, msgspec.json.encode(given))
    said = MessageItem(id=ids.new(MessageItem), role="assistant", content=[OutputText(text)])
    entry.finish(response_of_id(name, **({"output": [said]} | fields)))
    return entry


def test_the_least_lately_used_make_room() -> None:
    store = ResponseStore(3 * (ENTRY_BYTES + 2000), 60, Clock())
    first, *others = [entry_of(text=str(i)) for i in range(3)]
    for entry in (first, *others):
        store.keep(entry)
    before = store.num_bytes
    assert before == sum(entry.num_bytes for entry in (first, *others))
    assert store.find(b"a", first.id) is first
    big = entry_of(text="y" * 1000)
    store.keep(big)
    assert store.num_bytes <= store.max_bytes
    assert store.find(b"a", first.id) is first and store.find(b"a", big.id) is big
    with pytest.raises(NotFoundError):
        store.find(b"a", others[0].id)


def test_what_is_not_used_for_long_is_forgotten() -> None:
    clock = Clock()
    store = ResponseStore(10**6, 60, clock)
    old, used = entry_of(), entry_of()
    running = Entry("resp_running", b"a", None, b"[]", live=response_of_id("resp_running"))
    store.open(running)
    store.keep(old)
    store.keep(used)
    clock.now_s = 59
    store.find(b"a", used.id)
    clock.now_s = 61
    with pytest.raises(NotFoundError):
        store.find(b"a", old.id)
    assert store.find(b"a", used.id) is used and store.find(b"a", "resp_running") is running
    clock.now_s = 1000
    assert store.find(b"a", "resp_running") is running and len(store) == 1 and store.num_bytes == 0


def test_memory_is_flat_over_thousands_of_responses() -> None:
    """Also in Python's own count: the measured bytes are what they really take, within some tens of percent."""
    store = ResponseStore(2_000_000, 60)

    def fill(count: int) -> int:
        for i in range(count):
            entry = entry_of(text=f"{i} " * 100)
            entry.events = [b"event %d" % i * 10 for i in range(20)]
            store.keep(entry)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        full = fill(600)
        assert 0.9 * store.max_bytes < store.num_bytes <= store.max_bytes
        assert full < 1.3 * store.max_bytes
        assert abs(fill(2400) - full) < 0.05 * store.max_bytes
    finally:
        tracemalloc.stop()


def test_the_number_of_responses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RESPONSES", 3)
    store = ResponseStore(10**9, 60)
    for _ in range(10):
        store.keep(entry_of())
    assert len(store) == 3
    for index in range(3):
        store.open(Entry(f"resp_{index}", b"", None, b"[]"))
    store.check_room(Entry("resp_x", b"", None, b"[]"))
    with pytest.raises(OverloadedError):
        store.check_room(Entry("resp_x", b"", None, b"[]", background=True))


def test_a_conversation_is_its_turns_in_order() -> None:
    store = ResponseStore(10**6, 60)
    first = entry_of(text="1")
    second = entry_of(first.id, text="2")
    failed = entry_of(second.id, status="failed")
    for entry in (first, second, failed):
        store.keep(entry)
    texts = [item.content[0].text for item in store.conversation(b"a", second.id) if isinstance(item, MessageItem)]
    assert texts == ["1", "1", "2", "2"]
    with pytest.raises(UserError, match="failed"):
        store.conversation(b"a", failed.id)
    for broken, name in ((b"b", second.id), (b"a", "resp_none")):
        with pytest.raises(NotFoundError) as error:
            store.conversation(broken, name)
        assert error.value.param == "previous_response_id"
    store.remove(first)
    with pytest.raises(NotFoundError, match=first.id):
        store.conversation(b"a", second.id)


def test_an_item_is_found_by_its_name_alone() -> None:
    store = ResponseStore(10**6, 60)
    entry = entry_of(text="1")
    store.keep(entry)
    given, _, output = entry.all_items()
    for item in (*given, *output):
        assert response_of(item.id) == entry.id and store.item(b"a", item.id) == item
        with pytest.raises(NotFoundError):
            store.item(b"b", item.id)
    for name in ("", "msg_1", given[0].id + "x", given[0].id[:-1] + "f", entry.id):
        with pytest.raises(NotFoundError):
            store.item(b"a", name)


def test_an_input_that_can_never_be_kept_is_refused() -> None:
    store = ResponseStore(10_000, 60)
    store.check_room(Entry("resp_x", b"", None, b"x" * 5000))
    with pytest.raises(UserError, match="--responses-store"):
        store.check_room(Entry("resp_x", b"", None, b"x" * 10_000))
    store.keep(entry_of(text="y" * 20_000))  # what the model said more is kept all the same, alone
    store.keep(last := entry_of(text="y" * 20_000))
    assert len(store) == 1 and store.find(b"a", last.id) is last
