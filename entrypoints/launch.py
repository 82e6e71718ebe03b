"""`halfbyte serve` from the first line to the last: bind, load, serve, stop.

Binds the port before anything is loaded, so that a taken port fails at once; then the engine process loads the model.
Prints each phase with its time and, when ready, what to type next. `start_engine` and `make_engine` are the part without a
socket. Called by the serve and run-batch commands.
"""

from __future__ import annotations

import json
import logging
import shlex
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import msgspec
import uvloop

from halfbyte.config import EngineOptions, ServerConfig
from halfbyte.engine.async_engine import AsyncEngine
from halfbyte.engine.client import EngineClient, ProcessClient
from halfbyte.engine.front import Front, load_front
from halfbyte.entrypoints.answers.parser import AnswerSyntax
from halfbyte.entrypoints.decisions.settings import DecisionSettings
from halfbyte.entrypoints.decisions.temperatures import Temperatures, find_temperatures
from halfbyte.entrypoints.server import build_app, run_server
from halfbyte.errors import UserError
from halfbyte.log import adopt_logger, note, phase
from halfbyte.pooling import PoolingInfo

log = logging.getLogger(__name__)


def serve(options: EngineOptions, server: ServerConfig) -> int:
    """Serve until a signal or the engine's death. Returns the exit code: 0 after a clean stop, 1 when the engine died."""
    started_s = time.monotonic()
    adopt_logger("uvicorn")
    interrupt_on_sigterm()  # until the server listens
    listener = bind(server.host, server.port)
    phase("bind", time.monotonic() - started_s)
    client, front, server = start_engine(options, server)
    with listener:
        return uvloop.run(_serve(client, front, options.seed, server, listener, started_s))


def start_engine(options: EngineOptions, server: ServerConfig) -> tuple[ProcessClient, Front, ServerConfig]:
    """Load the tokenizer and start the engine's process. Prints each phase and what the engine reports.

    The ServerConfig comes back with the names that requests may use. The caller closes the client.
    """
    front_s = time.monotonic()
    front = load_front(options, server.generation_config)
    AnswerSyntax(server, front.tokenizer)  # what does not fit the model is refused before it is loaded
    model_temperatures(front, server)
    phase("load tokenizer", time.monotonic() - front_s)
    engine_s = time.monotonic()
    client = ProcessClient.start(replace(options, model=str(front.files.path)), phase)
    start_process_s = time.monotonic() - engine_s - sum(seconds for _, seconds in client.info.phases)
    phase("start engine process", start_process_s)
    client.info = msgspec.structs.replace(client.info, model=options.model)  # as the operator calls it, not where it lies
    for line in client.info.report:
        note(line)
    return client, front, replace(server, served_model_names=server.served_model_names or (options.model,))


def make_engine(client: EngineClient, front: Front, seed: int | None, server: ServerConfig) -> AsyncEngine:
    """The engine as `build_app` wants it. Call it inside the loop that will serve; its `close` stops the process, too."""
    return AsyncEngine(
        client,
        front.tokenizer,
        default_sampling=front.default_sampling,
        served_name=server.served_model_names[0],
        seed=seed,
        log_stats=not server.disable_log_stats,
    )


def model_temperatures(front: Front, server: ServerConfig) -> Temperatures:
    """Those of the model's decisions: the operator's, or those beside the model."""
    return find_temperatures(front.files, DecisionSettings.from_config(server.decisions_config).temperatures)


async def _serve(
    client: EngineClient, front: Front, seed: int | None, server: ServerConfig, listener: socket.socket, started_s: float
) -> int:
    engine = make_engine(client, front, seed, server)
    try:
        app = build_app(engine, server, model_temperatures(front, server))
        return await run_server(app, listener, server, _greeting(server, front, listener, started_s, client.info.pooling))
    finally:
        await engine.close()


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. UserError naming --host or --port when that is impossible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"cannot use host {host!r}: {error.strerror}; choose another with --host", param="host") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot bind {host}:{port}: {error.strerror}; choose another with --port or --host", param="port"
        ) from None
    return listener


def _greeting(
    server: ServerConfig, front: Front, listener: socket.socket, started_s: float, pooling: PoolingInfo | None
) -> Callable[[], None]:
    """What to print when the socket listens: the address, and a request that works as it is printed."""
    host = server.host if server.host not in ("0.0.0.0", "::", "") else "127.0.0.1"
    scheme = "https" if server.ssl_certfile else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"

    def greet() -> None:
        phase("whole start-up", time.monotonic() - started_s)
        note(f"ready: {url} (Ctrl-C stops it)")
        note(f"try: {example_request(url + server.root_path, server, chat=_has_template(server, front), pooling=pooling)}")

    return greet


def example_request(url: str, server: ServerConfig, *, chat: bool, pooling: PoolingInfo | None = None) -> str:
    """A curl line that asks the model a question; one without a chat template gets a text to continue, one that pools a text."""
    body: dict[str, Any]
    if pooling is not None:
        path, body = "/v1/embeddings" if pooling.task == "embed" else "/classify", {"input": "Water boils at 100 degrees."}
    elif chat:
        question = {"role": "user", "content": "What is the capital of France?"}
        path, body = "/v1/chat/completions", {"messages": [question], "temperature": 0, "max_tokens": 32}
    else:
        path, body = "/v1/completions", {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 16}
    words = ["curl", "-s", f"{url}{path}", "-H", "Content-Type: application/json"]
    if server.api_keys:
        words += ["-H", "Authorization: Bearer YOUR_API_KEY"]  # keys do not belong into logs
    return shlex.join([*words, "-d", json.dumps({"model": server.served_model_names[0], **body})])


def _has_template(server: ServerConfig, front: Front) -> bool:
    return bool(server.chat_template or front.tokenizer.chat_template)


def interrupt_on_sigterm() -> None:
    """SIGTERM is what Ctrl-C is."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
