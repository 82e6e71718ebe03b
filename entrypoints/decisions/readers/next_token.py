"""Any generative chat model: the question goes through its chat template, its labels are read where the answer would begin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfbyte.entrypoints.decisions.labels import LabelTree, LabelTrees
from halfbyte.entrypoints.decisions.prompts import Prompt, PromptMaker
from halfbyte.entrypoints.decisions.reading import Asked, Read, Readout, Scores
from halfbyte.entrypoints.decisions.wording import label_at, labels_of, question_text, state_text


@dataclass(frozen=True, slots=True)
class LabelReading:
    """options: per label of the tree, the option that it stands for. merge: its spellings' log probabilities to one."""

    prompt: Prompt
    tree: LabelTree
    options: list[int]
    merge: Callable[[list[float]], float]

    def reads(self) -> list[Read]:
        return self.tree.reads(self.prompt.token_ids)

    def scores(self, readouts: Sequence[Readout]) -> Scores:
        found = map(self.merge, self.tree.logprobs(readouts))
        by_option = dict(zip(self.options, found, strict=True))
        return Scores([by_option[option] for option in range(len(by_option))], self.tree.argmax_is_label(readouts))


class NextToken:
    """state_indent, spellings, merge: what models of other habits change."""

    state_indent: int | None = None

    def __init__(self, prompts: PromptMaker, labels: LabelTrees) -> None:
        self._prompts = prompts
        self._labels = labels

    def merge(self, logprobs: list[float]) -> float:
        """One log probability for a label, of those of its spellings: that of any of them."""
        top = max(logprobs)
        return top if top == -math.inf else top + math.log(math.fsum(math.exp(value - top) for value in logprobs))

    def spellings(self, label: str) -> tuple[str, ...]:
        """A word may begin with a capital, as sentences do: both count."""
        return tuple(dict.fromkeys((label, label.capitalize())))

    def read(self, asked: Asked) -> LabelReading:
        question = asked.question
        state = state_text(asked.state, self.state_indent)
        text = question_text(question, asked.order)
        messages = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        messages.append({"role": "user", "content": f"{state}\n\n{text}" if state else text})
        prompt = self._prompts.make(messages, asked.template_kwargs, state)
        labels = labels_of(question)
        listed = [label_at(question, labels, place, option) for place, option in enumerate(asked.order)]
        tree = self._labels.tree(prompt.token_ids, tuple(map(self.spellings, listed)))
        return LabelReading(prompt, tree, list(asked.order), self.merge)
