"""How a front end reaches an engine: one interface, in this process or in another.

`add`, `abort` and `control` may be called from any thread; `receive` and `close` from one. InProcessClient computes inside
`receive`; ProcessClient starts `halfbyte.engine.process`, talks msgpack over a ZMQ pair on private IPC sockets, and notices when
the process dies or hangs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import msgspec
import zmq

import halfbyte
from halfbyte.config import EngineOptions
from halfbyte.engine.controls import perform
from halfbyte.engine.core import EngineCore
from halfbyte.engine.messages import (
    AbortRequests,
    Action,
    AddRequests,
    Answer,
    Control,
    EngineSpawn,
    Failed,
    FromEngine,
    Heartbeat,
    Order,
    Phase,
    Ready,
    Reply,
    Shutdown,
    Step,
    ToEngine,
)
from halfbyte.errors import EngineDeadError
from halfbyte.types import EngineInfo, EngineRequest, StepOutput

SILENCE_LIMIT_S = 10.0
STEP_LIMIT_S = 900.0
SHUTDOWN_LIMIT_S = 5.0
_POLL_S = 1.0

PhaseReport = Callable[[str, float], None]


class EngineClient(Protocol):
    """What a front end needs of an engine."""

    info: EngineInfo

    def add(self, requests: list[EngineRequest]) -> None:
        """Hand over requests. Their outputs come through `receive`."""

    def abort(self, request_ids: list[str]) -> None:
        """End these requests; unknown and finished ids are ignored. Each live one yields a last output."""

    def control(self, action: Order[Answer]) -> Future[Answer]:
        """Have an action carried out, after what was added and aborted before it. Its result, or the HalfbyteError that it
        raised, is there when `receive` has met the reply; never, when the engine ends before that."""

    def receive(self, timeout_s: float | None = None) -> StepOutput | None:
        """The next step's output; None when `timeout_s` passed without one, or when a control call was answered.

        EngineDeadError when there will be none.
        """

    def close(self) -> None:
        """Stop the engine and free what it holds. `receive` must not be in progress, except in a process client."""


def carry_out(client: EngineClient, action: Order[Answer]) -> Answer:
    """Wait for a control call of a client that nobody else receives from."""
    answered = client.control(action)
    while not answered.done():
        client.receive()
    return answered.result()


class _OpenCalls:
    """The control calls of one client that have no reply yet."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._futures: dict[int, Future[Any]] = {}

    def open(self, action: Order[Answer]) -> tuple[Control, Future[Answer]]:
        call = Control(next(self._ids), cast(Action, action))
        future: Future[Answer] = Future()
        self._futures[call.call_id] = future
        return call, future

    def answer(self, reply: Reply) -> None:
        future = self._futures.pop(reply.call_id)
        if not future.set_running_or_notify_cancel():
            return  # nobody waits any more
        if reply.failure is None:
            future.set_result(reply.result)
        else:
            future.set_exception(reply.failure.exception())


class InProcessClient:
    """The engine core in this process: a step runs in the thread that calls `receive`."""

    def __init__(self, core: EngineCore, info: EngineInfo) -> None:
        self.info = info
        self._core = core
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._calls = _OpenCalls()

    def add(self, requests: list[EngineRequest]) -> None:
        self._inbox.put(AddRequests(requests))

    def abort(self, request_ids: list[str]) -> None:
        self._inbox.put(AbortRequests(request_ids))

    def control(self, action: Order[Answer]) -> Future[Answer]:
        call, answered = self._calls.open(action)
        self._inbox.put(call)
        return answered

    def receive(self, timeout_s: float | None = None) -> StepOutput | None:
        if self._inbox.empty() and not self._core.has_work():
            self._take(block=True, timeout_s=timeout_s)
        while not self._inbox.empty():
            self._take(block=False)
        return self._core.step() if self._core.has_work() else None

    def close(self) -> None:
        self._core.close()

    def _take(self, block: bool, timeout_s: float | None = None) -> None:
        with contextlib.suppress(queue.Empty):
            message = self._inbox.get(block, timeout_s)
            if isinstance(message, AddRequests):
                self._core.add(message.requests)
            elif isinstance(message, AbortRequests):
                self._core.abort(message.request_ids)
            elif isinstance(message, Control):
                self._calls.answer(perform(self._core, message))


class ProcessClient:
    """The engine in a child process. Make one with `start`, which returns when the engine is ready or raises why not."""

    PROGRAM: ClassVar[tuple[str, ...]] = ("-m", "halfbyte.engine.process")

    def __init__(self, options: EngineOptions) -> None:
        self.info: EngineInfo
        self._folder = tempfile.TemporaryDirectory(prefix="halfbyte-")
        self._context = zmq.Context()
        self._send_lock = threading.Lock()
        self._calls = _OpenCalls()
        self._closing = False
        self._input = self._bind(zmq.PUSH, "input")
        self._output = self._bind(zmq.PULL, "output")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self.process = self._spawn(options)
        self._last_word_s = time.monotonic()

    @classmethod
    def start(cls, options: EngineOptions, on_phase: PhaseReport = lambda name, seconds: None) -> ProcessClient:
        """Start the process and wait until it serves. Raises what stopped it, a HalfbyteError with a one-line message."""
        client = cls(options)
        try:
            while True:
                message = client._next_message()
                if isinstance(message, Phase):
                    on_phase(message.name, message.seconds)
                elif isinstance(message, Ready):
                    client.info = message.info
                    return client
                elif isinstance(message, Failed):
                    raise message.exception()
        except BaseException:
            client.close()
            raise

    def add(self, requests: list[EngineRequest]) -> None:
        self._tell(AddRequests(requests))

    def abort(self, request_ids: list[str]) -> None:
        self._tell(AbortRequests(request_ids))

    def control(self, action: Order[Answer]) -> Future[Answer]:
        call, answered = self._calls.open(action)
        self._tell(call)
        return answered

    def receive(self, timeout_s: float | None = None) -> StepOutput | None:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._next_message(deadline_s)) is not None:
            if isinstance(message, Step):
                return message.output
            if isinstance(message, Reply):
                self._calls.answer(message)
                break
        return None

    def close(self) -> None:
        if self._closing:
            return
        self._tell(Shutdown())
        self._closing = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SHUTDOWN_LIMIT_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()
        self._input.close(linger=0)
        self._output.close(linger=0)
        self._context.term()
        self._folder.cleanup()

    def _tell(self, message: ToEngine) -> None:
        with self._send_lock:
            if not self._closing:
                with contextlib.suppress(zmq.Again):  # nobody is there to take it: `receive` says so
                    self._input.send(self._encoder.encode(message), zmq.NOBLOCK)

    def _next_message(self, deadline_s: float | None = None) -> FromEngine | None:
        """The next message, None at the deadline. Raises EngineDeadError when the process is gone, silent or stuck."""
        while True:
            wait_s = _POLL_S if deadline_s is None else min(_POLL_S, max(0.0, deadline_s - time.monotonic()))
            exit_code = self.process.poll()  # looked at before the socket, so that its last words are read first
            if self._output.poll(int(wait_s * 1000)):
                self._last_word_s = time.monotonic()
                message: FromEngine = self._decoder.decode(self._output.recv())
                if isinstance(message, Heartbeat) and message.step_age_s > STEP_LIMIT_S:
                    raise EngineDeadError(f"the engine process is stuck: one step has run for {message.step_age_s:.0f} s")
                return message
            if exit_code is not None:
                raise EngineDeadError(f"the engine process ended unexpectedly ({_describe_exit(exit_code)})")
            if time.monotonic() - self._last_word_s > SILENCE_LIMIT_S:
                raise EngineDeadError(f"the engine process has not answered for {SILENCE_LIMIT_S:.0f} s")
            if deadline_s is not None and time.monotonic() >= deadline_s:
                return None

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.bind(self._address(name))
        return socket

    def _address(self, name: str) -> str:
        return f"ipc://{self._folder.name}/{name}"

    def _spawn(self, options: EngineOptions) -> subprocess.Popen[bytes]:
        search_path = [str(Path(halfbyte.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in search_path if p)}
        process = subprocess.Popen([sys.executable, *self.PROGRAM], stdin=subprocess.PIPE, stdout=2, env=environment)
        level = logging.getLevelName(logging.getLogger("halfbyte").getEffectiveLevel()).lower()
        spawn = EngineSpawn(_plain(asdict(options)), self._address("input"), self._address("output"), level)
        first_words = msgspec.msgpack.encode(spawn)
        assert process.stdin is not None
        process.stdin.write(len(first_words).to_bytes(4, "little") + first_words)
        process.stdin.flush()
        return process


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def _describe_exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
