"""Labels as tokens at the end of a prompt: which tokens spell each, and where their probabilities are read.

A label may be several tokens: its log probability is then the sum over them, each read behind those before it. The labels of a
question make a tree, whose inner nodes are the reads; most trees are one node. Knows the tokenizer; knows no question and no
engine. Used by the readers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    the prompt -> those that can come next. paths: per label, per spelling that the vocabulary has, its tokens.
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
        whole = [[(spelling, tuple(self._tokenizer.encode(text + spelling, False))) for spelling in of] for of in spellings]
        num_common = len(_common_start([tail, *(ids for of_label in whole for _, ids in of_label)]))
        taken: dict[Path, str] = {}
        paths: list[list[Path]] = [[] for _ in spellings]
        numbered = [(nth, label, *spelled) for label, of in enumerate(whole) for nth, spelled in enumerate(of)]
        for nth, label, spelling, ids in sorted(numbered):  # the labels themselves, then other spellings as far as they fit in
            path = ids[num_common:]
            if not path or max(path) >= self._vocab_size or _squeezed(self._text(ids)) != _squeezed(text + spelling):
                problem: str | None = f"label {spelling!r} has no tokens of the model behind the prompt"
            else:
                problem = _clash(spelling, path, taken)
            if problem is None:
                taken[path] = spelling
                paths[label].append(path)
            elif not nth:
                raise Unreadable(problem)
        nodes: dict[Path, dict[int, None]] = {}
        for path in (path for of_label in paths for path in of_label):
            for i, token in enumerate(path):
                nodes.setdefault(path[:i], {})[token] = None
        return LabelTree(len(tail) - num_common, {node: list(children) for node, children in nodes.items()}, paths)


def _clash(spelling: str, path: Path, taken: Mapping[Path, str]) -> str | None:
    """Why these tokens cannot be told from those that are taken."""
    if path in taken:
        return f"labels {taken[path]!r} and {spelling!r} have the same tokens"
    shorter = next((path[:i] for i in range(1, len(path)) if path[:i] in taken), None)
    if shorter is not None:
        return f"the tokens of label {taken[shorter]!r} begin those of {spelling!r}"
    longer = next((other for other in taken if other[: len(path)] == path), None)
    return None if longer is None else f"the tokens of label {spelling!r} begin those of {taken[longer]!r}"


def _squeezed(text: str) -> str:
    """Without spaces: some tokenizers do not keep their number."""
    return "".join(text.split())


def _common_start(sequences: Sequence[Path]) -> Path:
    shortest, longest = min(sequences), max(sequences)
    same = next((i for i, (a, b) in enumerate(zip(shortest, longest, strict=False)) if a != b), None)
    return shortest if same is None else shortest[:same]
