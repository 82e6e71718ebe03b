"""The routes of operators on a real server: streams of the real client across sleeps, a flood of tokenisation, and the memory."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import ServerProcess

KEY = {"authorization": "Bearer ADMIN_KEY"}
MODEL = "smollm2-135m"
PROMPT = "Once upon a time in a small village by the sea, there lived an old fisherman who"


def order(server: ServerProcess, path: str, method: str = "POST") -> dict[str, Any]:
    answer = httpx.request(method, f"{server.url}{path}", headers=KEY, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stream(server: ServerProcess, count: int, begun: threading.Event | None = None) -> str:
    pieces = []
    with server.client() as client:
        request = {"model": MODEL, "prompt": PROMPT, "max_tokens": count, "temperature": 0, "extra_body": {"ignore_eos": True}}
        for chunk in client.completions.create(stream=True, **request):  # type: ignore[call-overload]
            pieces.append(chunk.choices[0].text)
            if begun is not None and len(pieces) == 3:
                begun.set()
    return "".join(pieces)


def during_a_stream(server: ServerProcess, count: int, act: Callable[[], None]) -> Any:
    """Do something when a stream has begun; its text, or what ended it."""
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(stream, server, count, begun)
        assert begun.wait(60)
        act()
        return text.exception(60) or text.result()


def anonymous_bytes(pid: int) -> int:
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found.group(1)) << 10


def test_an_engine_asleep_has_given_its_memory_back(admin_server: ServerProcess) -> None:
    text, pid = stream(admin_server, 16), admin_server.engine_pid()
    awake = anonymous_bytes(pid)
    assert order(admin_server, "/sleep?level=2") == {"status": "sleeping", "level": 2}
    assert anonymous_bytes(pid) < awake - (80 << 20), "its weights are 80 MB as they are packed"
    with admin_server.client() as client, pytest.raises(openai.InternalServerError, match="asleep") as refused:
        client.completions.create(model=MODEL, prompt="x")
    assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"]
    assert httpx.get(f"{admin_server.url}/health").status_code == 200
    assert order(admin_server, "/wake_up") == {"status": "awake", "tags": None}
    assert stream(admin_server, 16) == text and admin_server.engine_pid() == pid


@pytest.mark.parametrize("level", [1, 2])
def test_a_suspended_stream_goes_on_with_the_same_tokens(admin_server: ServerProcess, level: int) -> None:
    def sleep_and_wake() -> None:
        order(admin_server, f"/sleep?level={level}&mode=keep")
        order(admin_server, "/wake_up")

    assert during_a_stream(admin_server, 80, sleep_and_wake) == stream(admin_server, 80)


def test_abort_and_wait(admin_server: ServerProcess) -> None:
    ended = during_a_stream(admin_server, 1000, lambda: order(admin_server, "/sleep?mode=abort") and None)
    assert isinstance(ended, openai.APIError) and "POST /wake_up" in str(ended)
    order(admin_server, "/wake_up")
    text = during_a_stream(admin_server, 60, lambda: order(admin_server, "/sleep?mode=wait") and None)
    order(admin_server, "/wake_up")
    assert text == stream(admin_server, 60)


def test_the_prefix_cache_is_reset_under_a_stream(admin_server: ServerProcess) -> None:
    found: list[bool] = []

    def reset() -> None:
        found.append(order(admin_server, "/reset_prefix_cache")["success"])
        found.append(order(admin_server, "/reset_prefix_cache?reset_running_requests=true")["success"])

    text = during_a_stream(admin_server, 100, reset)
    assert found == [False, True] and text == stream(admin_server, 100)


def test_a_flood_of_tokenisation_meets_sleep_and_wake_up(admin_server: ServerProcess) -> None:
    """CVE-2026-43631, CVE-2026-43632: what counts tokens needs nothing that a sleep takes away."""
    done = threading.Event()

    def flood() -> set[tuple[int, str]]:
        seen = set()
        with httpx.Client(base_url=admin_server.url, timeout=60) as client:
            while not done.is_set():
                for path, body in (("/tokenize", {"prompt": PROMPT}), ("/detokenize", {"tokens": [1, 2, 3]})):
                    answer = client.post(path, json=body)
                    seen.add((answer.status_code, answer.text))
        return seen

    with ThreadPoolExecutor(4) as pool:
        floods = [pool.submit(flood) for _ in range(4)]
        for level in (1, 2, 2):
            order(admin_server, f"/sleep?level={level}")
            order(admin_server, "/wake_up")
        done.set()
        seen = set[tuple[int, str]]().union(*(one.result(60) for one in floods))
    assert len(seen) == 2 and {status for status, _ in seen} == {200}
