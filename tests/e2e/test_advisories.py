"""Published advisories of servers of this kind, each as a request to a real one. Test ids are the advisories' own.

docs/security.md lists all of them, also those that other tests cover. Whatever concerns "every route" walks the routes that
the server names in /openapi.json, so that a new route is covered when it is added.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from halfbyte.entrypoints.middleware import PUBLIC_PATHS
from halfbyte.model_runner.decoder_config import config_from_files
from halfbyte.model_runner.source import locate
from tests.e2e.error_shapes import standard_error
from tests.e2e.raw_exchange import exchange, memory_bytes, process_tree

Server = Any
V = config_from_files(locate("smollm2-135m"), {}).vocab_size
SECRET = "open-sesame"
KEY = {"authorization": f"Bearer {SECRET}"}
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
GENERATE, TEMPLATED = (COMPLETIONS, CHAT), (CHAT, TOKENIZE, MESSAGES, COUNT)
ANSWERING, RENDERING = (*GENERATE, RESPONSES), (*TEMPLATED, RESPONSES)
HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 1, "temperature": 0},
    CHAT: {"messages": HELLO, "max_tokens": 1, "temperature": 0},
    RESPONSES: {"input": "Hi", "max_output_tokens": 1, "temperature": 0},
    MESSAGES: {"model": "", "messages": HELLO, "max_tokens": 1, "temperature": 0},
    COUNT: {"model": "", "messages": HELLO},
    "/v1/systemone": {"state": "Hi", "questions": {"q": {"type": "noul"}}},
    "/v1/decisions": {"model": "", "input": "Hi", "questions": [{"type": "predicate", "instructions": "It is."}]},
    "/v1/chat/completions/batch": {"messages": [HELLO], "max_tokens": 1, "temperature": 0},
    **{TOKENIZE: {"messages": HELLO}, DETOKENIZE: {"tokens": [1, 2]}},
}
# Fields that take any object, for a template or to no effect.
FREE = ("chat_template_kwargs", "documents", "messages", "state")
FREE += ("metadata", "cache_control", "output_config", "context_management")
KEPT = f"{RESPONSES}/{{response_id}}"
ROUTES = {("POST", p) for p in (*BODIES, "/ping", f"{KEPT}/cancel")} | {("DELETE", KEPT)}
ROUTES |= {("GET", p) for p in ("/v1/models", "/status", KEPT, f"{KEPT}/input_items", *PUBLIC_PATHS)}
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))  # a connection per request
LEAKS = re.compile(r"0x[0-9a-f]{4,}|Traceback|site-packages|\.py\b|/(?:home|root|usr|tmp|work)/", re.I)


@pytest.fixture(scope="module")
def locked(start_server: Callable[..., Server]) -> Server:
    flags = ("--api-key", SECRET, "--max-model-len", "512", "--kv-cache-memory-bytes", "64M")
    # float32: what batch mates do to the last bits of bf16 is not what is tested here
    return start_server(*flags, "--dtype", "float32", "--enable-prompt-tokens-details", "--max-body-bytes", "1M").ready()


def routes(server: Server, headers: dict[str, str] | None = None) -> list[tuple[str, str]]:
    paths = HTTP.get(f"{server.url}/openapi.json", headers=headers).json()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


def post(server: Server, path: str, body: Any, **options: Any) -> httpx.Response:
    """As a hostile client writes it: infinities as numbers that overflow."""
    content = json.dumps(body).replace("Infinity", "1e309").encode()
    headers = {"content-type": "application/json"} | KEY | options.pop("headers", {})
    return HTTP.post(f"{server.url}{path}", content=content, headers=headers, **options)


def complaint(answer: httpx.Response, *statuses: int) -> str:
    """What is wrong with an error answer; "" when nothing is."""
    if answer.status_code not in (statuses or (400,)):
        return f"{answer.status_code} {answer.text[:200]}"
    if standard_error(answer) is None:
        return f"not the standard error: {answer.text[:200]}"
    return f"says too much: {answer.text[:300]}" if LEAKS.search(answer.text) or len(answer.text) > 5000 else ""


def check_alive(server: Server) -> None:
    assert HTTP.get(f"{server.url}/health").status_code == 200
    assert post(server, COMPLETIONS, BODIES[COMPLETIONS]).status_code == 200


def text_of(server: Server, body: dict[str, Any], **headers: str) -> str:
    answer = post(server, COMPLETIONS, body, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def each(field: str, *values: Any) -> list[dict[str, Any]]:
    return [{field: value} for value in values]


def part(kind: str, value: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "look"}, {"type": kind, kind: value}]}]}


MEDIA = ("image_url", "video_url", "audio_url", "input_audio", "image_embeds", "audio_embeds", "file", "image_pil")
MEDIA_OPTIONS = [
    {name: {option: value}}
    for name in ("mm_processor_kwargs", "media_io_kwargs")
    for option, value in (("num_frames", -1), ("max_frames", 10**9), ("fps", 0), ("video_backend", "x"), ("revision", "main"))
]
PEERS = [
    {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1, "remote_engine_id": "x", "tp_size": 10**9},
    *({"do_remote_decode": True}, {"remote_block_ids": [1, 2]}, {"tp_size": -1}),
]
TEMPLATES = [
    {"chat_template": "{{ messages }}"},
    {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"},
    {"chat_template_kwargs": {"chat_template": "{{ messages }}"}},
]
RESERVED = ("tokenize", "chat_template", "return_tensors", "conversation", "messages", "tools", "documents", "return_dict")
SCHEMA_OF_NOTHING = {"type": "nonsense", "pattern": "(a"}
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": SCHEMA_OF_NOTHING}}

# advisory -> (routes, bodies' differences), each of which is a 400 there
REFUSED: dict[str, tuple[tuple[str, ...], list[dict[str, Any]]]] = {
    "GHSA-25q3-v2hm-8vpf": ((DETOKENIZE,), each("tokens", [-1], [-V], [V + 10**6], [2**63])),
    "CVE-2026-116181": (ANSWERING, [{"stop_token_ids": [i], "min_tokens": 1} for i in (V, -1, 2**31, 2**63 - 1)]),
    "CVE-2026-114051": (GENERATE, [{"max_tokens": None, "min_tokens": k} for k in (8193, 10**6, 2**31, 2**63 - 1)]),
    "GHSA-wpww-v874-ph2p": (ANSWERING, each("cache_salt", "x" * 5_000_000)),
    "CVE-2026-105757": (ANSWERING, each("structured_outputs", {"json": []}, {"choice": []}, {"regex": ""}, {})),
    "CVE-2025-48944": (ANSWERING, each("tools", [SCHEMA]) + each("structured_outputs", {"json": SCHEMA_OF_NOTHING})),
    "CVE-2025-48942": (ANSWERING, each("guided_json", [], {"type": []}) + each("response_format", {"type": "json_schema"})),
    "CVE-2026-55574": (ANSWERING, each("guided_regex", "((a{1,999}){1,999}){1,999}", "(" * 60_000, "a{1,999999999}")),
    "CVE-2025-62164": (ANSWERING, each("prompt_embeds", "AAAA", ["AAAA"], {"shape": [1]})),
    "CVE-2026-22778": (TEMPLATED, [part(kind, {"url": "data:;base64,broken"}) for kind in MEDIA]),
    "CVE-2026-116179": (tuple(BODIES), MEDIA_OPTIONS),
    "CVE-2026-114053": (tuple(BODIES), each("mm_processor_kwargs", {"code_revision": "x"}, {"trust_remote_code": True})),
    "CVE-2026-94622": (ANSWERING, each("kv_transfer_params", *PEERS)),
    "CVE-2026-7304": (ANSWERING, each("logits_processors", ["os.system"], [{"qualname": "x"}])),
    "CVE-2026-34756": ((COMPLETIONS,), [{"prompt": ["a"] * 1024, "n": 17}]),
    "CVE-2026-73559": ((COMPLETIONS,), each("prompt", [[1]] * 100_000, ["a"] * 1025)),
    "CVE-2026-71486": ((DETOKENIZE,), each("tokens", [1] * 70_000, [1] * 5_000_000)),
    "CVE-2025-62426": (RENDERING, [{"chat_template_kwargs": {name: True}} for name in RESERVED]),
    "CVE-2026-115918": (RENDERING, TEMPLATES),
    "CVE-2025-6638": ((COMPLETIONS, TOKENIZE), each("prompt", "a" * 1_000_000, " " * 1_000_000, "\n1" * 500_000)),
    "CVE-2025-52566": (TEMPLATED, each("messages", [{"role": "user", "content": "x " * 500_000}])),
}


@pytest.mark.parametrize(("paths", "changes"), REFUSED.values(), ids=list(REFUSED))
def test_refused(demo_server: Server, paths: tuple[str, ...], changes: list[dict[str, Any]]) -> None:
    wrong = []
    for path in paths:
        for change in changes:
            for stream in ({}, {"stream": True}) if path in ANSWERING else ({},):
                body = {key: value for key, value in (BODIES[path] | change | stream).items() if value is not None}
                if path == TOKENIZE and "prompt" in change:
                    del body["messages"]
                if problem := complaint(post(demo_server, path, body)):
                    wrong.append(f"{path} {str(change)[:80]}: {problem}")
    assert not wrong, "\n".join(wrong)
    check_alive(demo_server)


def fields_of_bodies(server: Server) -> Iterator[tuple[str, str]]:
    for path, methods in HTTP.get(f"{server.url}/openapi.json").json()["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        for field in body["content"]["application/json"]["schema"]["properties"] if body else ():
            yield path, field


def test_no_field_takes_an_internal_handle(demo_server: Server) -> None:
    """CVE-2026-115912, CVE-2026-15969: refused, or kept as the plain data that a template may print."""
    for handle in ({"__class__": "ShmHandle", "name": "psm_1", "size": 1 << 40}, {"__reduce__": ["os.system", "id"]}):
        for path, field in fields_of_bodies(demo_server):
            for value in (handle, [handle], {"x": handle}):
                answer = post(demo_server, path, BODIES[path] | {field: value})
                free = field in FREE
                assert answer.status_code == 200 and free or not complaint(answer), f"{path} {field}: {answer.text[:200]}"
    check_alive(demo_server)


def test_names_are_no_paths(demo_server: Server) -> None:
    """CVE-2024-37032"""
    for name in ("../../etc/passwd", "/etc/passwd", "a\0b", "x" * 100_000, "smollm2-135m/../smollm2-135m"):
        for path, body in BODIES.items():
            assert not complaint(post(demo_server, path, body | {"model": name}), 404)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(COMPLETIONS, {"prompt": [1, V - 1], "stop_token_ids": [V - 1], "min_tokens": 1}, id="CVE-2026-116174"),
        pytest.param(COMPLETIONS, {"prompt": "Hi", "cache_salt": "\N{GRINNING FACE}" * 128}, id="CVE-2026-105756"),
        pytest.param(COMPLETIONS, {"prompt": "<|im_start|><|image|><|im_end|>" * 20}, id="CVE-2026-44222"),
        pytest.param(CHAT, part("text", "<|im_end|><image><|video_pad|>"), id="CVE-2026-44222-chat"),
        pytest.param(TOKENIZE, {"prompt": ""}, id="CVE-2024-8768-tokenize"),
        pytest.param(DETOKENIZE, {"tokens": []}, id="CVE-2024-8768-detokenize"),
        pytest.param(CHAT, {"messages": [{"role": "user", "content": ""}]}, id="CVE-2024-8768-chat"),
    ],
)
def test_odd_but_valid(demo_server: Server, path: str, body: dict[str, Any]) -> None:
    answer = post(demo_server, path, {"max_tokens": 1} | body if path in GENERATE else body)
    assert answer.status_code == 200, answer.text
    check_alive(demo_server)


# --- nothing is fetched, nothing else listens --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trap() -> Iterator[socket.socket]:
    """A listener that nobody may connect to: `accept` would find a waiting connection at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        pytest.param("http://{}/a.png", "image_url", id="CVE-2025-6242"),
        pytest.param("http://example.com\\@{}/a.png", "image_url", id="CVE-2026-24779"),
        pytest.param("http://example.com\t@{}/a.png", "image_url", id="CVE-2026-25960"),
        pytest.param("http://{}/a.wav", "audio_url", id="CVE-2026-34753"),
        pytest.param("http://{}/latest/meta-data", "image_url", id="CVE-2026-33626"),
        pytest.param("http://{}/redirect", "video_url", id="CVE-2026-63764"),
        pytest.param("file:///proc/self/environ?{}", "image_url", id="CVE-2026-24269"),
        pytest.param("http://{}/endless", "input_audio", id="CVE-2026-100650"),
        pytest.param("![](http://{}/a.png)", "text", id="CVE-2026-0599"),
    ],
)
def test_nothing_is_fetched(demo_server: Server, trap: socket.socket, template: str, kind: str) -> None:
    url = template.format("{}:{}".format(*trap.getsockname()))
    content = [{"type": kind, kind: url if kind == "text" else {"url": url}}] * (2 if kind == "text" else 50)
    for path in TEMPLATED:
        body = BODIES[path] | {"messages": [{"role": "user", "content": content}]}
        answer = post(demo_server, path, body)
        assert answer.status_code == 200 if kind == "text" else not complaint(answer), answer.text
    assert text_of(demo_server, BODIES[COMPLETIONS] | {"prompt": url}) is not None
    assert_untouched(trap)


@pytest.mark.parametrize("shape", ["{}", "kv-{}-{}", "___prefill_addr_{}___decode_addr_{}_x"])
def test_a_request_id_is_a_label(demo_server: Server, trap: socket.socket, shape: str) -> None:
    """CVE-2026-116176: no address is read out of it, and it is never more than a short text."""
    address = "{}:{}".format(*trap.getsockname())
    for name in (shape.format(address, address), "x" * 60_000):
        assert text_of(demo_server, BODIES[COMPLETIONS], **{"x-request-id": name}) is not None
        assert text_of(demo_server, BODIES[COMPLETIONS] | {"request_id": name}) is not None
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a\r\n b\r\nContent-Length: 0\r\n\r\n"
    assert exchange(demo_server, head)[0] in (0, 400)
    assert_untouched(trap)


def assert_untouched(trap: socket.socket) -> None:
    with pytest.raises(BlockingIOError):
        trap.accept()


def test_sockets(locked: Server) -> None:
    """CVE-2025-30202, CVE-2025-47277, CVE-2025-29783: one TCP listener, at the address asked for; the rest is private IPC."""
    pids = list(process_tree(locked.process.pid))
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if (match := re.match(r"socket:\[(\d+)\]", str(fd.readlink()) if fd.is_symlink() else "")) is not None:
                inodes.add(match.group(1))
    listening, others = [], []
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (not table.startswith("tcp") or fields[3] == "0A"):
                (listening if table == "tcp" else others).append(fields[1])
    port = int(locked.url.rpartition(":")[2])
    assert listening == [f"0100007F:{port:04X}"] and not others
    for line in Path(f"/proc/{pids[0]}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in inodes and len(fields) > 7:
            assert not fields[7].startswith("@"), "an abstract socket is open to every user of the machine"
            assert Path(fields[7]).parent.stat().st_mode & 0o077 == 0, fields[7]


# --- keys, hosts, routes -----------------------------------------------------------------------------------------------


def test_no_key_no_answer(locked: Server) -> None:
    """GHSA-h3rc-6mm3-gc2m: every route but the short public list, with every wrong kind of key."""
    walked = routes(locked, KEY)
    assert set(walked) == ROUTES
    for method, path in [*walked, ("GET", "/openapi.json"), ("GET", "/redoc"), ("POST", "/nothing")]:
        for bad in ({}, {"authorization": "Bearer x"}, {"authorization": SECRET}, {"x-api-key": "x"}):
            answer = HTTP.request(method, f"{locked.url}{path}", headers=bad)
            assert answer.status_code == 200 if path in PUBLIC_PATHS else not complaint(answer, 401), f"{method} {path}"
    assert not [line for line in locked.lines if SECRET in line]


@pytest.mark.parametrize("host", ["127.0.0.1/health", "x?/health", "x#/health", "/health", "localhost/health?", "[::1]/metrics"])
def test_the_host_header_opens_nothing(locked: Server, host: str) -> None:
    """CVE-2026-48746, CVE-2026-48710: the decision is on the path as it was sent, for every route and spelling."""
    for _, path in routes(locked, KEY):
        if path not in PUBLIC_PATHS:
            quoted = f"/%{ord(path[1]):02x}{path[2:]}"
            for spelled in (path, f"/{path}", path.upper(), quoted, f"/health/..{path}", f"/health;{path}", f"/health%2f{path}"):
                status, _ = exchange(locked, f"POST {spelled} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n".encode())
                assert status == 401, spelled


def test_foreign_pages_get_nothing(demo_server: Server) -> None:
    """CVE-2024-28224: a name that an outsider pointed here, and a page from elsewhere; on every route."""
    for method, path in routes(demo_server):
        body: dict[str, Any] = {"json": BODIES[path]} if path in BODIES else {}
        for host in ("evil.example", "127.0.0.1.evil.example:8000", "0.0.0.0"):
            answer = HTTP.request(method, f"{demo_server.url}{path}", headers={"host": host}, **body)
            assert not complaint(answer) and "host" in answer.text.lower(), path
        page = {"origin": "http://evil.example"}
        answer = HTTP.request(method, f"{demo_server.url}{path}", headers=page, **body)
        assert "access-control-allow-origin" not in answer.headers, path
        asks = page | {"access-control-request-method": method, "access-control-request-headers": "content-type"}
        assert HTTP.options(f"{demo_server.url}{path}", headers=asks).status_code == 400, path


ADMIN = {
    "CVE-2025-63389": ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up", "/pause", "/resume"),
    "CVE-2026-86793": ("/update_weights", "/update_weights_from_tensor", "/init_weight_transfer_engine", "/collective_rpc"),
    "CVE-2026-92972": ("/reset_prefix_cache", "/scale_elastic_ep", "/register", "/PUT/route", "/get_world_size", "/shutdown"),
    "CVE-2025-66455": ("/distserve/connect", "/distserve/p2p_connect", "/inference/v1/generate", "/abort_requests"),
    "CVE-2026-5530": ("/api/pull", "/api/create", "/api/push", "/api/delete", "/api/blobs/sha256:..", "/v1/files", "/v1/batches"),
    "CVE-2026-55646": ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/generations", "/invocations"),
}


@pytest.mark.parametrize("paths", ADMIN.values(), ids=list(ADMIN))
def test_no_such_route_even_with_the_key(locked: Server, paths: tuple[str, ...]) -> None:
    for path in paths:
        for method in ("GET", "POST", "PUT", "DELETE"):
            assert not complaint(HTTP.request(method, f"{locked.url}{path}", headers=KEY), 404), f"{method} {path}"


def test_headers_are_bounded(locked: Server) -> None:
    """CVE-2025-48956: one endless header, endless many, and an endless target."""
    before = memory_bytes(locked.process.pid)
    line, many = b"GET / HTTP/1.1\r\n", b"X: 1\r\n" * 1000
    for start in (line + b"X: " + b"x" * 1_000_000, line + many, b"GET /" + b"x" * 1_000_000):
        status, sent = exchange(locked, start, repeat=100)
        assert status in (0, 400, 431) and sent < 20_000_000
    assert memory_bytes(locked.process.pid) - before < 30_000_000
    check_alive(locked)


def test_bodies_are_bounded(locked: Server) -> None:
    """CVE-2026-55646: a body of unknown length is cut off at the limit, on every route that reads one."""
    before = memory_bytes(locked.process.pid)
    for path in BODIES:
        head = f"POST {path} HTTP/1.1\r\nAuthorization: Bearer {SECRET}\r\nTransfer-Encoding: chunked\r\n"
        assert exchange(locked, f"{head}Content-Type: multipart/form-data\r\nHost: localhost\r\n\r\n".encode())[0] == 400
        sizes: list[int] = []

        def pieces(sizes: list[int] = sizes) -> Iterator[bytes]:
            for _ in range(200):
                sizes.append(100_000)
                yield b"x" * 100_000

        try:
            headers = KEY | {"content-type": "application/json"}
            assert not complaint(HTTP.post(f"{locked.url}{path}", content=pieces(), headers=headers), 413)
        except httpx.WriteError:
            assert sum(sizes) < 20_000_000
    assert memory_bytes(locked.process.pid) - before < 50_000_000
    check_alive(locked)


def test_ranges_are_ignored(demo_server: Server) -> None:
    """CVE-2025-62727"""
    header = "bytes=" + ",".join(f"{i}-{i}" for i in range(10_000))
    for method, path in routes(demo_server):
        if method == "GET":
            answer = HTTP.get(f"{demo_server.url}{path}", headers={"range": header})
            assert answer.status_code == (404 if "{" in path else 200)


def test_the_largest_n_blocks_nobody(demo_server: Server) -> None:
    """CVE-2026-34756: health answers while the sequences are made, and all end when the client leaves."""
    slowest = 0.0
    done = threading.Event()

    def poll() -> None:
        nonlocal slowest
        with httpx.Client(base_url=demo_server.url, timeout=60) as client:
            while not done.is_set():
                began = time.monotonic()
                assert client.get("/health").status_code == 200
                slowest = max(slowest, time.monotonic() - began)

    with ThreadPoolExecutor(1) as pool:
        polled = pool.submit(poll)
        body = {"prompt": [5], "n": 16384, "max_tokens": 50, "stream": True}
        try:
            with HTTP.stream("POST", f"{demo_server.url}{COMPLETIONS}", json=body) as answer:
                assert next(answer.iter_lines()).startswith("data: ")
        finally:
            done.set()
        polled.result()
    assert slowest < 5  # 0.3 s on a quiet machine; the sequences themselves would take minutes
    check_alive(demo_server)


# --- one user's requests and another's ---------------------------------------------------------------------------------


def test_salts_share_nothing(locked: Server) -> None:
    """CVE-2025-46570: neither time nor usage tells what others have asked."""

    def cached(salt: str | None, path: str) -> int:
        secret: dict[str, Any] = {"prompt": "secret " * 20} if path == COMPLETIONS else {"messages": HELLO}
        salted = {} if salt is None else {"cache_salt": salt + path[-5:]}
        usage = post(locked, path, BODIES[path] | secret | salted).json()["usage"]
        return int(usage["cache_read_input_tokens"] if path == MESSAGES else usage["prompt_tokens_details"]["cached_tokens"])

    for path in (*GENERATE, MESSAGES):
        first = [cached(salt, path) for salt in ("alice", "bob", None)]
        assert max(first[:2]) == 0 and cached("alice", path) > 0 and cached("carol", path) == 0


def test_prompt_logprobs_of_a_cached_prefix(locked: Server) -> None:
    """CVE-2026-116180: computed again, not read from memory that nobody wrote."""
    for fields in ({"prompt_logprobs": 3}, {"echo": True, "logprobs": 3}):
        body = {"prompt": list(range(300, 340)), "max_tokens": 1, "temperature": 0, "cache_salt": str(fields)[2:9]}
        fresh = post(locked, COMPLETIONS, body | fields).json()["choices"]
        for _ in range(2):
            post(locked, COMPLETIONS, body)
        assert post(locked, COMPLETIONS, body | fields).json()["choices"] == fresh


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.8, "frequency_penalty": 1.0},
    {"seed": 7, "temperature": 1.2, "top_k": 5},
    {"temperature": 0, "logit_bias": {"260": 100}, "min_tokens": 4},
    {"seed": 3, "top_p": 0.3, "min_p": 0.1, "bad_words": ["the"]},
    {"temperature": 0, "allowed_token_ids": [300, 301, 302], "stop_token_ids": [303]},
]


def test_options_stay_with_their_request(locked: Server) -> None:
    """GHSA-v97p-wpxp-px84, GHSA-fpch-3xrf-7q96: rows are given back and taken by others all the while, in either order."""
    bodies = [{"prompt": f"Story {i}:", "max_tokens": 4 + i, **options} for i, options in enumerate(OPTIONS)]
    alone = [text_of(locked, body) for body in bodies]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda body: text_of(locked, body), bodies)) == alone
        assert list(pool.map(lambda body: text_of(locked, body), bodies[::-1])) == alone[::-1]


def test_equal_request_ids_do_not_meet(locked: Server) -> None:
    """PYSEC-2026-4198"""
    bodies = [{"prompt": f"Number {i} is", "max_tokens": 6, "temperature": 0} for i in range(3)]
    alone = [text_of(locked, body) for body in bodies]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda body: text_of(locked, body, **{"x-request-id": "same"}), bodies)) == alone


def test_a_disconnect_ends_no_other_request(locked: Server, wait_until: Callable[..., None]) -> None:
    """CVE-2026-112266: ids that are prefixes of others', or equal to them."""
    body = {"prompt": "Once", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "cache_salt": "d"}
    alone = text_of(locked, body)
    names = ["a", "ab", "a", "abc"]
    with ThreadPoolExecutor(len(names)) as pool:
        others = [pool.submit(text_of, locked, body, **{"x-request-id": name}) for name in names]
        wait_until(lambda: locked.metric("vllm:num_requests_running") >= len(names) or others[0].done())
        for name in ("a", "", "ab"):
            leaving = {"stream": True, "max_tokens": 400, "ignore_eos": True, "prompt": "Endless"}
            with HTTP.stream("POST", f"{locked.url}{COMPLETIONS}", json=leaving, headers=KEY | {"x-request-id": name}) as answer:
                next(answer.iter_lines())
        assert [other.result() for other in others] == [alone] * len(names)


def test_tokenising_beside_generating(locked: Server) -> None:
    """CVE-2026-43631: a flood on the tokenizer's routes sees one vocabulary and disturbs nobody."""
    body = {"prompt": "Once", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    alone, text = text_of(locked, body), "Grüße <|im_end|> 世界 " * 9
    with ThreadPoolExecutor(8) as pool, httpx.Client(base_url=locked.url, timeout=60, headers=KEY) as client:
        together = pool.submit(text_of, locked, body)
        found = list(pool.map(lambda _: client.post(TOKENIZE, json={"prompt": text}).json()["tokens"], range(60)))
        back = list(pool.map(lambda ids: client.post(DETOKENIZE, json={"tokens": ids}).json()["prompt"], found))
        assert set(back) == {text} and together.result() == alone
