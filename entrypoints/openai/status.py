"""What a server says about itself: liveness, version, metrics, and the models it serves.

Bodies are built from the frontend's facts only. Health is open to all; the list of models is not.
"""

from __future__ import annotations

import time
import uuid
from typing import Literal

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from halfbyte import __version__
from halfbyte.entrypoints.decisions.decider import DecisionSupport
from halfbyte.entrypoints.openai.frontend import Frontend
from halfbyte.entrypoints.openai.wire import to_json

OWNER = "halfbyte"


class ModelPermission(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = OWNER
    root: str
    parent: str | None = None
    max_model_len: int
    decisions: DecisionSupport
    permission: list[ModelPermission]


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(msgspec.Struct):
    version: str


def models(frontend: Frontend) -> Response:
    """One card per served name. decisions: which types of questions the model can answer, and why not."""
    now = int(time.time())
    info = frontend.engine.info
    cards = [
        ModelCard(
            id=name,
            created=now,
            root=info.model,
            max_model_len=info.max_model_len,
            decisions=frontend.decider.describe(),
            permission=[ModelPermission(id=f"modelperm-{uuid.uuid4().hex}", created=now)],
        )
        for name in frontend.model_names
    ]
    return to_json(ModelList(data=cards))


def health(frontend: Frontend) -> Response:
    """200 while requests are served, 503 when the engine is gone or the server is stopping. No body, as probes expect."""
    return Response(status_code=200 if frontend.healthy else 503)


def version() -> Response:
    return to_json(Version(__version__))


def metrics(frontend: Frontend) -> Response:
    text = frontend.engine.metrics.render() + frontend.http_metrics.render()
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
