"""Request bodies: from bytes to a checked request model, with nothing guessed.

JSON is strict (no NaN, no Infinity, no numbers out of range, valid UTF-8), counted before it is decoded, and decoded beside
the event loop when it is large. Size in bytes is the middleware's matter. Every POST route reads its body through `parse_body`.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request

from halfbyte.entrypoints.beside import Beside
from halfbyte.entrypoints.openai.errors import bad_request

MAX_JSON_CONTAINERS = 250_000
MAX_JSON_ITEMS = 4_000_000
OFF_LOOP_BYTES = 64 * 1024
_MAX_LOGGED_FIELDS = 20

log = logging.getLogger(__name__)

RequestModel = TypeVar("RequestModel", bound=BaseModel)


async def parse_body(request: Request, model: type[RequestModel], beside: Beside) -> RequestModel:
    """The body as a `model`. HttpError 400 for a wrong media type or JSON, ValidationError for a wrong field."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise bad_request(f"the Content-Type must be application/json, got {media_type or 'none'!r}", "content-type")
    data = await request.body()
    if len(data) < OFF_LOOP_BYTES:
        return decode(data, model)
    return await beside.run(partial(decode, data, model), len(data))


def decode(data: bytes, model: type[RequestModel]) -> RequestModel:
    """Strict JSON to a validated model. Fields that it does not know are kept in `model_extra` and named in the log."""
    value = _decode_json(data)
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", "body")
    parsed = model.model_validate(value)
    if parsed.model_extra:
        log.debug("fields without effect: %s", sorted(parsed.model_extra)[:_MAX_LOGGED_FIELDS])
    return parsed


def _decode_json(data: bytes) -> Any:
    if data.count(b"{") + data.count(b"[") > MAX_JSON_CONTAINERS or data.count(b",") > MAX_JSON_ITEMS:
        raise bad_request(f"the body holds more than {MAX_JSON_CONTAINERS} objects and lists, or {MAX_JSON_ITEMS} items", "body")
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(" - at ")[0]
        raise bad_request(f"1 validation error: the body is not valid JSON: {reason}", "body") from None
