"""POST /v1/embeddings, /pooling and /classify: a vector per prompt, as numbers, as base64, or as probabilities of labels."""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from starlette.responses import Response

from halfbyte.entrypoints.openai.frontend import Call, Frontend
from halfbyte.entrypoints.openai.pooling import ListAnswer, begin, pool, pooling_params, prompt_jobs
from halfbyte.entrypoints.openai.pooling_protocol import ClassifyRequest, EmbeddingRequest, PoolingRequest
from halfbyte.entrypoints.openai.wire import to_json
from halfbyte.entrypoints.pooling.prompts import PoolingJob

Numbers = list[float | list[float]] | str


class Embedding(msgspec.Struct, kw_only=True):
    """embedding: numbers, or base64 of float32."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class Embeddings(ListAnswer):
    data: list[Embedding]


class Pooled(msgspec.Struct, kw_only=True):
    """data: a vector, one per token, or base64 of float32."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: Numbers


class PooledTexts(ListAnswer):
    data: list[Pooled]


class Class(msgspec.Struct, kw_only=True):
    """label: the one of the greatest number."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(ListAnswer):
    data: list[Class]


async def embed(frontend: Frontend, call: Call, request: EmbeddingRequest) -> Response:
    model, prompts = begin(frontend, call, request)
    jobs = await prompt_jobs(frontend, prompts, request, pooling_params(request, request.dimensions), "embed")
    vectors, usage = await pool(frontend, call, request, jobs)
    as_text = request.encoding_format == "base64"

    def body() -> Embeddings:
        data = [Embedding(index=i, embedding=_vector(vector, as_text=as_text)) for i, vector in enumerate(vectors)]
        return Embeddings(id=call.public_id, created=call.created, model=model, data=data, usage=usage)

    return await _answer(frontend, body, vectors)


async def encode(frontend: Frontend, call: Call, request: PoolingRequest) -> Response:
    model, prompts = begin(frontend, call, request)
    task = request.task or prompts.info.tasks[0]
    jobs = await prompt_jobs(frontend, prompts, request, pooling_params(request, request.dimensions), task)
    vectors, usage = await pool(frontend, call, request, jobs)
    as_text = request.encoding_format == "base64"

    def body() -> PooledTexts:
        pairs = zip(vectors, jobs, strict=True)
        data = [Pooled(index=i, data=_numbers(v, job, as_text=as_text)) for i, (v, job) in enumerate(pairs)]
        return PooledTexts(id=call.public_id, created=call.created, model=model, data=data, usage=usage)

    return await _answer(frontend, body, vectors)


async def classify(frontend: Frontend, call: Call, request: ClassifyRequest) -> Response:
    model, prompts = begin(frontend, call, request)
    jobs = await prompt_jobs(frontend, prompts, request, pooling_params(request), "classify")
    vectors, usage = await pool(frontend, call, request, jobs)
    labels = prompts.info.labels
    data = []
    for index, vector in enumerate(vectors):
        probs = _floats(vector)
        data.append(Class(index=index, label=labels[probs.index(max(probs))], probs=probs, num_classes=len(probs)))
    return to_json(Classes(id=call.public_id, created=call.created, model=model, data=data, usage=usage))


def _vector(vector: bytes, *, as_text: bool) -> list[float] | str:
    return b64encode(vector).decode("ascii") if as_text else _floats(vector)


def _numbers(vector: bytes, job: PoolingJob, *, as_text: bool) -> Numbers:
    if as_text:
        return b64encode(vector).decode("ascii")
    if job.pooling.task != "token_embed":
        return [*_floats(vector)]
    size = len(vector) // len(job.token_ids)
    return [_floats(vector[start : start + size]) for start in range(0, len(vector), size)]


def _floats(vector: bytes) -> list[float]:
    return array("f", vector).tolist()


async def _answer(frontend: Frontend, body: Callable[[], ListAnswer], vectors: Sequence[bytes]) -> Response:
    """Many numbers are written beside the event loop."""
    return await frontend.beside.run(lambda: to_json(body()), sum(map(len, vectors)))
