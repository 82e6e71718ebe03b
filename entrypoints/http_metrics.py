"""How many requests each route had, how they ended and how long they took, with the names that dashboards know.

Label values come from fixed sets: the server's own routes, HTTP's methods, classes of status. Probes are not counted. The
engine's metrics are its own; `/metrics` shows both.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

UNCOUNTED = frozenset({"/metrics", "/health", "/ping", "/version"})
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
NO_ROUTE = "none"
DURATION_BUCKETS_S = (0.1, 0.5, 1.0)


class HttpMetrics:
    """The collectors of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "http_requests", "Requests by route, method and status.", ["handler", "method", "status"], registry=self._registry
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "Time from a request's head to the end of its answer.",
            ["handler", "method"],
            buckets=DURATION_BUCKETS_S,
            registry=self._registry,
        )

    def record(self, handler: str, method: str, status: int, duration_s: float) -> None:
        self._requests.labels(handler=handler, method=method, status=f"{status // 100}xx").inc()
        self._duration.labels(handler=handler, method=method).observe(duration_s)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class CountRequests:
    """Middleware that records each request that passes. `paths`: the server's routes; all others share one label."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, paths: Iterable[str]) -> None:
        self.app = app
        self._metrics = metrics
        self._paths = frozenset(paths) - UNCOUNTED

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path in UNCOUNTED:
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
            handler = path if path in self._paths else NO_ROUTE
            method = scope["method"] if scope["method"] in METHODS else "OTHER"
            self._metrics.record(handler, method, status, time.monotonic() - started_s)
