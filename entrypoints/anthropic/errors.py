"""Errors as Anthropic's clients read them: the same status and message as everywhere, in another form.

`param` and `code` are there too, so that a client of either kind finds what it knows. Knows no route; what is an error, and how
it is worded, is the matter of `halfbyte.entrypoints.openai.errors`.
"""

from __future__ import annotations

import msgspec

from halfbyte.entrypoints.openai.errors import ApiError

# What has no type of its own: below 500 the request is wrong, from there on the server.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesErrorObject(msgspec.Struct):
    """param: the field at fault. code: the HTTP status."""

    type: str
    message: str
    param: str | None
    code: int


class MessagesError(msgspec.Struct, tag_field="type", tag="error"):
    """The body of an error, and the data of a stream's event `error`."""

    error: MessagesErrorObject

    @classmethod
    def of(cls, error: ApiError) -> MessagesError:
        kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        told = error.body().error
        return cls(MessagesErrorObject(kind, told.message, told.param, told.code))
