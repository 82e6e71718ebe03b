"""The engine process: `python -m halfbyte.engine.process`, started by `ProcessClient`, never by a user.

Reads one EngineSpawn from standard input, builds the engine, then serves its socket pair: while there is work, a step and
one message; otherwise it sleeps in the socket. Standard input stays open as a leash: when the parent dies, it closes and
this process ends at once. A thread sends a heartbeat each second, so that a hang is told apart from a long step.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from halfbyte.config import EngineOptions
from halfbyte.engine.build import build_engine
from halfbyte.engine.controls import perform
from halfbyte.engine.core import EngineCore
from halfbyte.engine.messages import (
    AbortRequests,
    AddRequests,
    Control,
    EngineSpawn,
    Failed,
    Heartbeat,
    Phase,
    Ready,
    Shutdown,
    Step,
    ToEngine,
)
from halfbyte.errors import HalfbyteError
from halfbyte.log import setup_logging

HEARTBEAT_INTERVAL_S = 1.0

log = logging.getLogger(__name__)


class EngineProcess:
    """One engine core behind one ZMQ pair. `run` returns after Shutdown."""

    def __init__(self, spawn: EngineSpawn) -> None:
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PULL)
        self._input.connect(spawn.input_address)
        self._output_address = spawn.output_address
        self._output = self._push_socket()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._options = EngineOptions(**spawn.options)
        self._step_started_s: float | None = None
        self._closing = threading.Event()

    def run(self) -> int:
        heartbeat = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        heartbeat.start()
        try:
            core, info = build_engine(self._options, lambda name, seconds: self._send(Phase(name, seconds)), streams=True)
        except Exception as error:
            if not isinstance(error, HalfbyteError):
                log.exception("the engine could not start")
            self._send(Failed.of(error))
            return self._close(heartbeat, code=1)
        gc.freeze()  # a collection that goes through what the start left behind would hold up every stream for 0.2 s
        self._send(Ready(info))
        try:
            while self._receive(core):
                if core.has_work():
                    self._step_started_s = time.monotonic()
                    self._send(Step(core.step()))
                    self._step_started_s = None
        finally:
            core.close()
        return self._close(heartbeat, code=0)

    def _receive(self, core: EngineCore) -> bool:
        """Take in all waiting messages; sleep for one when there is nothing to compute. False after Shutdown."""
        timeout_ms = 0 if core.has_work() else None
        while self._input.poll(timeout_ms):
            message = self._decoder.decode(self._input.recv())
            if isinstance(message, AddRequests):
                core.add(message.requests)
            elif isinstance(message, AbortRequests):
                core.abort(message.request_ids)
            elif isinstance(message, Control):
                self._send(perform(core, message))
            elif isinstance(message, Shutdown):
                return False
            timeout_ms = 0
        return True

    def _send(self, message: object) -> None:
        self._output.send(self._encoder.encode(message))

    def _beat(self) -> None:
        output, encoder = self._push_socket(), msgspec.msgpack.Encoder()
        while not self._closing.wait(HEARTBEAT_INTERVAL_S):
            started_s = self._step_started_s
            output.send(encoder.encode(Heartbeat(0.0 if started_s is None else time.monotonic() - started_s)))
        output.close(linger=0)

    def _push_socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.connect(self._output_address)
        return socket

    def _close(self, heartbeat: threading.Thread, code: int) -> int:
        self._closing.set()
        heartbeat.join()
        self._input.close(linger=0)
        self._output.close(linger=1000)
        self._context.term()
        return code


def _exit_with_parent(wait_for_end: Callable[[], bytes]) -> None:
    """Standard input ends when the parent is gone: nobody is left to serve."""
    wait_for_end()
    os._exit(1)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides what it means
    source = sys.stdin.buffer
    size = int.from_bytes(source.read(4), "little")
    spawn = msgspec.msgpack.decode(source.read(size), type=EngineSpawn)
    setup_logging(spawn.log_level)
    threading.Thread(target=_exit_with_parent, args=(source.read,), name="leash", daemon=True).start()
    return EngineProcess(spawn).run()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the leash thread still reads standard input: the interpreter could not take its lock at exit
