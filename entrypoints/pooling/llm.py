"""`embed`, `encode`, `classify` and `score` of `LLM`: prompts in Python's forms to output objects. Called by `LLM` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

from halfbyte.engine.client import EngineClient
from halfbyte.engine.requests import RequestMaker
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints.offline_prompts import ParsedPrompt
from halfbyte.entrypoints.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from halfbyte.entrypoints.pooling.offline import pool_all
from halfbyte.entrypoints.pooling.prompts import PoolingJob, PoolingPrompts, pair_template, require_pooling
from halfbyte.entrypoints.pooling.scoring import plan_scores
from halfbyte.errors import UnsupportedError, UserError
from halfbyte.pooling import POOLING_TASKS, PoolingParams, PoolingTask
from halfbyte.types import EngineOutput

Made = TypeVar("Made", PoolingOutput, EmbeddingOutput, ClassificationOutput)


@contextmanager
def _refusing() -> Iterator[None]:
    """In Python a method that the model does not serve is a wrong call: UserError, as everything that is wrong with one."""
    try:
        yield
    except UnsupportedError as error:
        raise UserError(str(error)) from None


class OfflinePooling:
    """What an `LLM` pools with. UserError when its model generates text, and in each method for what the model does not serve."""

    def __init__(self, client: EngineClient, maker: RequestMaker, tokenizer: Tokenizer, template: str | None) -> None:
        self._client = client
        self._maker = maker
        self._tokenizer = tokenizer
        self._template = template
        with _refusing():
            self.info = require_pooling(client.info.pooling)

    @cached_property
    def _prompts(self) -> PoolingPrompts:
        template = pair_template(self._tokenizer, self._template) if self.info.pairs else None
        return PoolingPrompts(self._tokenizer, self._maker.limits, self.info, template)

    def embed(self, prompts: Sequence[ParsedPrompt], params: Any, use_tqdm: bool) -> list[EmbeddingRequestOutput]:
        return self._run(prompts, params, "embed", use_tqdm, lambda values: EmbeddingOutput(values.tolist()))

    def classify(self, prompts: Sequence[ParsedPrompt], params: Any, use_tqdm: bool) -> list[ClassificationRequestOutput]:
        return self._run(prompts, params, "classify", use_tqdm, lambda values: ClassificationOutput(values.tolist()))

    def encode(
        self, prompts: Sequence[ParsedPrompt], params: Any, task: str | None, use_tqdm: bool
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """task: None for what the model is for."""
        first = params[0] if isinstance(params, (list, tuple)) and params else params
        asked = task or (first.task if isinstance(first, PoolingParams) else None) or self.info.tasks[0]
        known = [name for name in POOLING_TASKS if name == asked]
        if not known:
            raise UserError(f"pooling_task must be one of {', '.join(POOLING_TASKS)}, got {asked!r}", param="pooling_task")
        return self._run(prompts, params, known[0], use_tqdm, PoolingOutput)

    def score(
        self, queries: Sequence[str], documents: Sequence[str], params: PoolingParams | None, use_tqdm: bool, template: str | None
    ) -> list[ScoringRequestOutput]:
        prompts = self._prompts
        if template is not None:
            found = pair_template(self._tokenizer, template) if self.info.pairs else None
            if found is None:
                reason = (
                    "names no roles 'query' and 'document'" if self.info.pairs else "is for models that read two texts at once"
                )
                raise UserError(f"chat_template {reason}", param="chat_template")
            prompts = PoolingPrompts(self._tokenizer, self._maker.limits, self.info, found)
        with _refusing():
            plan = plan_scores(prompts, queries, documents, params or PoolingParams(), names=("data_1", "data_2"))
        outputs = pool_all(self._maker, self._client, plan.jobs, use_tqdm=use_tqdm)
        scores = plan.scores([output.pooled or b"" for output in outputs])
        second = [plan.jobs[b] for _, b in plan.pairs] if plan.pairs is not None else plan.jobs
        return [
            PoolingRequestOutput(str(index), ScoringOutput(score), job.token_ids)
            for index, (score, job) in enumerate(zip(scores, second, strict=True))
        ]

    def _run(
        self, prompts: Sequence[ParsedPrompt], params: Any, task: PoolingTask, use_tqdm: bool, make: Callable[[Any], Made]
    ) -> list[PoolingRequestOutput[Made]]:
        each = _params_for(params, len(prompts))
        with _refusing():
            jobs = [self._job(prompt, p, task) for prompt, p in zip(prompts, each, strict=True)]
        salts = [salt for _, _, salt in prompts]
        outputs = pool_all(self._maker, self._client, jobs, salts=salts, use_tqdm=use_tqdm)
        return [
            PoolingRequestOutput(str(index), make(_values(output, job)), job.token_ids, output.num_cached_tokens)
            for index, (output, job) in enumerate(zip(outputs, jobs, strict=True))
        ]

    def _job(self, prompt: ParsedPrompt, params: PoolingParams, task: PoolingTask) -> PoolingJob:
        text, ids, _ = prompt
        if ids is not None:
            return self._prompts.of_ids(ids, params, task, "prompts")
        return self._prompts.of_text(text or "", params, task, param="prompts")


def _values(output: EngineOutput, job: PoolingJob) -> Any:
    import numpy as np

    values = np.frombuffer(output.pooled or b"", np.float32)
    return values.reshape(len(job.token_ids), -1) if job.pooling.task == "token_embed" else values


def _params_for(params: Any, count: int) -> list[PoolingParams]:
    if params is None or isinstance(params, PoolingParams):
        return [params or PoolingParams()] * count
    if not isinstance(params, (list, tuple)) or not all(isinstance(p, PoolingParams) for p in params):
        raise UserError("pooling_params must be PoolingParams, or a list of them", param="pooling_params")
    if len(params) != count:
        raise UserError(f"{count} prompts but {len(params)} pooling_params", param="pooling_params")
    return list(params)
