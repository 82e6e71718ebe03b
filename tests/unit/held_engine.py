"""Engines for the tests of batches: one whose answers are released by hand, and one that answers the newest request first.

`stand_in` puts one of them in the place of the engine that `run-batch` starts. As a program it runs a whole command line around
the second, and sends itself a signal at a given request: `python -m tests.unit.held_engine SIGNAL NUM_REQUESTS run-batch ...`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from halfbyte.config import EngineOptions, ServerConfig
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints import cli, launch
from halfbyte.errors import EngineDeadError
from halfbyte.types import EngineInfo, EngineOutput, EngineRequest, SchedulerStats, StepOutput
from tests.unit.batch_files import Progress


class HeldClient:
    """An EngineClient whose requests each yield their first prompt token when the test lets them. `die` kills it.

    Works in the loop that made it, apart from `receive`.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int = 64, hold: bool = True) -> None:
        self.progress = Progress()
        self.live: dict[int, EngineRequest] = {}  # by the first token of the prompt
        self.most_live = 0
        self.num_added = 0
        self.closed = False
        self._hold = hold
        self._changed = threading.Condition()
        self._outputs: list[EngineOutput] = []
        self._dead: str | None = None
        numbers = {"vocab_size": vocab_size, "max_num_seqs": max_num_seqs}
        numbers |= {"max_model_len": 64, "max_num_batched_tokens": 512, "block_size": 16, "num_blocks": 100, "max_logprobs": 5}
        words = {"model": "held", "architecture": "Held", "dtype": "float32", "kv_cache_dtype": "float32"}
        others: dict[str, Any] = {"eos_token_ids": [vocab_size - 1], "max_concurrency": 1.0, "enable_prefix_caching": True}
        self.info = EngineInfo(**words, **numbers, **others, kv_cache_bytes=1, kv_cache_tokens=1)

    def add(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            self.live[request.prompt_token_ids[0]] = request
            self.num_added += 1
            self.most_live = max(self.most_live, len(self.live))
            if not self._hold:
                self.finish(request.prompt_token_ids[0])
        self.progress.happened()

    def abort(self, request_ids: list[str]) -> None:
        self.live = {token: request for token, request in self.live.items() if request.request_id not in request_ids}
        self.progress.happened()

    def finish(self, *tokens: int) -> None:
        with self._changed:
            for token in tokens:
                request_id = self.live.pop(token).request_id
                self._outputs.append(EngineOutput(request_id=request_id, new_token_ids=[token], finish_reason="length"))
            self._changed.notify_all()

    def die(self, reason: str) -> None:
        with self._changed:
            self._dead = reason
            self._changed.notify_all()

    def receive(self, timeout_s: float | None = None) -> StepOutput | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._outputs or self._dead is not None, timeout_s):
                return None
            if not self._outputs:
                raise EngineDeadError(str(self._dead))
            outputs, self._outputs = self._outputs, []
            return StepOutput(outputs=outputs, stats=SchedulerStats())

    def close(self) -> None:
        self.closed = True


class LastFirstClient(HeldClient):
    """Answers the newest request first, with the second token of its prompt. Ends the process where `end_at` says."""

    def __init__(self, vocab_size: int, end_at: tuple[int, int] | None = None) -> None:
        super().__init__(vocab_size)
        self._end_at = end_at
        self._open: list[EngineRequest] = []

    def add(self, requests: list[EngineRequest]) -> None:
        with self._changed:
            self.num_added += len(requests)
            self._open += requests
            self._changed.notify_all()
        if self._end_at is not None and self.num_added == self._end_at[1]:
            os.kill(os.getpid(), self._end_at[0])

    def abort(self, request_ids: list[str]) -> None:
        with self._changed:
            self._open = [request for request in self._open if request.request_id not in request_ids]

    def receive(self, timeout_s: float | None = None) -> StepOutput | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._open, 0.02):  # whoever closes the engine waits for this
                return None
            request = self._open.pop()
        answer = EngineOutput(request_id=request.request_id, new_token_ids=[request.prompt_token_ids[1]], finish_reason="length")
        return StepOutput(outputs=[answer], stats=SchedulerStats())


def byte_tokenizer() -> Tokenizer:
    """Each byte, and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, eos_token="</s>")


def stand_in(
    set_attribute: Callable[[Any, str, Any], None], tokenizer: Tokenizer, make: Callable[[], HeldClient], started: list[Any]
) -> None:
    """Let `run-batch` start what `make` makes; `started` gets the options and the client of each."""

    def start_engine(options: EngineOptions, server: ServerConfig) -> Any:
        client = make()
        started.extend((options, client))
        front = SimpleNamespace(tokenizer=tokenizer, default_sampling={})
        return client, front, replace(server, served_model_names=server.served_model_names or (options.model,))

    set_attribute(launch, "start_engine", start_engine)
    set_attribute(launch, "model_temperatures", lambda front, server: None)


if __name__ == "__main__":
    signal_number, num_requests, *words = sys.argv[1:]
    vocabulary = byte_tokenizer()
    end_at = (int(signal_number), int(num_requests))
    stand_in(setattr, vocabulary, lambda: LastFirstClient(len(vocabulary), end_at), [])
    sys.exit(cli.main(words))
