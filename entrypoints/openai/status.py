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
from halfbyte.types import KVLayers

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
    max_model_len: int | None
    decisions: DecisionSupport
    permission: list[ModelPermission]


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(msgspec.Struct):
    version: str


class PrefixCache(msgspec.Struct, kw_only=True):
    """Tokens that were looked up and found, since the start."""

    enabled: bool
    queries_tokens: int
    hits_tokens: int


class KVCache(msgspec.Struct, kw_only=True):
    """usage: the used share of the blocks. num_tokens: how many it holds. layers: by format and window."""

    usage: float
    num_tokens: int
    num_bytes: int
    bytes_per_token: float
    layers: list[KVLayers]


class Status(msgspec.Struct, kw_only=True):
    """computed_tokens, generated_tokens: since the start; two answers make a rate. computed: of prompts and answers."""

    model: str
    version: str
    serving: bool
    uptime_s: float
    dtype: str
    max_model_len: int
    num_running: int
    num_waiting: int
    computed_tokens: int
    generated_tokens: int
    prefix_cache: PrefixCache
    kv_cache: KVCache


def models(frontend: Frontend) -> Response:
    """One card per served name, then one per adapter, whose parent is the model. decisions: which types of questions the model
    can answer, and why not."""
    now = int(time.time())
    info = frontend.engine.info

    def card(name: str, root: str, max_model_len: int | None, parent: str | None = None) -> ModelCard:
        permission = ModelPermission(id=f"modelperm-{uuid.uuid4().hex}", created=now)
        return ModelCard(
            id=name,
            created=now,
            root=root,
            parent=parent,
            max_model_len=max_model_len,
            decisions=frontend.decider.describe(),
            permission=[permission],
        )

    cards = [card(name, info.model, info.max_model_len) for name in frontend.model_names]
    for adapter in frontend.adapters.all():
        cards.append(card(adapter.name, adapter.path, None, adapter.base_model_name or frontend.model_names[0]))
    return to_json(ModelList(data=cards))


def health(frontend: Frontend) -> Response:
    """200 while requests are served, 503 when the engine is gone or the server is stopping. No body, as probes expect."""
    return Response(status_code=200 if frontend.healthy else 503)


def version() -> Response:
    return to_json(Version(__version__))


def status(frontend: Frontend) -> Response:
    """What the built-in page shows."""
    info, totals = frontend.engine.info, frontend.engine.totals
    return to_json(
        Status(
            model=frontend.model_names[0],
            version=__version__,
            serving=frontend.healthy,
            uptime_s=round(time.monotonic() - frontend.started_s, 3),
            dtype=info.dtype,
            max_model_len=info.max_model_len,
            num_running=totals.last.num_running,
            num_waiting=totals.last.num_waiting,
            computed_tokens=totals.computed,
            generated_tokens=totals.generated,
            prefix_cache=PrefixCache(
                enabled=info.enable_prefix_caching, queries_tokens=totals.cache_queries, hits_tokens=totals.cache_hits
            ),
            kv_cache=KVCache(
                usage=totals.last.kv_cache_usage,
                num_tokens=info.kv_cache_tokens,
                num_bytes=info.kv_cache_bytes,
                bytes_per_token=sum(layers.bytes_per_token for layers in info.kv_layers),
                layers=info.kv_layers,
            ),
        )
    )


def metrics(frontend: Frontend) -> Response:
    text = frontend.engine.metrics.render() + frontend.http_metrics.render()
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
