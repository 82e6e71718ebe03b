"""The words of pooling: what a request wants of a text's hidden states, and what a model can give.

Structs cross the process boundary. Ranges are checked where an instance is made, what depends on the model by
`PoolingInfo.ask`. Nothing here imports torch, reads files or knows a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from halfbyte.errors import Refusal, UnsupportedError, UserError

PoolingTask = Literal["embed", "token_embed", "classify"]
POOLING_TASKS: tuple[PoolingTask, ...] = ("embed", "token_embed", "classify")
PoolingMode = Literal["cls", "mean", "last"]
RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed", "classify")


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is wanted of a text. Field names are vLLM's.

    task: None leaves it to the method that is called. dimensions: the first so many numbers of an embedding, for models made for
    that. use_activation: normalise an embedding, or turn a classifier's numbers into probabilities; None: as the model has it.
    truncate_prompt_tokens: keep so many tokens, -1: what the model takes. truncation_side: "right" (the default) drops the end.
    """

    task: PoolingTask | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in POOLING_TASKS:
            raise UserError(f"task must be one of {', '.join(POOLING_TASKS)}, got {self.task!r}", param="task")
        for name, low in (("dimensions", 1), ("truncate_prompt_tokens", -1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31):
                raise UserError(f"{name} must be an integer from {low}, got {value!r}", param=name)
        if self.truncation_side not in (None, "left", "right"):
            raise UserError(f"truncation_side must be left or right, got {self.truncation_side!r}", param="truncation_side")
        if not isinstance(self.use_activation, bool | None):
            raise UserError(f"use_activation must be true or false, got {self.use_activation!r}", param="use_activation")


class Pooling(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the engine is asked for, with nothing left open.

    activates: as `PoolingParams.use_activation`. reads_all: every token has to be computed, so that none may come from the
    prefix cache. second_from: where the second of two texts begins, None for one text.
    """

    task: PoolingTask
    activates: bool
    reads_all: bool
    dimensions: int | None = None
    second_from: int | None = None


class PoolingInfo(msgspec.Struct, kw_only=True):
    """What a pooling model gives. Its vectors have `size` numbers: an embedding's, or one per label.

    activates: what a request gets that does not say. matryoshka: lengths to which embeddings may be cut; empty: any, None: none.
    labels: of a classifier, in the order of its numbers. pairs: how two texts become one prompt: by the tokenizer, or in the
    words of Qwen3-Reranker; None where texts are compared by their embeddings.
    """

    task: Literal["embed", "classify"]
    mode: PoolingMode
    size: int
    activates: bool
    matryoshka: list[int] | None = None
    labels: list[str] = msgspec.field(default_factory=list)
    pairs: Literal["tokenizer", "qwen3_reranker"] | None = None

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        return ("embed", "token_embed") if self.task == "embed" else ("classify",)

    @property
    def offers(self) -> tuple[str, ...]:
        """Its tasks, and scores of pairs of texts: by comparing embeddings, or by a classifier's only number."""
        return (*self.tasks, "score") if self.task == "embed" or self.size == 1 else self.tasks

    def ask(self, params: PoolingParams, task: PoolingTask, second_from: int | None = None) -> Pooling:
        """UnsupportedError for a task that the model does not serve, UserError for what it does not offer."""
        if params.task not in (None, task):
            raise UserError(f"this asks for {task}, not for task={params.task}; leave task out", param="task")
        self.require(task)
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions, task)
        activates = self.activates if params.use_activation is None else params.use_activation
        return Pooling(
            task=task,
            activates=activates,
            reads_all=task == "token_embed" or self.mode != "last",
            dimensions=params.dimensions,
            second_from=second_from,
        )

    def require(self, *tasks: PoolingTask) -> None:
        """UnsupportedError unless the model serves one of `tasks`."""
        if not set(tasks) & set(self.tasks):
            raise UnsupportedError(
                Refusal(f"this model does not serve {' or '.join(tasks)}", f"it was started for {', '.join(self.tasks)}")
            )

    def _check_dimensions(self, dimensions: int, task: PoolingTask) -> None:
        if task == "classify":
            raise UserError("dimensions is for embeddings; a classifier has one number per label", param="dimensions")
        if self.matryoshka is None:
            raise UserError(
                f"dimensions={dimensions}: the model does not say that its {self.size} numbers may be cut; for one that was made"
                " for it (Matryoshka), start with --hf-overrides '{\"is_matryoshka\": true}'",
                param="dimensions",
            )
        possible: Sequence[int] = self.matryoshka
        if dimensions > self.size or (possible and dimensions not in possible):
            words = f"one of {', '.join(map(str, possible))}" if possible else f"from 1 to {self.size}"
            raise UserError(f"dimensions={dimensions}: possible here is {words}", param="dimensions")
