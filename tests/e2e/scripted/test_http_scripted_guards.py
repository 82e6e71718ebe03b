"""What the server refuses: wrong fields on every route, wrong keys, hosts, origins and sizes; and that it lives on afterwards."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from halfbyte.entrypoints.middleware import PUBLIC_PATHS
from halfbyte.entrypoints.page.files import page_files
from tests.e2e.error_shapes import standard_error
from tests.e2e.wrong_fields import CHAT, LONGEST, ROUTE_VALUES, WRONG_TYPES, WRONG_VALUES, V

Server = Any
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
    "/v1/chat/completions/batch": {"messages": [CHAT, CHAT], "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"model": "scripted", "messages": CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "scripted", "messages": CHAT},
    "/v1/systemone": {"state": "x", "questions": {"q": {"type": "noul"}}},
    "/v1/decisions": {"model": "scripted", "input": "x", "questions": [{"type": "predicate", "instructions": ""}]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
}
GENERATE = ("/v1/completions", "/v1/chat/completions")
STREAMING = (*GENERATE, "/v1/responses")


@pytest.fixture(scope="module")
def shared(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(info={"max_model_len": LONGEST}, enable_prompt_tokens_details=True)


def complaint(answer: httpx.Response, status: int = 400) -> str:
    """What is wrong with an error answer; "" when nothing is."""
    if answer.status_code != status:
        return f"{answer.status_code} {answer.text[:200]}"
    if standard_error(answer) is None:
        return f"not the standard error: {answer.text[:200]}"
    if re.search(r"0x[0-9a-f]{4,}|Traceback|site-packages|\.py\b", answer.text) or len(answer.content) > 5000:
        return f"internals in the message, or too long: {answer.text[:300]}"
    return ""


def post_raw(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    """As a hostile client writes it: infinities as numbers that overflow."""
    content = json.dumps(body).replace("Infinity", "1e309").encode()
    answer: httpx.Response = server.http.post(path, content=content, headers={"content-type": "application/json"})
    return answer


def wrong_cases(schema: dict[str, Any], route: str) -> Iterator[tuple[str, Any]]:
    """(field, value): each declared field with every wrong type, then the values that only rules forbid."""
    for field, spec in schema["properties"].items():
        options = spec.get("anyOf", [spec])
        allowed = {option.get("type") for option in options}
        allowed |= {"integer"} if "number" in allowed else set()
        if None not in allowed:
            for kind, values in WRONG_TYPES.items():
                if kind in allowed:
                    yield from ((field, value) for value in values if not fits(value, allowed))
    for field, values in ((WRONG_VALUES if route in GENERATE else {}) | ROUTE_VALUES[route]).items():
        yield from ((field, value) for value in values)


def fits(value: Any, allowed: set[str | None]) -> bool:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    if isinstance(value, float):
        return "number" in allowed and abs(value) != float("inf")
    if type(value) is int and "integer" in allowed and "number" not in allowed:
        return False
    return kinds[type(value)] in allowed


# --- bodies ------------------------------------------------------------------------------------------------------------


def test_every_route_with_a_body_is_in_the_matrix(shared: Server) -> None:
    paths = shared.get("/openapi.json").json()["paths"]
    assert {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})} == set(VALID)


@pytest.mark.parametrize("route", list(VALID))
def test_wrong_fields_are_400_and_the_next_request_works(shared: Server, route: str) -> None:
    paths = shared.get("/openapi.json").json()["paths"]
    schema = paths[route]["post"]["requestBody"]["content"]["application/json"]["schema"]
    witness = {"prompt": "witness", "max_tokens": 8, "temperature": 0}
    expected = shared.post("/v1/completions", witness).json()["choices"][0]["text"]
    cases = list(wrong_cases(schema, route))
    assert len(cases) > 10
    wrong = []
    for field, value in cases:
        can_stream = "stream" in schema["properties"] and field not in ("stream", "stream_options")
        for extra in ({}, {"stream": True}) if can_stream else ({},):
            body = VALID[route] | {field: value} | extra
            if problem := complaint(post_raw(shared, route, body)):
                wrong.append(f"{route} {field}={str(value)[:60]} {extra}: {problem}")
        assert shared.post("/v1/completions", witness).json()["choices"][0]["text"] == expected
        assert shared.post(route, VALID[route]).status_code == 200
    assert not wrong, "\n".join(wrong)
    assert shared.get("/health").status_code == 200


@pytest.mark.parametrize("route", list(VALID))
@pytest.mark.parametrize(
    ("content", "media_type"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b"null", "application/json"),
        (b'{"a": NaN}', "application/json"),
        (b'{"temperature": Infinity}', "application/json"),
        (b'{"prompt": "\\ud800"}', "application/json"),
        (b'{"prompt": "\xff"}', "application/json"),
        (b"[" * 100_000, "application/json"),
        (b"[" * 300_000 + b"]" * 300_000, "application/json"),
        (b'{"prompt": [' + b"1," * 5_000_000 + b"1]}", "application/json"),
        (b'{"prompt": "Hi"}', "text/plain"),
        (b'{"prompt": "Hi"}', "application/x-www-form-urlencoded"),
        (b'{"prompt": "Hi"}', None),
    ],
    ids=range(14),
)
def test_unusable_bodies(shared: Server, route: str, content: bytes, media_type: str | None) -> None:
    headers = {} if media_type is None else {"content-type": media_type}
    assert not complaint(shared.http.post(route, content=content, headers=headers))


def test_media_type_may_have_parameters(shared: Server) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert shared.http.post("/tokenize", content=b'{"prompt": "x"}', headers=headers).status_code == 200


def test_the_largest_values_are_served(shared: Server) -> None:
    for fields in (
        {"prompt": [1, V - 1], "stop_token_ids": [V - 1], "logit_bias": {str(V - 1): -1}, "min_tokens": 1},
        {"allowed_token_ids": list(range(V)), "stop_token_ids": list(range(200))},
        {"seed": 2**63 - 1, "priority": -(2**63), "top_k": -1, "top_p": 1, "logprobs": 5},
        {"seed": -1, "stop": ["a", "b", "c", "d"], "cache_salt": "x" * 128},
        {"prompt": ["a"] * 1024, "max_tokens": 1},
    ):
        answer = shared.post("/v1/completions", VALID["/v1/completions"] | fields)
        assert answer.status_code == 200, answer.text


def test_nulls_mean_not_given(shared: Server) -> None:
    paths = shared.get("/openapi.json").json()["paths"]
    for route, body in VALID.items():
        schema = paths[route]["post"]["requestBody"]["content"]["application/json"]["schema"]
        nulls = {field: None for field in schema["properties"] if field not in body}
        answer = shared.post(route, nulls | body)
        assert answer.status_code == 200, answer.text


def test_unknown_and_neutral_fields_pass(shared: Server) -> None:
    neutral = {
        "foo": {"bar": 1}, "user": "me", "metadata": {}, "store": False, "use_beam_search": False, "best_of": 1, "suffix": None,
        "response_format": {"type": "text"}, "structured_outputs": None, "tool_choice": "none", "kv_transfer_params": None,
        "parallel_tool_calls": True, "length_penalty": 1.0,
    }  # fmt: skip
    for route in GENERATE:
        answer = shared.post(route, VALID[route] | neutral)
        assert answer.status_code == 200, answer.text


def test_sequences_are_counted_over_all_prompts(shared: Server) -> None:
    body = {"prompt": ["a"] * 1024, "n": 17, "max_tokens": 1}
    answer = shared.post("/v1/completions", body)
    assert not complaint(answer) and answer.json()["error"]["param"] == "n"
    assert shared.model.num_live == 0


def test_truncation(shared: Server) -> None:
    count = LONGEST + 6
    body = {"prompt": list(range(count)), "max_tokens": 1, "return_token_ids": True}
    for fields, kept in (
        ({"truncate_prompt_tokens": 5}, list(range(count - 5, count))),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, list(range(5))),
        ({"truncate_prompt_tokens": -1}, list(range(7, count))),
    ):
        assert shared.post("/v1/completions", body | fields).json()["choices"][0]["prompt_token_ids"] == kept


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_router_errors_have_the_standard_shape(shared: Server, method: str) -> None:
    missing = shared.http.request(method, "/v1/nothing")
    assert not complaint(missing, 404) and missing.json()["error"]["type"] == "Not Found"
    wrong = shared.http.request(method, "/v1/completions")
    assert not complaint(wrong, 405) and wrong.json()["error"]["type"] == "Method Not Allowed"
    assert shared.http.request(method, "/v1/models/").status_code == 404


def test_unknown_model_is_404_on_every_route(shared: Server) -> None:
    for route, body in VALID.items():
        answer = shared.post(route, body | {"model": "gpt-9"})
        assert not complaint(answer, 404) and answer.json()["error"]["param"] == "model"
        assert shared.post(route, body | {"model": ""}).status_code == 200


def test_unplanned_errors_say_nothing(start_scripted: Callable[..., Server], caplog: pytest.LogCaptureFixture) -> None:
    server = start_scripted()

    async def broken(*arguments: object, **options: object) -> list[int]:
        raise RuntimeError("secret at 0xdeadbeef in /root/secret.py")

    server.engine.encode = broken
    for route in (*GENERATE, "/v1/messages", "/v1/messages/count_tokens", "/tokenize"):
        answer = server.post(route, VALID[route])
        assert not complaint(answer, 500) and "secret" not in answer.text
        assert answer.json()["error"]["type"] == ("api_error" if "messages" in route else "InternalServerError")
    assert caplog.text.count("RuntimeError: secret") == 5


# --- keys --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(api_keys=("k1", "clé", ""), allowed_origins=("http://good",), max_body_bytes=100_000)


def key(value: str) -> dict[str, bytes]:
    return {"authorization": f"Bearer {value}".encode()}


def test_route_walk_without_a_key(locked: Server) -> None:
    from fastapi.routing import APIRoute

    routes = list(locked.routes)
    assert len([r for r in routes if isinstance(r, APIRoute)]) >= 10
    for route in routes:
        for method in sorted(route.methods - {"HEAD"}):
            answer = locked.http.request(method, route.path)
            if route.path in PUBLIC_PATHS | set(page_files(locked.config)):
                assert answer.status_code == 200
            else:
                assert not complaint(answer, 401), route.path
                assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "//v1/models", "/V1/models", "/%76%31/models", "/v1%2fmodels", "/health/../v1/models", "/health/", "/nothing",
     "/metrics/x", "/tokenize", "/docs/", "/page/", "/page/x.js", "/openapi.json", "/health;x", "/health%00"],
)  # fmt: skip
@pytest.mark.parametrize("host", ["127.0.0.1", "x/health", "x?/health", "x#", "health"])
def test_paths_and_hosts_do_not_get_around_the_key(locked: Server, path: str, host: str) -> None:
    status, _ = raw_exchange(locked, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert status == 401


def test_keys(locked: Server) -> None:
    for good in (
        key("k1"), key("clé"), {"authorization": b"bearer k1"}, {"authorization": b"BEARER  k1"}, {"x-api-key": b"k1"},
        {"x-api-key": "clé".encode()}, {"authorization": b"Bearer k2", "x-api-key": b"k1"},
    ):  # fmt: skip
        assert locked.get("/v1/models", headers=good).status_code == 200
    for bad in (
        key("k2"), key("K1"), key("k1x"), {"authorization": b"k1"}, {"authorization": b"Basic k1"}, {"x-api-key": b"k2"},
        {"x-api-key": b"Bearer k1"}, {"x-api-key": b""}, {"authorization": b"Bearer"}, {"authorization": b"Bearer \xff\xfe"},
        {"api-key": b"k1"},
    ):  # fmt: skip
        assert locked.get("/v1/models", headers=bad).status_code == 401
    assert locked.get("/v1/models?api_key=k1").status_code == 401


def test_key_is_checked_before_the_body_is_read(locked: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 90000\r\n\r\n"
    assert raw_exchange(locked, head + b'{"prompt": "')[0] == 401
    assert raw_exchange(locked, head.replace(b"90000", b"999999999"))[0] == 401


def test_no_key_no_lock(shared: Server) -> None:
    assert shared.get("/v1/models", headers=key("anything")).status_code == 200


# --- origins and hosts -------------------------------------------------------------------------------------------------

PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


def test_cross_origin_is_closed_by_default(shared: Server) -> None:
    simple = shared.get("/v1/models", headers={"origin": "http://evil"})
    assert simple.status_code == 200 and "access-control-allow-origin" not in simple.headers
    preflight = shared.http.options("/v1/completions", headers={"origin": "http://evil"} | PREFLIGHT)
    assert preflight.status_code == 400 and "access-control-allow-origin" not in preflight.headers


def test_allowed_origin(locked: Server) -> None:
    preflight = locked.http.options("/v1/completions", headers={"origin": "http://good"} | PREFLIGHT)
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == "http://good"
    assert locked.http.options("/v1/completions", headers={"origin": "http://evil"} | PREFLIGHT).status_code == 400
    answer = locked.get("/v1/models", headers={"origin": "http://good"} | key("k1"))
    assert answer.headers["access-control-allow-origin"] == "http://good"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8000", "localhost."])
def test_own_hosts(shared: Server, host: str) -> None:
    assert shared.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.com", "localhost.evil.com", "127.0.0.1.evil.com", "evil.com:8000", "127.0.0.2", "", "a:b:c", "localhost:x",
     "localhost/x", "localhost@evil.com", "::1"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/nothing"])
def test_foreign_hosts_get_nothing_on_loopback(shared: Server, host: str, path: str) -> None:
    assert not complaint(shared.get(path, headers={"host": host}))


def test_host_list(start_scripted: Callable[..., Server]) -> None:
    listed = start_scripted(allowed_hosts=("Box.lan",))
    assert listed.get("/health", headers={"host": "box.lan:8000"}).status_code == 200
    assert listed.get("/health", headers={"host": "localhost"}).status_code == 200
    assert listed.get("/health", headers={"host": "other.lan"}).status_code == 400
    public = start_scripted(host="0.0.0.0")
    assert public.get("/health", headers={"host": "anything.example"}).status_code == 200
    named = start_scripted(host="0.0.0.0", allowed_hosts=("api.example",))
    assert [named.get("/health", headers={"host": h}).status_code for h in ("api.example", "evil.com")] == [200, 400]


def test_two_hosts_are_both_checked(shared: Server) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.com\r\n\r\n"
    assert raw_exchange(shared, request)[0] == 400
    assert raw_exchange(shared, b"GET /health HTTP/1.0\r\n\r\n")[0] == 200


# --- sizes -------------------------------------------------------------------------------------------------------------


def test_body_limit(locked: Server) -> None:
    headers = key("k1") | {"content-type": "application/json"}
    announced = locked.http.post("/tokenize", content=b"x" * 100_001, headers=headers)
    assert not complaint(announced, 413)
    sent = 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(30):
            sent += 10_000
            yield b"x" * 10_000

    streamed = locked.http.post("/tokenize", content=pieces(), headers=headers)
    assert not complaint(streamed, 413)
    fits_in = json.dumps({"prompt": "Hi", "padding": "x" * 90_000}).encode()
    assert locked.http.post("/tokenize", content=fits_in, headers=headers).status_code == 200
    huge = b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer k1\r\nContent-Length: 99999999999\r\n\r\n"
    assert raw_exchange(locked, huge)[0] == 413


def test_header_limits(shared: Server) -> None:
    start = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    assert raw_exchange(shared, start + b"X-Big: " + b"x" * 8000 + b"\r\n\r\n")[0] == 200
    assert raw_exchange(shared, start + b"X-Huge: " + b"x" * 2_000_000)[0] in (400, 431, 0)
    assert raw_exchange(shared, b"GET /" + b"x" * 2_000_000)[0] in (400, 431, 0)
    assert raw_exchange(shared, start + b"".join(b"X-%d: 1\r\n" % i for i in range(10_000)) + b"\r\n")[0] in (400, 431, 0)
    assert shared.get("/health").status_code == 200


def raw_exchange(server: Server, data: bytes) -> tuple[int, bytes]:
    """Send bytes, read the first answer's head. (status, head); status 0 when the connection was closed without one."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        received = b""
        try:
            connection.sendall(data)
            while b"\r\n\r\n" not in received and (part := connection.recv(65536)):
                received += part
        except ConnectionError:
            pass
    return (int(received.split(b" ", 2)[1]) if received else 0), received


# --- labels and root path ----------------------------------------------------------------------------------------------


def test_request_id_header_is_echoed_only_on_demand(shared: Server, start_scripted: Callable[..., Server]) -> None:
    assert "x-request-id" not in shared.get("/health", headers={"x-request-id": "a"}).headers
    echoing = start_scripted(enable_request_id_headers=True, api_keys=("k",))
    assert echoing.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"] == "a b"
    for bad in ("x" * 129, "café", "tab\there"):
        given = echoing.get("/health", headers={"x-request-id": bad.encode()}).headers["x-request-id"]
        assert given != bad and re.fullmatch("[0-9a-f]{32}", given)
    refused = echoing.get("/v1/models", headers={"x-request-id": "a"})
    assert refused.status_code == 401 and refused.headers["x-request-id"] == "a"


def test_root_path_and_docs(start_scripted: Callable[..., Server]) -> None:
    server = start_scripted(root_path="/api/", api_keys=("k",), disable_fastapi_docs=True)
    for prefix in ("", "/api"):
        assert server.get(f"{prefix}/health").status_code == 200
        assert server.get(f"{prefix}/v1/models").status_code == 401
        assert server.get(f"{prefix}/v1/models", headers=key("k")).status_code == 200
        assert server.get(f"{prefix}/docs", headers=key("k")).status_code == 404
        assert server.get(f"{prefix}/openapi.json", headers=key("k")).status_code == 404
    assert server.get("/apihealth").status_code == 401
