"""POST /score and /rerank, under all of their paths: how well documents answer queries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec
from starlette.responses import Response

from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.pooling import ListAnswer, begin, pool, pooling_params
from halfbyte.entrypoints.openai.pooling_protocol import PairFields, RerankRequest, ScoreRequest, ScoreTexts
from halfbyte.entrypoints.openai.wire import Usage, to_json
from halfbyte.entrypoints.pooling.prompts import PairOptions
from halfbyte.entrypoints.pooling.scoring import plan_scores
from halfbyte.errors import UserError

PAIRS = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
_SIDES = tuple(dict.fromkeys(name for pair in PAIRS for name in pair))


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(ListAnswer):
    data: list[Score]


class Document(msgspec.Struct):
    text: str


class Ranked(msgspec.Struct, kw_only=True):
    """index: of the document in the request."""

    index: int
    document: Document
    relevance_score: float


class Ranking(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: Usage
    results: list[Ranked]


async def score(frontend: Frontend, call: Call, request: ScoreRequest) -> Response:
    given = tuple(name for name in _SIDES if getattr(request, name) is not None)
    names = next((pair for pair in PAIRS if set(given) == set(pair)), None)
    if names is None:
        raise UserError(f"send {', or '.join(' and '.join(pair) for pair in PAIRS)}; got {' and '.join(given) or 'none'}")
    queries, documents = (_texts(getattr(request, name)) for name in names)
    model, scores, usage = await _scores(frontend, call, request, queries, documents, names)
    data = [Score(index=index, score=value) for index, value in enumerate(scores)]
    return to_json(Scores(id=call.public_id, created=call.created, model=model, data=data, usage=usage))


async def rerank(frontend: Frontend, call: Call, request: RerankRequest) -> Response:
    top_n = request.top_n or 0
    if top_n < 0:
        raise UserError(f"top_n must be 0 (all) or more, got {top_n}", param="top_n")
    names = ("query", "documents")
    model, scores, usage = await _scores(frontend, call, request, [request.query], request.documents, names)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: top_n or None]
    results = [Ranked(index=index, document=Document(request.documents[index]), relevance_score=scores[index]) for index in best]
    return to_json(Ranking(id=call.public_id, model=model, usage=usage, results=results))


def _texts(value: ScoreTexts) -> list[str]:
    return [value] if isinstance(value, str) else value


async def _scores(
    frontend: Frontend,
    call: Call,
    request: PairFields,
    queries: Sequence[str],
    documents: Sequence[str],
    names: tuple[str, str],
) -> tuple[str, list[float], Usage]:
    """(the served name, a score per document, what was used)."""
    model, prompts = begin(frontend, call, request)
    most = frontend.engine.limits.MAX_PROMPTS
    for name, texts in zip(names, (queries, documents), strict=True):
        if len(texts) > most:
            raise UserError(f"{name} holds {len(texts)} texts, at most {most} are allowed", param=name)
    options = PairOptions(
        max_query=_limit(request.max_tokens_per_query, "max_tokens_per_query"),
        max_document=_limit(request.max_tokens_per_doc, "max_tokens_per_doc"),
        instruction=request.instruction,
        template_kwargs=request.chat_template_kwargs,
    )
    work = partial(plan_scores, prompts, queries, documents, pooling_params(request), options, names=names)
    size = sum(map(len, documents)) + len(documents) * max(map(len, queries), default=0)
    plan = await frontend.beside.run(work, size)
    vectors, usage = await pool(frontend, call, request, plan.jobs)
    return model, await frontend.beside.run(partial(plan.scores, vectors), sum(map(len, vectors))), usage


def _limit(value: int | None, name: str) -> int:
    if value is not None and value < 0:
        raise UserError(f"{name} must be 0 (no limit) or more, got {value}", param=name)
    return value or 0
