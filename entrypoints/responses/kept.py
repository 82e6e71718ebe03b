"""What can be done with a response that is kept: read it, follow its stream, list its input, cancel it, delete it.

Nothing is generated here. To all but the key that made it, a response does not exist: the store sees to that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from halfbyte.entrypoints.openai.errors import ApiError
from halfbyte.entrypoints.openai.frontend import Frontend, owner_of
from halfbyte.entrypoints.openai.openapi import Answers
from halfbyte.entrypoints.openai.query import Query, read_query
from halfbyte.entrypoints.openai.streaming import EventStream
from halfbyte.entrypoints.openai.wire import to_json
from halfbyte.entrypoints.responses.store import Entry
from halfbyte.entrypoints.responses.wire import EVENTS, DeletedResponse, InputItemList, Response
from halfbyte.errors import UserError

PATH = "/v1/responses"
ONE = PATH + "/{response_id}"
ID = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}


class OpenQuery(Query):
    """OpenAI's clients send parameters that mean nothing here, such as include[]."""

    model_config = ConfigDict(extra="ignore")


class RetrieveQuery(OpenQuery):
    """starting_after: the number of an event."""

    stream: bool = False
    starting_after: Annotated[int, Field(ge=0)] | None = None


class ItemsQuery(OpenQuery):
    """after: the id of an item."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["desc", "asc"] = "desc"
    after: str | None = None


def stream_of(frontend: Frontend, entry: Entry, start: int) -> EventStream:
    """What a response in the background tells from event `start` on. A client may leave and come back."""

    def end(error: Exception | None, gone: bool) -> ApiError | None:
        return None if error is None else frontend.explain(error)

    return EventStream(entry.follow(start), end, frontend.config.sse_keep_alive_interval_s, lambda _: b"")


async def retrieve(frontend: Frontend, request: Request) -> HttpResponse:
    query, entry = read_query(request, RetrieveQuery), _find(frontend, request)
    after = query.starting_after
    if after is not None and not query.stream:
        raise UserError("starting_after needs stream=true", param="starting_after")
    if not query.stream:
        return HttpResponse(entry.body, media_type="application/json")
    if not entry.background:
        raise UserError("only the stream of a response with background=true can be read again", param="stream")
    return stream_of(frontend, entry, 0 if after is None else after + 1)


async def delete(frontend: Frontend, request: Request) -> HttpResponse:
    """Forget a response; one in progress ends."""
    entry = _find(frontend, request)
    await _stop(entry)
    frontend.responses.remove(entry)
    return to_json(DeletedResponse(entry.id))


async def cancel(frontend: Frontend, request: Request) -> HttpResponse:
    """End a response in the background. One that is done already stays as it is."""
    entry = _find(frontend, request)
    if not entry.background:
        raise UserError("only a response with background=true can be cancelled", param="response_id")
    await _stop(entry)
    return HttpResponse(entry.body, media_type="application/json")


async def input_items(frontend: Frontend, request: Request) -> HttpResponse:
    """The items that a request brought, the last one first unless asked otherwise."""
    query = read_query(request, ItemsQuery)
    items, _, _ = _find(frontend, request).all_items()
    if query.order == "desc":
        items.reverse()
    if (after := query.after) is not None:
        places = [index for index, item in enumerate(items) if item.id == after]
        if not places:
            raise UserError(f"after: this response has no input item {after[:80]!r}", param="after")
        items = items[places[0] + 1 :]
    shown = items[: query.limit]
    first, last = (shown[0].id, shown[-1].id) if shown else ("", "")
    return to_json(InputItemList(data=shown, first_id=first, last_id=last, has_more=len(items) > len(shown)))


def _find(frontend: Frontend, request: Request) -> Entry:
    return frontend.responses.find(owner_of(request.scope), request.path_params["response_id"], "response_id")


async def _stop(entry: Entry) -> None:
    if (task := entry.task) is not None:
        task.cancel()
        await asyncio.wait([task])


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    handler: Callable[[Frontend, Request], Awaitable[HttpResponse]]
    answers: Answers


def _answers(summary: str, whole: type, query: type[Query] = OpenQuery, events: tuple[type, ...] = ()) -> Answers:
    return Answers(summary, whole, events=events, errors=(404,), parameters=(ID, *query.parameters()))


ROUTES = (
    Route("GET", ONE, retrieve, _answers("A response that is kept", Response, RetrieveQuery, EVENTS)),
    Route("DELETE", ONE, delete, _answers("Forget a response", DeletedResponse)),
    Route("POST", ONE + "/cancel", cancel, _answers("End a response in the background", Response)),
    Route("GET", ONE + "/input_items", input_items, _answers("The input of a response", InputItemList, ItemsQuery)),
)
