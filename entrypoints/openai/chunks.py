"""A stream's chunks as events: the news of each delta, usage and fingerprint where they belong, the usage chunk at the end.

What a chunk says is its route's matter (`news`); when it is sent and what is added to it is the same for all. [DONE] and
failures are `EventStream`'s.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from msgspec import UNSET

from halfbyte.engine.output_processor import SequenceDelta
from halfbyte.entrypoints.openai.choices import Tally
from halfbyte.entrypoints.openai.frontend import Frontend
from halfbyte.entrypoints.openai.protocol import GenerationFields
from halfbyte.entrypoints.openai.sampling import wants_usage
from halfbyte.entrypoints.openai.streaming import Closeable, merge
from halfbyte.entrypoints.openai.wire import ChatChunk, CompletionChunk, to_event

Chunk = TypeVar("Chunk", ChatChunk, CompletionChunk)


async def chunk_events(
    frontend: Frontend,
    request: GenerationFields,
    generations: Sequence[Closeable],
    tally: Tally,
    news: Callable[[int, SequenceDelta], list[Chunk]],
    bare: Callable[[], Chunk],
) -> AsyncGenerator[bytes, None]:
    """The events before [DONE].

    news(prompt index, delta): the chunks that tell a delta, at least one when it ends a choice. bare(): one without choices.
    """
    usage_at_end, usage_always = wants_usage(request, frontend.config)
    async with aclosing(merge(generations)) as deltas:
        async for prompt_index, delta in deltas:
            tally.count(prompt_index, delta)
            chunks = news(prompt_index, delta)
            usage = tally.usage() if usage_always else UNSET
            for chunk in chunks:
                chunk.usage = usage
            if delta.finish_reason is not None and not usage_at_end:
                chunks[-1].system_fingerprint = frontend.fingerprint
            if chunks:
                yield b"".join(map(to_event, chunks))
    if usage_at_end:
        last = bare()
        last.usage, last.system_fingerprint = tally.usage(), frontend.fingerprint
        yield to_event(last)
