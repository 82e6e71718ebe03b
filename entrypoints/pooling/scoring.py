"""Queries and documents to scores: by a classifier that reads both at once, or by the angle between two embeddings.

Plans which vectors are needed, and computes scores of them; numbers only, no input and no output. Called by the routes and by
`LLM.score`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.entrypoints.pooling.prompts import PairOptions, PoolingJob, PoolingPrompts, check_texts
from halfbyte.errors import Refusal, UnsupportedError, UserError
from halfbyte.pooling import PoolingParams


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """jobs: what the engine is asked for. pairs: the two jobs that are compared for each score; None: each job is a score."""

    jobs: list[PoolingJob]
    pairs: list[tuple[int, int]] | None

    def scores(self, vectors: Sequence[bytes]) -> list[float]:
        """vectors: float32, of the jobs in their order."""
        import numpy as np

        if self.pairs is None:
            return [float(np.frombuffer(vector, np.float32)[0]) for vector in vectors]
        values = np.stack([np.frombuffer(vector, np.float32) for vector in vectors]).astype(np.float64)
        lengths = np.linalg.norm(values, axis=1, keepdims=True)
        units = values / np.maximum(lengths, np.finfo(np.float32).tiny)
        return [float(units[a] @ units[b]) for a, b in self.pairs]


def plan_scores(
    prompts: PoolingPrompts,
    queries: Sequence[str],
    documents: Sequence[str],
    params: PoolingParams,
    options: PairOptions = PairOptions(),  # noqa: B008 - frozen
    *,
    names: tuple[str, str] = ("queries", "documents"),
) -> ScorePlan:
    """One query for all documents, or one for each. names: how the request calls them."""
    check_texts(queries, names[0])
    check_texts(documents, names[1])
    if not queries or not documents or len(queries) not in (1, len(documents)):
        raise UserError(
            f"{len(queries)} {names[0]} for {len(documents)} {names[1]}: give one for all, or one for each", param=names[0]
        )
    info = prompts.info
    if info.task == "classify":
        if info.size != 1:
            raise UnsupportedError(Refusal(f"scores want a classifier with one label, this has {info.size}", "use /classify"))
        each = list(queries) * len(documents) if len(queries) == 1 else list(queries)
        jobs = [prompts.of_pair(query, document, params, options) for query, document in zip(each, documents, strict=True)]
        return ScorePlan(jobs, None)
    for name in ("instruction", "template_kwargs"):
        if getattr(options, name):
            param = "chat_template_kwargs" if name == "template_kwargs" else name
            raise UserError(f"{param}: embeddings are compared, no template is applied; leave it out", param=param)
    jobs = [
        prompts.of_text(prompts.shortened(text, limit), params, "embed", param="input_text")
        for texts, limit in ((queries, options.max_query), (documents, options.max_document))
        for text in texts
    ]
    firsts = [0] * len(documents) if len(queries) == 1 else range(len(queries))
    return ScorePlan(jobs, list(zip(firsts, range(len(queries), len(jobs)), strict=True)))
