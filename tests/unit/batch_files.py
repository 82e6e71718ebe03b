"""Lines of batch files as tests write and read them, and a way to wait for what a batch does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

LIMIT_S = 20.0


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode() + b"\n"


def written(data: bytes) -> list[dict[str, Any]]:
    """The lines of an output, all of them whole."""
    assert data.endswith(b"\n") or not data
    return [json.loads(text) for text in data.splitlines()]


class Progress:
    """Something to wait for: `happened` is called on the loop whenever a condition may have become true."""

    def __init__(self) -> None:
        self._news = asyncio.Event()

    def happened(self) -> None:
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()
