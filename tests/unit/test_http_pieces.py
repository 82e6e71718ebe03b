"""The parts of the HTTP front end that need no server: errors, JSON, hosts, refused fields, token strings."""

from __future__ import annotations

import hmac
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from halfbyte.entrypoints import middleware
from halfbyte.entrypoints.openai import body
from halfbyte.entrypoints.openai.errors import (
    INTERNAL_MESSAGE,
    MAX_ECHOED_CHARS,
    MAX_REPORTED_ERRORS,
    GenerationError,
    HttpError,
    explain,
    scrub,
)
from halfbyte.entrypoints.openai.frontend import MAX_LABEL_CHARS, request_label
from halfbyte.entrypoints.openai.logprobs import CompletionLogprobsWriter, TokenNames, join_logprobs, prompt_pieces
from halfbyte.entrypoints.openai.protocol import ChatRequest, CompletionRequest
from halfbyte.entrypoints.openai.refused import NEUTRAL, refuse_unsupported
from halfbyte.errors import EngineDeadError, NotFoundError, OverloadedError, UserError
from halfbyte.types import TokenLogprobs

ROOT = Path(__file__).resolve().parents[2]


def test_the_api_process_needs_no_torch() -> None:
    code = "import sys, halfbyte.entrypoints.server; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# --- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "clean"),
    [
        ("<Image at 0x7f3c2a1b> is broken", "<Image> is broken"),
        ('File "/usr/lib/x.py", line 12, in f', "[frame]"),
        ("cannot open /home/me/models/x.gguf now", "cannot open [path] now"),
        ("temperature must be in [0, 2], got 3/4 or 1/2/3", "temperature must be in [0, 2], got 3/4 or 1/2/3"),
        ("send text/plain and http://host/a/b", "send text/plain and http://host/a/b"),
        ("the schema at #/properties/a/type is wrong", "the schema at #/properties/a/type is wrong"),
    ],
)
def test_scrub(message: str, clean: str) -> None:
    assert scrub(message) == clean


def test_scrub_bounds_its_work() -> None:
    assert len(scrub("/a" * 10_000_000)) < 5000


@pytest.mark.parametrize(
    ("error", "status", "kind", "param"),
    [
        (UserError("no", param="n"), 400, "BadRequestError", "n"),
        (NotFoundError("no", param="model"), 404, "NotFoundError", "model"),
        (OverloadedError("full", retry_after_s=7), 503, "Service Unavailable", None),
        (EngineDeadError("gone"), 500, "InternalServerError", None),
        (GenerationError("nan"), 500, "InternalServerError", None),
        (ValueError("a bug at 0xdeadbeef"), 500, "InternalServerError", None),
        (KeyError("secret"), 500, "InternalServerError", None),
    ],
)
def test_explain(error: Exception, status: int, kind: str, param: str | None) -> None:
    problem = explain(error)
    assert (problem.status, problem.type, problem.param) == (status, kind, param)
    assert problem.body().error.code == problem.response().status_code == status
    if isinstance(error, OverloadedError):
        assert problem.response().headers["retry-after"] == "7"
    if isinstance(error, ValueError | KeyError) and not isinstance(error, UserError):
        assert problem.message == INTERNAL_MESSAGE


def test_validation_errors_are_short() -> None:
    wrong = {"messages": [{}], "stop": "x" * 100_000, "temperature": "y" * 100_000} | {
        name: ["z" * 100_000] for name in ChatRequest.model_fields if name not in ("messages", "stop")
    }
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(wrong)
    problem = explain(caught.value)
    assert problem.status == 400 and problem.type == "Bad Request" and problem.param == "body.model"
    assert problem.message.count("(got ") == MAX_REPORTED_ERRORS
    assert "z" * (MAX_ECHOED_CHARS + 1) not in problem.message


# --- bodies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b'{"n": NaN}', b'{"n": -Infinity}', b'{"n": 1e309}', b'{"n": 01}', b"{'n': 1}", b'{"user": "\\ud800"}', b"", b"[]", b"1",
     b'{"n": 1} x', b"\xef\xbb\xbf{}", b"[" * 200_000, b'{"a": [' + b"[]," * 300_000 + b"1]}"],
)  # fmt: skip
def test_json_is_strict(data: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        body.decode(data, CompletionRequest)
    assert caught.value.error.status == 400 and caught.value.error.param == "body"


def test_unknown_fields_are_kept() -> None:
    request = body.decode(b'{"prompt": "x", "foo": [1], "n": null}', CompletionRequest)
    assert request.prompt == "x" and request.n is None and request.model_extra == {"foo": [1]}


def test_every_neutral_value_passes_and_others_are_named() -> None:
    for name, values in NEUTRAL.items():
        for value in values:
            refuse_unsupported({name: value, "unknown": object()})
        with pytest.raises(UserError, match=name) as caught:
            refuse_unsupported({name: "something"})
        assert caught.value.param == name
    for name, value in (("best_of", True), ("stream_interval", 1.0), ("suffix", [])):
        with pytest.raises(UserError):
            refuse_unsupported({name: value})
    assert set(ChatRequest.model_fields) & set(NEUTRAL) == {"tools", "tool_choice"}, "of other routes they are refused"
    assert not set(CompletionRequest.model_fields) & set(NEUTRAL), "a field that a route knows is not refused"


@pytest.mark.parametrize(
    ("candidate", "valid"),
    [("abc-1", True), ("a b", True), ("x" * MAX_LABEL_CHARS, True), ("x" * (MAX_LABEL_CHARS + 1), False), ("", False),
     ("a\nb", False), ("a\x00", False), ("é", False), (5, False), (None, False)],
)  # fmt: skip
def test_request_labels(candidate: Any, valid: bool) -> None:
    assert request_label(candidate) == (candidate if valid else None)


# --- middleware --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"), ("LocalHost:8000", "localhost"), ("[::1]", "::1"), ("[::1]:80", "::1"), ("a.b.:1", "a.b"),
        ("::1", ""), ("a:b", ""), ("", ""), ("a:1:2", ""), ("a/b", "a/b"), ("u@localhost", "u@localhost"),
    ],
)  # fmt: skip
def test_host_name(header: str, name: str) -> None:
    assert middleware.host_name(header) == name


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("::1", True), ("[::1]", True), ("0.0.0.0", False),
     ("::", False), ("", False), ("10.0.0.1", False), ("example.com", False)],
)  # fmt: skip
def test_is_loopback(host: str, loopback: bool) -> None:
    assert middleware.is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [("/v1/x", "", "/v1/x"), ("/api/v1/x", "/api", "/v1/x"), ("/api", "/api", ""), ("/apihealth", "/api", "/apihealth"),
     ("/health", "/api", "/health")],
)  # fmt: skip
def test_route_path(path: str, root: str, expected: str) -> None:
    assert middleware.route_path({"path": path, "root_path": root}) == expected


def test_keys_are_compared_by_digest_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", compare)
    digests = middleware._digests(("one", "zwö", "", "three"))
    for header, valid in ((b"Bearer one", True), ("Bearer zwö".encode(), True), (b"Bearer \xff", False), (b"one", False)):
        compared.clear()
        assert (middleware._known_key({"headers": [(b"authorization", header)]}, digests) in digests) is valid
        assert len(compared) == (3 if header != b"one" else 0) and {len(side) for pair in compared for side in pair} <= {32}
    compared.clear()
    assert middleware._known_key({"headers": [(b"x-api-key", b"three")]}, digests) == digests[2] and len(compared) == 3


# --- token strings -----------------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer of which only the bytes of tokens matter."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def token_text(self, token_id: int) -> str:
        return self.pieces[token_id].decode(errors="replace")


@pytest.mark.parametrize(
    ("pieces", "text", "expected"),
    [
        ((b"<s>", b"Hi", b" you"), "Hi you", ["", "Hi", " you"]),
        ((b"<s>", b"<s>", b"x"), "<s>x", ["<s>", "", "x"]),
        ((b" Hi", b" you"), "Hi you", ["Hi", " you"]),
        ((b"\xc3", b"\xa9", b"!"), "é!", ["", "é", "!"]),
        ((b"\xe4\xb8", b"\x96\xe7", b"\x95\x8c"), "世界", ["", "世", "界"]),
        ((b"hi",), "HI", ["hi"]),
        ((b"<s>", b"a"), None, ["<s>", "a"]),
        ((b"a", b"\xc3"), None, ["a", "\ufffd"]),
        ((), "", []),
    ],
)
def test_prompt_pieces(pieces: tuple[bytes, ...], text: str | None, expected: list[str]) -> None:
    assert prompt_pieces(Bytes(*pieces), range(len(pieces)), text) == expected  # type: ignore[arg-type]


def test_completion_logprobs_in_parts_equal_the_whole() -> None:
    names = TokenNames(Bytes(b"ab", b"c", b"ab"))  # type: ignore[arg-type]
    entries = [None, TokenLogprobs(1, -0.5, 2, [2, 0, 1], [-0.1, float("-inf"), -0.5]), TokenLogprobs(0, -1.0, 1, [], [])]
    whole = CompletionLogprobsWriter(names).write([0, 1, 0], ["ab", "c", "ab"], entries)
    assert whole.text_offset == [0, 2, 3] and whole.token_logprobs == [None, -0.5, -1.0]
    assert whole.top_logprobs == [None, {"c": -0.5, "ab": -0.1}, {"ab": -1.0}]
    parts = CompletionLogprobsWriter(names)
    joined = join_logprobs(parts.write([0], ["ab"], entries[:1]), parts.write([1, 0], ["c", "ab"], entries[1:]))
    assert joined == whole
