"""What happens to a request before any route sees it: its label, its key, its host, its size; and what no route caught.

Plain ASGI, outermost first: RootPath, ErrorForms, RequestLabels, ApiKeys, AllowedHosts, (CORS), CountRequests, BodyLimit,
InternalErrors, HeadLikeGet. They decide on the scope alone, before the body is read. Installed by `server.build_app`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import time
import uuid
from collections.abc import Iterable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from halfbyte.entrypoints.http_metrics import HttpMetrics
from halfbyte.entrypoints.openai.errors import FORM_KEY, ApiError, ErrorForm, HttpError, explain
from halfbyte.entrypoints.openai.frontend import LABEL_KEY, OWNER_KEY, request_label

# Probes: open to all and not counted. All else but pages needs the key, whether it exists or not.
PUBLIC_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
NO_ROUTE = "none"
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
REQUEST_ID_HEADER = "x-request-id"

log = logging.getLogger(__name__)


def route_path(scope: Scope) -> str:
    """The path that the router decides on: without the root path, decoded, as the connection sent it."""
    path, root = scope["path"], scope.get("root_path", "")
    if root and (path == root or path.startswith(root + "/")):
        return str(path[len(root) :])
    return str(path)


class RootPath:
    """Tells the application that a proxy serves it under `root_path`. The prefix may arrive or be stripped by the proxy."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self.root_path
        await self.app(scope, receive, send)


class ErrorForms:
    """Says in the scope in which form errors of this path are told. forms: by path, where it is not the standard one."""

    def __init__(self, app: ASGIApp, forms: Mapping[str, type[ErrorForm]]) -> None:
        self.app = app
        self._forms = forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (form := self._forms.get(route_path(scope))) is not None:
            scope[FORM_KEY] = form
        await self.app(scope, receive, send)


class RequestLabels:
    """Keeps a valid X-Request-Id as the request's label in the scope. With `echo`, every answer carries the header."""

    def __init__(self, app: ASGIApp, echo: bool) -> None:
        self.app = app
        self.echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        label = request_label(Headers(scope=scope).get(REQUEST_ID_HEADER))
        if label is None and self.echo:
            label = uuid.uuid4().hex
        if label is not None:
            scope[LABEL_KEY] = label
        if not self.echo:
            return await self.app(scope, receive, send)

        async def send_labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = label or ""
            await send(message)

        await self.app(scope, receive, send_labelled)


class ApiKeys:
    """Denies every path but the open ones without one of the keys, as `Authorization: Bearer KEY` or `x-api-key: KEY`.

    keys: open all paths but the admin ones; without any these need no key. admin_keys: open the admin paths, and no others.
    pages: paths of files that are the same for everybody, open like the public ones; a browser cannot send a key for them.
    Compares digests in constant time, tries all keys, and notes which one it was. OPTIONS passes: it reaches no handler but CORS.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        admin_keys: Iterable[str] = (),
        admin_paths: Iterable[str] = (),
        pages: Iterable[str] = (),
    ) -> None:
        self.app = app
        self._digests = _digests(keys)
        self._admin_digests = _digests(admin_keys)
        self._admin_paths = frozenset(admin_paths)
        self._open_paths = PUBLIC_PATHS.union(pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("method") == "OPTIONS":
            return await self.app(scope, receive, send)
        path = route_path(scope)
        is_admin = path in self._admin_paths
        if path in self._open_paths or not (self._digests or is_admin):
            return await self.app(scope, receive, send)
        if (digest := _known_key(scope, self._admin_digests if is_admin else self._digests)) is not None:
            scope[OWNER_KEY] = digest
            return await self.app(scope, receive, send)
        kind = "the admin" if is_admin else "a valid API"
        message = f"{kind} key is required: send Authorization: Bearer KEY, or x-api-key: KEY"
        response = ApiError(401, "Unauthorized", message).response(scope)
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)


def _digests(keys: Iterable[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys if key]


def _known_key(scope: Scope, digests: Iterable[bytes]) -> bytes | None:
    """The digest of the key that the first header of either kind carries; None where that is none of the keys."""
    headers = scope["headers"]
    scheme, _, bearer = next((value for name, value in headers if name == b"authorization"), b"").partition(b" ")
    given = [bearer] if scheme.lower() == b"bearer" else []
    given += [value for name, value in headers if name == b"x-api-key"][:1]
    sent = [hashlib.sha256(key.strip()).digest() for key in given]
    found = [digest for digest in sent for known in digests if hmac.compare_digest(digest, known)]
    return found[0] if found else None


class AllowedHosts:
    """Refuses a Host header that names none of `hosts`: a page that points its own name at this machine gets nothing.

    A request without the header cannot come from a browser and passes.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self.app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or all(host_name(host) in self._hosts for host in Headers(scope=scope).getlist("host")):
            return await self.app(scope, receive, send)
        message = "the Host header names none of this server's hosts; start it with --allowed-hosts to add one"
        await ApiError(400, "Bad Request", message, "host").response(scope)(scope, receive, send)


class CountRequests:
    """Records each request but probes. `paths`: the server's routes; all others share one label."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, paths: Iterable[str]) -> None:
        self.app = app
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (path := route_path(scope)) in PUBLIC_PATHS:
            return await self.app(scope, receive, send)
        started_s = time.monotonic()
        status = 500

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noted)
        finally:
            # a path with parameters is known by its route
            handler = next((p for p in (path, getattr(scope.get("route"), "path", "")) if p in self._paths), NO_ROUTE)
            method = scope["method"] if scope["method"] in METHODS else "OTHER"
            self._metrics.record(handler, method, status, time.monotonic() - started_s)


class BodyLimit:
    """Refuses a body of more than `max_bytes`: at once when its length is announced, else while it is read."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        message = f"the body is larger than {self.max_bytes} bytes"
        error = ApiError(413, "Request Entity Too Large", message)
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self.max_bytes:
            return await error.response(scope)(scope, receive, send)
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise HttpError(error)
            return message

        await self.app(scope, receive_counted, send)


class InternalErrors:
    """The last net: what no handler planned for is logged with its trace and answered with a fixed message."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, send_noted)
        except Exception as error:
            problem = explain(error)
            if problem.status >= 500:
                log.exception("%s %s failed", scope.get("method"), scope.get("path"))
            if started:
                raise
            await problem.response(scope)(scope, receive, send)


def host_name(header: str) -> str:
    """The name in a Host header, lower case, without port, brackets and final dot; "" if it is none."""
    name, colon, port = header.strip().lower().rpartition(":")
    if not colon or "]" in port:
        name = header.strip().lower()
    elif not port.isdecimal():
        return ""
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    elif ":" in name:
        return ""
    return name.removesuffix(".")


def is_loopback(host: str) -> bool:
    """Whether a server bound to `host` is reached from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class HeadLikeGet:
    """Has HEAD answered as GET is, for whoever probes a server so. What sends the answer leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self.app({**scope, "method": "GET"} if is_head else scope, receive, send)
