"""The HTTP server: the application around an engine, and its life from a bound socket to the last answer.

`build_app` installs middleware and routes; `run_server` serves until a signal or the engine's death. The engine is made and
closed by the caller. Wire formats live in `halfbyte.entrypoints.openai`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from halfbyte.config import ServerConfig
from halfbyte.entrypoints import middleware
from halfbyte.entrypoints.decisions.temperatures import Temperatures
from halfbyte.entrypoints.openai import adapters, admin
from halfbyte.entrypoints.openai.errors import install_error_handlers
from halfbyte.entrypoints.openai.frontend import Engine, Frontend
from halfbyte.entrypoints.openai.routes import add_routes
from halfbyte.entrypoints.page.files import add_pages, page_files

# Longer than common clients (httpx 5, aiohttp 15) and load balancers (60) keep an idle connection: whoever closes it first does
# not find it closed just as a request is sent.
KEEP_ALIVE_S = 75
HEADER_TIMEOUT_S = 30.0
MAX_HEADER_BYTES = 256 * 1024
MAX_HEADER_COUNT = 256
# A dead engine: how long probes and clients are told so before the process ends.
DEATH_LINGER_S = 3.0
CLOSE_GRACE_S = 5

EXIT_STOPPED = 0
EXIT_ENGINE_DIED = 1

log = logging.getLogger(__name__)


def build_app(engine: Engine, server_config: ServerConfig, temperatures: Temperatures | None = None) -> FastAPI:
    """The application for one engine. `app.state.frontend` is its Frontend. Call it inside the loop that will serve.

    temperatures: of the model's decisions.
    """
    app = FastAPI(
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url=None if server_config.disable_fastapi_docs else "/openapi.json",
    )
    frontend = Frontend(engine, server_config, temperatures)
    app.state.frontend = frontend
    error_forms = add_routes(app, frontend)
    add_pages(app, server_config)
    install_error_handlers(app)
    # The last one added is the first to see a request.
    app.add_middleware(middleware.HeadLikeGet)
    app.add_middleware(middleware.InternalErrors)
    app.add_middleware(middleware.BodyLimit, max_bytes=server_config.max_body_bytes)
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    app.add_middleware(middleware.CountRequests, metrics=frontend.http_metrics, paths=paths)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=server_config.allowed_origins,
        allow_methods=server_config.allowed_methods,
        allow_headers=server_config.allowed_headers,
        allow_credentials=server_config.allow_credentials,
    )
    if (hosts := allowed_hosts(server_config)) is not None:
        app.add_middleware(middleware.AllowedHosts, hosts=hosts)
    app.add_middleware(
        middleware.ApiKeys,
        keys=server_config.api_keys,
        admin_keys=server_config.admin_api_keys,
        admin_paths=admin.PATHS | adapters.PATHS if server_config.enable_admin else (),
        pages=page_files(server_config),
    )
    app.add_middleware(middleware.RequestLabels, echo=server_config.enable_request_id_headers)
    app.add_middleware(middleware.ErrorForms, forms=error_forms)
    if root_path := server_config.root_path.rstrip("/"):
        app.add_middleware(middleware.RootPath, root_path=root_path)
    return app


def allowed_hosts(config: ServerConfig) -> tuple[str, ...] | None:
    """The names a Host header may have; None when any will do (a public address without a list, or `*`)."""
    if "*" in config.allowed_hosts:
        return None
    if middleware.is_loopback(config.host):
        return (*middleware.LOOPBACK_HOSTS, config.host.strip("[]"), *config.allowed_hosts)
    return config.allowed_hosts or None


async def run_server(
    app: FastAPI, sock: socket.socket, server_config: ServerConfig, on_ready: Callable[[], None] | None = None
) -> int:
    """Serve `app` on a bound socket until SIGTERM, SIGINT or the engine's death. Returns the exit code for the process.

    A signal stops admission (503), waits `shutdown_timeout_s` for open requests, and ends the rest with an error answer; a
    second signal ends at once. After the engine's death new calls get 503 for some seconds, then the server ends. `on_ready` is
    called when the socket listens.
    """
    return await Server(app, server_config, on_ready).run_on(sock)


class Server(uvicorn.Server):
    """A uvicorn server that drains before it closes its socket. Make it inside the loop that serves."""

    def __init__(self, app: FastAPI, server_config: ServerConfig, on_ready: Callable[[], None] | None = None) -> None:
        super().__init__(uvicorn_config(app, server_config))
        self.exit_code = EXIT_STOPPED
        self._frontend: Frontend = app.state.frontend
        self._drain_timeout_s = server_config.shutdown_timeout_s
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._drain: asyncio.Task[None] | None = None

    async def run_on(self, sock: socket.socket) -> int:
        """Serve until stopped. Returns the exit code."""
        watcher = asyncio.create_task(self._watch_engine())
        try:
            await self.serve(sockets=[sock])
        finally:
            watcher.cancel()
        return self.exit_code

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.freeze()  # as in the engine's process
        if self._on_ready is not None:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal arrived. Not recorded for uvicorn to raise again: stopping on request is exit code 0."""
        self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Drain and exit; the second time, exit without waiting."""
        if self._drain is None:
            self._drain = asyncio.create_task(self._drain_and_exit())
        else:
            self.force_exit = self.should_exit = True

    async def _drain_and_exit(self) -> None:
        try:
            await self._frontend.drain(self._drain_timeout_s)
        finally:
            self.should_exit = True

    async def _watch_engine(self) -> None:
        """End the server some time after its engine."""
        await self._frontend.engine.died.wait()
        if not self._frontend.stopping:
            self.exit_code = EXIT_ENGINE_DIED
            log.error("the engine is gone (%s); the server ends in %g s", self._frontend.engine.dead, DEATH_LINGER_S)
            await asyncio.sleep(DEATH_LINGER_S)
        self.should_exit = True


def uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=config.uvicorn_log_level,
        access_log=not config.disable_uvicorn_access_log,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_GRACE_S,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
    )


class BoundedHttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 by httptools, with a bound on the size, the number and the slowness of a request's headers."""

    _header_timer: TimerHandle | None = None
    _in_headers = True
    _header_bytes = 0

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            # Tokens are small: none may wait for the client's acknowledgement of the last one.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > MAX_HEADER_BYTES:
            self._refuse("the request's headers are too large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADER_COUNT:
            raise ValueError("too many headers")  # the parser turns this into a 400 that closes the connection

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._header_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def _expect_headers(self) -> None:
        self._stop_timer()
        self._in_headers = True
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, message: str) -> None:
        if not self.transport.is_closing():
            head = "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(message)}\r\n\r\n{message}".encode("ascii"))
            self.transport.close()
