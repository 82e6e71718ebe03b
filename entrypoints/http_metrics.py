"""How many requests each route had, how they ended and how long they took, with the names that dashboards know.

Label values come from fixed sets: the server's own routes, HTTP's methods, classes of status. Probes are not counted. The
engine's metrics are its own; `/metrics` shows both.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

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
