"""Requests that end early, engines that die, servers that stop: each call gets one answer, one log line, and frees its engine."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from halfbyte.entrypoints import server as server_module
from halfbyte.entrypoints.openai import streaming

Server = Any
ENDLESS: dict[str, Any] = {"prompt": "endless", "max_tokens": 60}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}


@pytest.fixture
def own(start_scripted: Callable[..., Server]) -> Iterator[Server]:
    """A server for one test, whose engine waits to be told to step."""
    server = start_scripted(enable_log_requests=True)
    server.model.hold()
    yield server
    server.stop()


class Open:
    """A POST in a thread. `result` waits for its answer."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        self._answer: httpx.Response | None = None
        self._thread = threading.Thread(target=self._run, args=(server, path, body), daemon=True)
        self._thread.start()

    def _run(self, server: Server, path: str, body: dict[str, Any]) -> None:
        self._answer = server.post(path, body)

    def result(self) -> httpx.Response:
        self._thread.join(20)
        assert self._answer is not None
        return self._answer


def send_request(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A request whose answer nobody reads yet."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(head.encode() + content)
    return connection


def ended_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if " ended: " in record.getMessage()]


# --- clients that leave ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "num_sequences"),
    [
        ("/v1/completions", ENDLESS, 1),
        ("/v1/completions", ENDLESS | {"prompt": ["a", "b", "c"], "n": 2}, 6),
        ("/v1/chat/completions", CHAT, 1),
    ],
)
def test_disconnect_aborts_at_once(
    own: Server,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: dict[str, Any],
    num_sequences: int,
    started: bool,
    stream: bool,
) -> None:
    """No step happens between the disconnect and the abort: the engine is held."""
    caplog.set_level(logging.INFO)
    connection = send_request(own, path, body | {"stream": stream})
    own.model.wait(lambda model: model.num_live == num_sequences)
    if started:
        own.model.allow(1)
        if stream:
            assert b"200 OK" in connection.recv(65536)
    connection.close()
    own.model.wait(lambda model: len(model.aborted) == num_sequences and model.num_live == 0)
    own.stop()
    lines = ended_lines(caplog)
    assert len(lines) == 1 and "abort" in lines[0]


def test_disconnect_while_the_body_is_sent(own: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    connection = socket.create_connection(("127.0.0.1", own.port), timeout=20)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    )
    connection.close()
    own.stop()
    assert [line for line in ended_lines(caplog) if "abort" in line] == ended_lines(caplog)
    assert own.frontend.num_open_calls == 0


def test_a_client_that_stays_is_not_disturbed_by_one_that_leaves(own: Server) -> None:
    staying = Open(own, "/v1/completions", ENDLESS)
    own.model.wait(lambda model: model.num_live == 1)
    leaving = send_request(own, "/v1/completions", ENDLESS | {"stream": True})
    own.model.wait(lambda model: model.num_live == 2)
    leaving.close()
    own.model.wait(lambda model: len(model.aborted) == 1)
    own.model.allow(None)
    assert staying.result().json()["usage"]["completion_tokens"] == 56


# --- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ENDLESS), ("/v1/chat/completions", CHAT)])
def test_failure_in_mid_stream(own: Server, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]) -> None:
    """Text so far, one error event, [DONE]; one log line with id and cause."""
    own.model.fails = {3: "logits are not finite"}
    own.model.allow(None)
    answer = own.post(path, body | {"stream": True}, headers={"x-request-id": "unlucky"})
    assert answer.status_code == 200
    events = [part.removeprefix("data: ") for part in answer.text.strip().split("\n\n")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2]) == {
        "error": {"message": "logits are not finite", "type": "InternalServerError", "param": None, "code": 500}
    }
    choices = [c for e in events[:-2] for c in json.loads(e)["choices"]]
    assert len(choices) >= 3 and not any(c["finish_reason"] for c in choices)
    lines = ended_lines(caplog)
    assert len(lines) == 1 and "unlucky" in lines[0] and "logits are not finite" in lines[0]


@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_is_a_real_500(own: Server, stream: bool) -> None:
    own.model.fails = {0: "grammar at 0xdeadbeef in /usr/lib/x/y.py"}
    own.model.allow(None)
    answer = own.post("/v1/completions", ENDLESS | {"stream": stream})
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["type"] == "InternalServerError" and "grammar" in error["message"]
    assert "0x" not in answer.text and "/usr" not in answer.text


def test_one_failed_sequence_ends_its_call_and_aborts_its_siblings(own: Server) -> None:
    own.model.fails = {2: "boom"}
    other = Open(own, "/v1/completions", ENDLESS | {"max_tokens": 2})
    own.model.wait(lambda model: model.num_live == 1)
    own.model.allow(2)
    assert other.result().status_code == 200
    own.model.allow(None)
    answer = own.post("/v1/completions", ENDLESS | {"prompt": ["a", "b"], "n": 2})
    assert answer.status_code == 500
    own.model.wait(lambda model: model.num_live == 0)


def test_openai_client_raises_on_an_error_event(own: Server) -> None:
    own.model.fails = {3: "boom"}
    own.model.allow(None)
    with pytest.raises(openai.APIError, match="boom"):
        list(own.client().completions.create(model="scripted", prompt="x", stream=True))


def test_full_queue(start_scripted: Callable[..., Server]) -> None:
    """503 with Retry-After at once; a call with several prompts enters whole or not at all."""
    server = start_scripted(info={"max_num_seqs": 1, "max_num_queued_reqs": 3})
    server.model.hold()
    first = Open(server, "/v1/completions", ENDLESS)
    server.model.wait(lambda model: model.num_live == 1)
    for fields in ({"n": 4}, {"prompt": ["a", "b", "c", "d"]}, {"prompt": ["a"] * 4, "stream": True}):
        refused = server.post("/v1/completions", ENDLESS | fields)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "Service Unavailable"
    server.model.wait(lambda model: model.num_live == 1)
    second = Open(server, "/v1/completions", ENDLESS | {"n": 3})
    server.model.wait(lambda model: model.num_live == 4)
    server.model.allow(None)
    assert first.result().status_code == second.result().status_code == 200
    server.stop()


def test_engine_death(own: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open calls end with an error, new ones get 503, health says so, and the process would exit with 1."""
    monkeypatch.setattr(server_module, "DEATH_LINGER_S", 0.5)
    monkeypatch.setattr(streaming, "HOLD_HEADERS_S", 0.01)
    whole = Open(own, "/v1/completions", ENDLESS)
    own.model.wait(lambda model: model.num_live == 1)
    with own.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as stream:
        own.model.wait(lambda model: model.num_live == 2)
        own.model.allow(1)
        parts = stream.iter_text()
        text = next(parts)
        own.model.die("the engine process exited with code -9")
        text += "".join(parts)
    assert text.endswith("data: [DONE]\n\n") and "exited with code -9" in text
    assert whole.result().status_code == 500
    assert own.get("/health").status_code == 503 and own.get("/ping").status_code == 503
    refused = own.post("/v1/completions", ENDLESS)
    assert refused.status_code == 503 and "retry-after" in refused.headers
    own.join()
    assert own.exit_code == 1


# --- stopping ----------------------------------------------------------------------------------------------------------


def test_stop_aborts_with_an_answer(own: Server) -> None:
    whole = Open(own, "/v1/completions", ENDLESS)
    streamed = Open(own, "/v1/completions", ENDLESS | {"stream": True, "prompt": "s"})
    own.model.wait(lambda model: model.num_live == 2)
    own.model.allow(1)
    own.model.wait(lambda model: model.num_live == 2)
    own.signal()
    assert whole.result().status_code == 503
    assert whole.result().json()["error"]["type"] == "ServiceUnavailableError"
    tail = streamed.result().text
    assert "shutting down" in tail and (streamed.result().status_code == 503 or tail.endswith("data: [DONE]\n\n"))
    own.join()
    assert own.exit_code == 0 and len(own.model.aborted) == 2


def test_stop_drains(start_scripted: Callable[..., Server]) -> None:
    """While open calls finish, health and new calls are 503; then the server ends with 0."""
    server = start_scripted(shutdown_timeout_s=30.0)
    server.model.hold()
    whole = Open(server, "/v1/completions", ENDLESS)
    streamed = Open(server, "/v1/chat/completions", CHAT | {"stream": True})
    server.model.wait(lambda model: model.num_live == 2)
    server.signal()
    while server.get("/health").status_code == 200:
        pass
    refused = server.post("/v1/completions", ENDLESS)
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert server.get("/version").status_code == 200
    server.model.allow(None)
    assert whole.result().json()["choices"][0]["finish_reason"] == "length"
    assert '"finish_reason":"length"' in streamed.result().text
    server.join()
    assert server.exit_code == 0
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url}/health")


def test_second_signal_ends_at_once(start_scripted: Callable[..., Server]) -> None:
    server = start_scripted(shutdown_timeout_s=300.0)
    server.model.hold()
    connection = send_request(server, "/v1/completions", ENDLESS)
    server.model.wait(lambda model: model.num_live == 1)
    server.signal()
    server.signal()
    server.join()
    connection.close()
    assert server.exit_code == 0


# --- slow starts and slow clients --------------------------------------------------------------------------------------


def test_keep_alive_comments(start_scripted: Callable[..., Server]) -> None:
    server = start_scripted(sse_keep_alive_interval_s=0.05)
    server.model.hold()
    with server.client().with_streaming_response.completions.create(
        model="scripted", prompt="x", max_tokens=3, stream=True
    ) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line) == ": keep-alive"
        server.model.allow(None)
        assert [line for line in lines if line.startswith("data:")][-1] == "data: [DONE]"
    server.stop()


def test_headers_do_not_wait_for_ever(own: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "HOLD_HEADERS_S", 0.05)
    with own.http.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True}) as stream:
        assert stream.status_code == 200 and own.model.num_live == 1
        own.model.allow(None)
        assert stream.read().endswith(b"[DONE]\n\n")


def test_slow_headers_are_cut_off(own: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEADER_TIMEOUT_S", 0.05)
    with socket.create_connection(("127.0.0.1", own.port), timeout=20) as silent:
        assert silent.recv(100) == b""
    with socket.create_connection(("127.0.0.1", own.port), timeout=20) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        assert slow.recv(100) == b""


def test_many_streams_at_once(own: Server) -> None:
    own.model.allow(None)
    with openai.OpenAI(base_url=f"{own.url}/v1", api_key="x", max_retries=0) as client:
        texts: dict[int, list[str]] = {}

        def run(seed: int) -> None:
            body: dict[str, Any] = {"model": "scripted", "prompt": "many", "max_tokens": 30, "seed": seed}
            whole = client.completions.create(**body).choices[0].text
            chunks = client.completions.create(**body, stream=True)
            texts[seed] = [whole, "".join(chunk.choices[0].text for chunk in chunks)]

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert len(texts) == 16 and all(whole == streamed for whole, streamed in texts.values())
    own.model.wait(lambda model: model.num_live == 0)
    assert own.frontend.num_open_calls == 0


# --- logs --------------------------------------------------------------------------------------------------------------


def test_one_line_per_request_and_no_secrets(own: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    own.model.allow(None)
    secret = {"prompt": "my secret prompt", "cache_salt": "salty-secret", "max_tokens": 2, "unknown_field": "field-secret"}
    own.post("/v1/completions", secret, headers={"x-request-id": "good"})
    own.post("/v1/completions", secret | {"stream": True}, headers={"x-request-id": "streamed"})
    own.post("/v1/completions", secret | {"stop": ["", "secret"]}, headers={"x-request-id": "bad"})
    own.post("/v1/completions", secret | {"cache_salt": "bad/secret"}, headers={"x-request-id": "salt"})
    own.post("/v1/completions", secret | {"temperature": "secret"}, headers={"x-request-id": "type"})
    lines = {line.split()[1]: line for line in ended_lines(caplog)}
    assert sorted(lines) == ["bad", "good", "salt", "streamed", "type"] and len(ended_lines(caplog)) == 5
    assert "length, 17 prompt tokens, 2 completion tokens" in lines["good"] and "length" in lines["streamed"]
    assert "400 BadRequestError param=stop" in lines["bad"] and "param=body.temperature" in lines["type"]
    own_records = [r.getMessage() for r in caplog.records if r.name.startswith("halfbyte")]
    assert not [message for message in own_records if "secret" in message]


def test_finished_requests_are_silent_by_default(shared: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shared.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert not ended_lines(caplog)
