"""Errors as clients see them: one body for every failure, whatever raised it.

Turns exceptions into status, type, message and param, and takes addresses, paths and stack frames out of messages. Knows no
route: the scope of a request says in which form its clients read errors, where that is not the standard one. The middleware, the
routes and the event streams all answer through `explain`; nothing else decides what is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from halfbyte.entrypoints.scrub import scrub
from halfbyte.errors import EngineDeadError, HalfbyteError, NotFoundError, OverloadedError, UnsupportedError, UserError

MAX_REPORTED_ERRORS = 10
MAX_ECHOED_CHARS = 200
MAX_ERROR_CHARS = 1000
INTERNAL_MESSAGE = "internal server error; the server's log has the details"
FORM_KEY = "halfbyte.error_form"  # in the ASGI scope: the ErrorForm of the path, absent for the standard form


class ErrorForm(Protocol):
    """A body for errors: the standard one, or that of routes whose clients know another."""

    @classmethod
    def of(cls, error: ApiError) -> Any: ...


class ErrorObject(msgspec.Struct):
    """type: a name for programs. param: the field at fault. code: the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """The standard form."""

    error: ErrorObject

    @classmethod
    def of(cls, error: ApiError) -> ErrorBody:
        return cls(ErrorObject(scrub(error.message), error.type, error.param, error.status))


@dataclass(frozen=True, slots=True)
class ApiError:
    """What a client is told: the HTTP status and the fields of the standard error object."""

    status: int
    type: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> ErrorBody:
        return ErrorBody.of(self)

    def response(self, scope: Scope | None = None) -> Response:
        """In the form that this request's clients read; in the standard form without a scope."""
        form: type[ErrorForm] = ErrorBody if scope is None else scope.get(FORM_KEY, ErrorBody)
        return Response(msgspec.json.encode(form.of(self)), self.status, dict(self.headers), "application/json")


class HttpError(Exception):
    """An answer that is an error of HTTP itself or of the server's state, not of the engine: carries its ApiError."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class GenerationError(HalfbyteError):
    """The engine ended this one request with an error. The message is the engine's and may be shown."""


def bad_request(message: str, param: str | None = None) -> HttpError:
    """The body as such is wrong: its media type, its JSON, or a field's type."""
    return HttpError(ApiError(400, "Bad Request", message, param))


def unavailable(message: str, retry_after_s: int = 1) -> HttpError:
    return HttpError(ApiError(503, "ServiceUnavailableError", message, headers={"Retry-After": str(retry_after_s)}))


def explain(error: BaseException) -> ApiError:
    """The client's view of an exception. Whatever was not raised on purpose is a 500 with a fixed message."""
    match error:
        case HttpError():
            return error.error
        case UserError():
            return ApiError(400, "BadRequestError", str(error), error.param)
        case NotFoundError():
            return ApiError(404, "NotFoundError", str(error), error.param)
        case OverloadedError():
            return ApiError(503, "Service Unavailable", str(error), headers={"Retry-After": str(error.retry_after_s)})
        case UnsupportedError():
            return ApiError(501, "NotImplementedError", str(error))
        case EngineDeadError() | GenerationError():
            return ApiError(500, "InternalServerError", str(error))
        case ValidationError():
            return validation_error(error)
        case RequestValidationError():
            return ApiError(400, "Bad Request", "the request does not match what this route takes")
        case HTTPException():
            return ApiError(error.status_code, _phrase(error.status_code), error.detail, headers=dict(error.headers or {}))
    return ApiError(500, "InternalServerError", INTERNAL_MESSAGE)


def install_error_handlers(app: FastAPI) -> None:
    """Make the router and every route answer errors in the standard shape. Unplanned ones are the middleware's."""

    async def handle(request: Request, error: Exception) -> Response:
        return explain(error).response(request.scope)

    for kind in (HttpError, HalfbyteError, ValidationError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)


def validation_error(error: ValidationError, part: str = "body") -> ApiError:
    """One line per field, at most ten; `param` is the first field's place in this part of the request."""
    lines: list[str] = []
    fields: list[str] = []
    for item in error.errors(include_url=False, include_context=False):
        name = str(item["loc"][0]) if item["loc"] else ""
        place = ".".join(str(part) for part in item["loc"])
        echo = repr(item["input"])[:MAX_ECHOED_CHARS] if _is_small(item["input"]) else type(item["input"]).__name__
        fields.append(name)
        lines.append(f"{place}: {item['msg']} (got {echo})"[:MAX_ERROR_CHARS])
        if len(lines) == MAX_REPORTED_ERRORS:
            break
    noun = "error" if error.error_count() == 1 else "errors"
    param = f"{part}.{fields[0]}" if fields and fields[0] else part
    return ApiError(400, "Bad Request", f"{error.error_count()} validation {noun}: " + "; ".join(lines), param)


def _is_small(value: object) -> bool:
    """Whether `repr(value)` is cheap: what is echoed must not cost more than reading it did."""
    if isinstance(value, str | bytes | list | dict):
        return len(value) <= MAX_ECHOED_CHARS and (isinstance(value, str | bytes) or all(_is_flat(v) for v in value))
    return not isinstance(value, int) or abs(value) < 2**128


def _is_flat(value: object) -> bool:
    return value is None or isinstance(value, bool | float) or (isinstance(value, str) and len(value) <= MAX_ECHOED_CHARS)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
