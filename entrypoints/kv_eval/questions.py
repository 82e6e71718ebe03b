"""Questions whose answers are right or wrong, and how an engine is asked them: greedily, all at once.

Knows prompts as token ids and a function that judges a text. Made by `retrieval`, `structured` and `gsm8k`; asked by `evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halfbyte.types import SamplingParams

if TYPE_CHECKING:
    from halfbyte.entrypoints.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt. kind: what it is counted under besides the total. is_right: whether a text answers it."""

    kind: str
    prompt_token_ids: list[int]
    max_tokens: int
    is_right: Callable[[str], bool]
    stop: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Prompt and answer together, at most."""
        return len(self.prompt_token_ids) + self.max_tokens


def ask(llm: LLM, questions: Sequence[Question]) -> list[bool]:
    """Whether each question was answered right."""
    params = [SamplingParams(temperature=0.0, max_tokens=q.max_tokens, stop=list(q.stop)) for q in questions]
    outputs = llm.generate([question.prompt_token_ids for question in questions], params, use_tqdm=False)
    return [question.is_right(output.outputs[0].text) for question, output in zip(questions, outputs, strict=True)]
