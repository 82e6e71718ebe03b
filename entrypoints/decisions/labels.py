"""Labels as tokens at the end of a prompt: which tokens spell each, and where their probabilities are read.

A label may be several tokens: its log probability is then the sum over them, each read behind those before it. The labels of a
question make a tree, whose inner nodes are the reads; most trees are one node. Knows the tokenizer; knows no question and no
engine. Used by the readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints.decisions.reading import Read, Readout
from halfbyte.errors import UserError

# Tokens from the end of a prompt that labels are spelled behind, where no control token stands nearer.
_TAIL_LENGTHS = (16, 64, 256)
_MAX_TREES = 256

Path = tuple[int, ...]
Spellings = tuple[tuple[str, ...], ...]  # of each label


class Unreadable(UserError):
    """These labels cannot be told apart at the end of this prompt."""


@dataclass(frozen=True, slots=True)
class LabelTree:
    """num_replaced: so many of the prompt's last tokens are spelled anew together with a label. nodes: tokens behind the rest of
    the prompt -> those that can come next. paths: per label, per spelling, its tokens.
    """

    num_replaced: int
    nodes: dict[Path, list[int]]
    paths: list[list[Path]]

    def reads(self, prompt: list[int]) -> list[Read]:
        stem = prompt[: len(prompt) - self.num_replaced]
        return [Read(stem, behind, children) for behind, children in self.nodes.items()]

    def logprobs(self, readouts: Sequence[Readout]) -> list[list[float]]:
        """The log probability of each spelling of each label."""
        at = {node: readout.logprobs for node, readout in zip(self.nodes, readouts, strict=True)}
        return [[sum(at[path[:i]][token] for i, token in enumerate(path)) for path in paths] for paths in self.paths]

    def argmax_is_label(self, readouts: Sequence[Readout]) -> bool:
        """Whether the most likely tokens, one after the other, spell a label."""
        best = {node: readout.best_token_id for node, readout in zip(self.nodes, readouts, strict=True)}
        path: Path = ()
        while path in best:
            path = (*path, best[path])
        return any(path in paths for paths in self.paths)


class LabelTrees:
    """The trees of one tokenizer, kept by the prompt's end and the labels: a server asks for the same few again and again."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._grow_cached = lru_cache(_MAX_TREES)(self._grow)

    def tree(self, prompt: list[int], spellings: Spellings) -> LabelTree:
        """Unreadable says which label is at fault."""
        return self._grow_cached(self._tail(prompt), spellings)

    def _tail(self, prompt: list[int]) -> Path:
        """The last tokens of the prompt, from a control token on, which are what their text is encoded to."""
        recent = prompt[-_TAIL_LENGTHS[-1] :]
        after = next((i for i, token in enumerate(reversed(recent), 1) if token in self._tokenizer.added_ids), None)
        for length in (*(() if after is None else (after,)), *_TAIL_LENGTHS, len(prompt)):
            tail = prompt[-length:]
            if self._tokenizer.encode(self._text(tail), False) == tail:
                return tuple(tail)
        raise Unreadable("the tokenizer does not give the end of the prompt back as it was")

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _grow(self, tail: Path, spellings: Spellings) -> LabelTree:
        text = self._text(tail)
        whole = [[tuple(self._tokenizer.encode(text + spelling, False)) for spelling in of_label] for of_label in spellings]
        num_common = len(_common_start([tail, *(ids for of_label in whole for ids in of_label)]))
        paths = [list(dict.fromkeys(ids[num_common:] for ids in of_label)) for of_label in whole]
        self._check(paths, spellings)
        nodes: dict[Path, dict[int, None]] = {}
        for path in (path for of_label in paths for path in of_label):
            for i, token in enumerate(path):
                nodes.setdefault(path[:i], {})[token] = None
        return LabelTree(len(tail) - num_common, {node: list(children) for node, children in nodes.items()}, paths)

    def _check(self, paths: list[list[Path]], spellings: Spellings) -> None:
        """Each label has tokens that the model knows, and none begins another."""
        owner: dict[Path, int] = {}
        for label, of_label in enumerate(paths):
            for path in of_label:
                if not path or max(path) >= self._vocab_size:
                    raise Unreadable(f"label {spellings[label][0]!r} has no tokens of the model behind the prompt")
                if path in owner:
                    raise Unreadable(f"labels {spellings[owner[path]][0]!r} and {spellings[label][0]!r} have the same tokens")
                owner[path] = label
        for path, label in owner.items():
            for i in range(1, len(path)):
                if (other := owner.get(path[:i])) is not None:
                    raise Unreadable(f"the tokens of label {spellings[other][0]!r} begin those of {spellings[label][0]!r}")


def _common_start(sequences: Sequence[Path]) -> Path:
    shortest, longest = min(sequences), max(sequences)
    same = next((i for i, (a, b) in enumerate(zip(shortest, longest, strict=False)) if a != b), None)
    return shortest if same is None else shortest[:same]
