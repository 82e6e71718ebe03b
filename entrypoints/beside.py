"""Python work beside the event loop: at most one long job and one short one at a time.

Each thread that runs Python keeps the loop waiting for its turn, and many of them for many turns: a running stream would stop
while long conversations arrive. So they queue, and short ones pass long ones. Knows nothing of what the jobs do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LONG_CHARS = 20_000

Result = TypeVar("Result")


class Beside:
    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, thread_name_prefix="short-work")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-work")

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        """What `work` returns or raises. size: how many characters it goes through, about."""
        pool = self._long if size > LONG_CHARS else self._short
        return await asyncio.get_running_loop().run_in_executor(pool, work)
