"""The forms of errors on the wire: the standard one, and Anthropic's on the routes whose clients know that.

Used by every test that walks the routes; it sends nothing by itself.
"""

from __future__ import annotations

from typing import Any

import httpx

ANTHROPICS = ("/v1/messages", "/v1/messages/count_tokens")
KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
         413: "request_too_large", 500: "api_error", 503: "overloaded_error"}  # fmt: skip


def standard_error(answer: httpx.Response) -> dict[str, Any] | None:
    """The error object, if the whole body has the form of its route, with the status as its code and a message; else None."""
    body = answer.json()
    error = body.get("error") if isinstance(body, dict) else None
    is_anthropics = answer.request.url.path in ANTHROPICS
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"} or error["code"] != answer.status_code:
        return None
    if set(body) != ({"error", "type"} if is_anthropics else {"error"}) or not error["message"] or not error["type"]:
        return None
    if is_anthropics and (body["type"] != "error" or error["type"] != KINDS[answer.status_code]):
        return None
    return error
