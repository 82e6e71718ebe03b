"""The pages' files and how they are sent: the same bytes for everybody, without a key, in a browser that may do nothing else.

What a page shows it asks of the routes, with the key that its reader has typed in. Nothing here knows the engine. Swagger UI
comes with the package fastapi-offline. Called by `server.build_app`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import resources

from fastapi import FastAPI
from starlette.responses import Response

from halfbyte.config import ServerConfig

# path -> (package, file)
_CALLS = {"/page/stream.js": (__package__, "stream.js")}
UI_FILES = _CALLS | {
    "/": (__package__, "index.html"),
    "/page/page.css": (__package__, "page.css"),
    "/page/page.js": (__package__, "page.js"),
}
DOCS_FILES = _CALLS | {
    "/docs": (__package__, "docs.html"),
    "/page/docs.css": (__package__, "docs.css"),
    "/page/docs.js": (__package__, "docs.js"),
    "/page/swagger-ui.css": ("fastapi_offline", "static/swagger-ui.css"),
    "/page/swagger-ui-bundle.js": ("fastapi_offline", "static/swagger-ui-bundle.js"),
}
MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
HEADERS = {
    # Swagger UI draws with images in data: URLs
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_files(config: ServerConfig) -> dict[str, tuple[str, str]]:
    """What this server sends to browsers, by path."""
    return (UI_FILES if config.ui else {}) | ({} if config.disable_fastapi_docs else DOCS_FILES)


def add_pages(app: FastAPI, config: ServerConfig) -> None:
    for path, (package, name) in page_files(config).items():
        app.add_api_route(path, _sender(package, name), methods=["GET"], name=path, include_in_schema=False)


def _sender(package: str, name: str) -> Callable[[], object]:
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]

    async def send() -> Response:
        return Response(_content(package, name), headers=HEADERS, media_type=media_type)

    return send


@cache
def _content(package: str, name: str) -> bytes:
    return resources.files(package).joinpath(name).read_bytes()
