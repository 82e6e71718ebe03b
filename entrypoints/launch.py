"""`halfbyte serve` from the first line to the last: bind, load, serve, stop.

Binds the port before anything is loaded, so that a taken port fails at once; then the engine process loads the model.
Prints each phase with its time and, when ready, what to type next. Called by the serve command only.
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

import msgspec
import uvloop

from halfbyte.config import EngineOptions, ServerConfig
from halfbyte.engine.async_engine import AsyncEngine
from halfbyte.engine.client import EngineClient, ProcessClient
from halfbyte.engine.front import Front, load_front
from halfbyte.entrypoints.answers.parser import AnswerSyntax
from halfbyte.entrypoints.server import build_app, run_server
from halfbyte.errors import UserError
from halfbyte.log import adopt_logger, note, phase

log = logging.getLogger(__name__)


def serve(options: EngineOptions, server: ServerConfig) -> int:
    """Serve until a signal or the engine's death. Returns the exit code: 0 after a clean stop, 1 when the engine died."""
    started_s = time.monotonic()
    adopt_logger("uvicorn")
    signal.signal(signal.SIGTERM, _interrupt)  # until the server listens, SIGTERM is what Ctrl-C is
    listener = bind(server.host, server.port)
    phase("bind", time.monotonic() - started_s)
    front_s = time.monotonic()
    front = load_front(options, server.generation_config)
    AnswerSyntax(server, front.tokenizer)  # parsers that do not fit the model are refused before it is loaded
    phase("load tokenizer", time.monotonic() - front_s)
    engine_s = time.monotonic()
    client = ProcessClient.start(replace(options, model=str(front.files.path)), phase)
    start_process_s = time.monotonic() - engine_s - sum(seconds for _, seconds in client.info.phases)
    phase("start engine process", start_process_s)
    client.info = msgspec.structs.replace(client.info, model=options.model)  # as the operator calls it, not where it lies
    for line in client.info.report:
        note(line)
    server = replace(server, served_model_names=server.served_model_names or (options.model,))
    with listener:
        return uvloop.run(_serve(client, front, options.seed, server, listener, started_s))


async def _serve(
    client: EngineClient, front: Front, seed: int | None, server: ServerConfig, listener: socket.socket, started_s: float
) -> int:
    engine = AsyncEngine(
        client,
        front.tokenizer,
        default_sampling=front.default_sampling,
        served_name=server.served_model_names[0],
        seed=seed,
        log_stats=not server.disable_log_stats,
    )
    try:
        app = build_app(engine, server)
        return await run_server(app, listener, server, _greeting(server, front, listener, started_s))
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


def _greeting(server: ServerConfig, front: Front, listener: socket.socket, started_s: float) -> Callable[[], None]:
    """What to print when the socket listens: the address, and a request that works as it is printed."""
    host = server.host if server.host not in ("0.0.0.0", "::", "") else "127.0.0.1"
    scheme = "https" if server.ssl_certfile else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"

    def greet() -> None:
        phase("whole start-up", time.monotonic() - started_s)
        note(f"ready: {url} (Ctrl-C stops it)")
        note(f"try: {example_request(url + server.root_path, server, chat=_has_template(server, front))}")

    return greet


def example_request(url: str, server: ServerConfig, *, chat: bool) -> str:
    """A curl line that asks the model a question; a model without a chat template gets a text to continue."""
    if chat:
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


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
