"""Sleep, pause and what comes after, over a scripted engine: what becomes of open calls, of new ones, of a server that stops."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

Server = Any
KEY = {"authorization": "Bearer admin"}
BODY: dict[str, Any] = {"prompt": "endless", "max_tokens": 6, "temperature": 0}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": BODY,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/systemone": {"state": "x", "questions": {"q": {"type": "noul"}}},
    "/v1/decisions": {"model": "scripted", "input": "x", "questions": [{"type": "predicate", "instructions": ""}]},
}


@pytest.fixture
def own(start_scripted: Callable[..., Server]) -> Iterator[Server]:
    """A server for one test, whose engine waits to be told to step."""
    server = start_scripted(info={"max_model_len": 128}, enable_admin=True, admin_api_keys=("admin",))
    server.model.hold()
    yield server
    server.stop()


def order(server: Server, path: str, method: str = "POST") -> dict[str, Any]:
    answer = server.http.request(method, path, headers=KEY)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


class Later:
    """A call in a thread. `result` waits for its end: what it returned, or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._call()
        except Exception as error:
            self._found = error

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(20)
        assert not self.is_open
        return self._found


def begin_stream(server: Server) -> Later:
    """A stream of the real client that has had one of its six tokens."""
    begun = threading.Event()

    def read() -> str:
        pieces = []
        for chunk in server.client().completions.create(model="scripted", stream=True, **BODY):
            pieces.append(chunk.choices[0].text)
            begun.set()
        return "".join(pieces)

    stream = Later(read)
    server.model.wait(lambda model: model.num_live == 1)
    server.model.allow(1)
    assert begun.wait(20)
    return stream


def expected_text(server: Server) -> str:
    server.model.allow(None)
    text: str = server.post("/v1/completions", BODY).json()["choices"][0]["text"]
    return text


def refused(server: Server) -> None:
    for path, body in ROUTES.items():
        answer = server.post(path, body)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0, path
        assert "POST /wake_up" in answer.json()["error"]["message"]
    assert server.get("/health").status_code == server.get("/v1/models").status_code == 200
    assert server.post("/tokenize", {"prompt": "Hi"}).json()["count"] == 3


def sleep_states(server: Server) -> dict[str, float]:
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith("vllm:engine_sleep_state{")]
    return {line.partition('sleep_state="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


# --- sleep -------------------------------------------------------------------------------------------------------------


def test_the_answers_of_sleep_and_wake_up(own: Server) -> None:
    assert order(own, "/is_sleeping", "GET") == {"is_sleeping": False}
    assert sleep_states(own) == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    assert order(own, "/sleep") == {"status": "sleeping", "level": 1}
    assert order(own, "/is_sleeping", "GET") == {"is_sleeping": True}
    assert sleep_states(own) == {"awake": 0, "weights_offloaded": 1, "discard_all": 0}
    refused(own)
    assert order(own, "/sleep?level=2&mode=wait") == {"status": "sleeping", "level": 2}
    assert sleep_states(own)["discard_all"] == 1
    assert order(own, "/wake_up?tags=weights") == {"status": "sleeping", "tags": ["weights"]}
    refused(own)
    assert order(own, "/wake_up?tags=weights&tags=kv_cache") == {"status": "awake", "tags": ["weights", "kv_cache"]}
    assert order(own, "/wake_up") == {"status": "awake", "tags": None}
    assert sleep_states(own) == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    assert len(expected_text(own)) == 6


@pytest.mark.parametrize(
    "query",
    ["sleep?level=3", "sleep?level=-1", "sleep?level=1.0", "sleep?level=", "sleep?mode=now", "sleep?mode=", "wake_up?tags=cache",
     "sleep?level=1&level=2", "wake_up?tag=weights", "pause?clear_cache=2", "pause?mode=ABORT", "resume?x=1", "is_paused?x=1"],
)  # fmt: skip
def test_wrong_parameters_change_nothing(own: Server, query: str) -> None:
    name, _, value = query.partition("?")[2].partition("=")
    method = "GET" if query.startswith("is_") else "POST"
    answer = own.http.request(method, f"/{query}", headers=KEY)
    assert answer.status_code == 400, value
    assert answer.json()["error"]["param"] == f"query.{name}"
    assert not own.model.actions and order(own, "/is_sleeping", "GET") == {"is_sleeping": False}


@pytest.mark.parametrize("path", ["/sleep", "/pause"])
def test_abort_ends_open_calls(own: Server, path: str) -> None:
    stream = begin_stream(own)
    whole = Later(lambda: own.post("/v1/chat/completions", ROUTES["/v1/chat/completions"]))
    own.model.wait(lambda model: model.num_live == 2)
    order(own, f"{path}?mode=abort")
    error = stream.result()
    assert isinstance(error, openai.APIError) and ("asleep" if path == "/sleep" else "paused") in str(error)
    answer = whole.result()
    assert answer.status_code == 503 and "retry-after" in answer.headers
    own.model.wait(lambda model: len(model.aborted) == 2)
    order(own, "/wake_up" if path == "/sleep" else "/resume")
    assert len(expected_text(own)) == 6


@pytest.mark.parametrize("path", ["/sleep?level=2", "/pause?"])
def test_keep_suspends_open_calls(own: Server, path: str) -> None:
    stream = begin_stream(own)
    order(own, f"{path}&mode=keep")
    own.model.allow(None)
    assert stream.is_open and own.model.num_live == 1
    order(own, "/wake_up" if path.startswith("/sleep") else "/resume")
    assert stream.result() == expected_text(own)


@pytest.mark.parametrize("path", ["/sleep", "/pause"])
def test_wait_lets_open_calls_end(own: Server, path: str, wait_until: Callable[..., None]) -> None:
    stream = begin_stream(own)
    waiting = Later(lambda: order(own, f"{path}?mode=wait"))
    wait_until(lambda: own.frontend.closing is not None)
    answer = own.post("/v1/completions", BODY)
    assert answer.status_code == 503 and "retry-after" in answer.headers
    assert waiting.is_open and not own.model.actions
    own.model.allow(5)
    assert len(stream.result()) == 6 and waiting.result()["status"] == ("sleeping" if path == "/sleep" else "paused")
    order(own, "/wake_up" if path == "/sleep" else "/resume")
    assert len(expected_text(own)) == 6


def test_an_operator_who_stops_waiting_has_changed_nothing(own: Server, wait_until: Callable[..., None]) -> None:
    stream = begin_stream(own)
    with socket.create_connection(("127.0.0.1", own.port), timeout=20) as connection:
        connection.sendall(b"POST /sleep?mode=wait HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer admin\r\n\r\n")
        wait_until(lambda: own.frontend.closing is not None)
    wait_until(lambda: own.frontend.closing is None)
    own.model.allow(None)
    assert stream.result() == expected_text(own)
    assert not own.model.actions and order(own, "/is_sleeping", "GET") == {"is_sleeping": False}


def test_a_call_that_has_not_reached_the_engine_is_cut_off_too(own: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was open when the others were ended: it must not wait in the engine until somebody wakes that up."""
    entered, leave = threading.Event(), threading.Event()
    encode = own.tokenizer.encode

    def slow(*args: Any, **options: Any) -> list[int]:
        entered.set()
        assert leave.wait(20)
        ids: list[int] = encode(*args, **options)
        return ids

    with monkeypatch.context() as patched:
        patched.setattr(own.tokenizer, "encode", slow)
        call = Later(lambda: own.post("/v1/completions", BODY))
        assert entered.wait(20)
        order(own, "/sleep?mode=abort")
        leave.set()
        answer = call.result()
    assert answer.status_code == 503 and "POST /wake_up" in answer.json()["error"]["message"]
    assert not own.model.requests


# --- pause -------------------------------------------------------------------------------------------------------------


def test_in_a_pause_new_calls_queue_up_within_the_limits(start_scripted: Callable[..., Server]) -> None:
    info = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
    own = start_scripted(info=info, enable_admin=True, admin_api_keys=("admin",))
    assert order(own, "/pause?mode=keep&clear_cache=false") == {"status": "paused"}
    assert order(own, "/is_paused", "GET") == {"is_paused": True}
    assert order(own, "/pause") == {"status": "paused"}
    calls = [Later(lambda: own.post("/v1/completions", BODY)) for _ in range(2)]
    own.model.wait(lambda model: model.num_live == 2)
    full = own.post("/v1/completions", BODY)
    assert full.status_code == 503 and "queue is full" in full.json()["error"]["message"]
    assert order(own, "/resume") == {"status": "resumed"} == order(own, "/resume")
    assert [call.result().status_code for call in calls] == [200, 200]
    assert order(own, "/is_paused", "GET") == {"is_paused": False}
    own.stop()


def test_a_pause_and_a_sleep_end_each_by_its_own_route(own: Server) -> None:
    own.model.allow(None)
    order(own, "/pause")
    order(own, "/sleep?level=0")
    assert order(own, "/wake_up")["status"] == "awake"
    call = Later(lambda: own.post("/v1/completions", BODY))
    own.model.wait(lambda model: model.num_live == 1)
    assert call.is_open
    order(own, "/resume")
    assert call.result().status_code == 200


# --- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/sleep?level=1&mode=keep", "/pause?mode=keep"])
def test_c13_a_server_stops_in_its_sleep(start_scripted: Callable[..., Server], path: str) -> None:
    own = start_scripted(enable_admin=True, admin_api_keys=("admin",))
    own.model.hold()
    stream = begin_stream(own)
    order(own, path)
    own.signal()
    assert "shutting down" in str(stream.result())
    own.join()
    assert own.exit_code == 0
    own.stop()


def test_orders_to_a_dead_engine_are_503(own: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.entrypoints.server.DEATH_LINGER_S", 60.0)
    own.model.die("it died")
    with pytest.raises((httpx.HTTPError, AssertionError)):
        while True:
            order(own, "/is_sleeping", "GET")
    for path in ("/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache"):
        answer = own.post(path, None, headers=KEY)
        assert answer.status_code == 503 and "it died" in json.dumps(answer.json())
