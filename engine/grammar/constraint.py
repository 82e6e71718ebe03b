"""What one request's tokens must keep to: its grammar, and its budget for thinking.

Knows token ids, the request's matcher and how many tokens it may have; knows no scheduler, no text and no device. The scheduler
tells it each token that is appended; the engine core asks for the rows of a step's mask.

Mask rows are as in `rows`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from halfbyte.engine.grammar.closing import Closing
from halfbyte.engine.grammar.rows import allow, forbid, num_words
from halfbyte.engine.grammar.thoughts import EndOfThought
from halfbyte.types import Constraint, Thinking

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


class _State(Enum):
    """OPENING: the model may begin to think, or to answer. CLOSING: the budget is used up, the thought's end is forced."""

    OPENING = "opening"
    THINKING = "thinking"
    CLOSING = "closing"
    ANSWER = "answer"


class RequestConstraint:
    """The constraint of one request, from its first token to its last.

    vocab_size: the width of the logits. matcher: at the beginning of the grammar, None without one; closing goes with it.
    error: why the request cannot go on, safe to show to the client. is_complete: nothing but the end can follow.
    """

    def __init__(
        self,
        asked: Constraint,
        vocab_size: int,
        eos_token_ids: Collection[int],
        matcher: LLMatcher | None = None,
        closing: Closing | None = None,
        end: EndOfThought | None = None,
    ) -> None:
        self.error: str | None = None
        self.is_complete = False
        self.num_words = num_words(vocab_size)
        self._matcher, self._closing = matcher, closing
        self._eos_token_ids = frozenset(eos_token_ids)
        self._thinking = thinking = asked.thinking or Thinking([], [], [], is_open=False)
        self._budget = thinking.budget
        self._num_left = 0
        self._num_thought = 0
        self._num_opened = self._num_forced = 0  # tokens of start_ids, of force_ids that are out
        self._may_answer = True  # in OPENING: whether the output so far is the beginning of an answer, too
        self._end = EndOfThought(thinking.end_ids) if end is None else end
        self._state = {None: _State.OPENING, True: _State.THINKING, False: _State.ANSWER}[thinking.is_open]

    def start(self, max_tokens: int) -> None:
        """Say how many tokens the request may have. A thought gets as many as leave room for its end and an answer."""
        self._num_left = max_tokens
        if self._budget is None:
            return
        needed = len(self._thinking.force_ids) + 1
        if self._matcher is not None and self._closing is not None:
            needed += self._closing.num_needed(self._matcher)
        if self._state is _State.OPENING:
            needed += len(self._thinking.start_ids)
        self._budget = max(0, min(self._budget, max_tokens - needed))
        if self._budget == 0 and self._state is _State.OPENING and self._matcher is not None:
            self._state = _State.ANSWER
        self._watch_budget()

    @property
    def may_need_mask(self) -> bool:
        """Whether a mask may be needed for any token from now on."""
        if self._matcher is not None:
            return not self.is_complete
        return self._budget is not None and self._state is not _State.ANSWER

    @property
    def needs_mask(self) -> bool:
        """Whether the next token needs one."""
        match self._state:
            case _State.OPENING:
                return self._matcher is not None or self._bars_thinking
            case _State.THINKING:
                return self._matcher is not None and self._end.barred_W() is not None
            case _State.CLOSING:
                return True
            case _State.ANSWER:
                return self._matcher is not None

    @property
    def asking_matcher(self) -> LLMatcher | None:
        """The matcher whose mask `finish` wants to find in the row; None where the row may hold anything."""
        in_grammar = self._state is _State.ANSWER or (self._state is _State.OPENING and self._may_answer)
        return self._matcher if in_grammar else None

    def fill(self, row: np.ndarray) -> None:
        """Write the mask of the next token."""
        if (matcher := self.asking_matcher) is not None:
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.finish(row)

    def finish(self, row: np.ndarray) -> None:
        """The rest of `fill`, once the matcher's mask is in the row."""
        if (matcher := self.asking_matcher) is not None:
            self._finish_answer(matcher, row)
        elif self._state is _State.OPENING and self._matcher is None:
            row[:] = -1
        elif self._state is _State.THINKING:
            barred_W = self._end.barred_W()
            row[:] = -1 if barred_W is None else ~barred_W
        else:
            row[:] = 0
        if self._state is _State.CLOSING:
            allow(row, self._thinking.force_ids[self._num_forced])
        elif self._state is _State.OPENING:
            change = forbid if self._bars_thinking else allow
            change(row, self._thinking.start_ids[self._num_opened])

    def accept(self, token_id: int) -> bool:
        """Follow a token that was appended. False when it was not allowed, or the grammar cannot go on: `error` says why."""
        if self.error is None:
            self._num_left -= 1
            follow = {
                _State.OPENING: self._open,
                _State.THINKING: self._think,
                _State.CLOSING: self._force,
                _State.ANSWER: self._answer,
            }[self._state]
            if not follow(token_id) and self.error is None:
                self.error = "the model's answer left the grammar that the request asked for"
        return self.error is None

    @property
    def _bars_thinking(self) -> bool:
        """Whether the token that would begin a thought is the next one, and there is no budget for any."""
        return self._budget == 0 and self._num_opened == len(self._thinking.start_ids) - 1

    def _finish_answer(self, matcher: LLMatcher, row: np.ndarray) -> None:
        if matcher.is_error():
            self.error = "the grammar that the request asked for became too complex to follow"
            row[:] = -1
            return
        if self._closing is not None:
            self._closing.restrict(matcher, row, self._num_left)
        if matcher.is_accepting():
            for token_id in self._eos_token_ids:
                allow(row, token_id)

    def _open(self, token_id: int) -> bool:
        self._may_answer = self._may_answer and self._may_consume(token_id)
        if self._may_answer:
            self._answer(token_id)
        if token_id == self._thinking.start_ids[self._num_opened]:
            self._num_opened += 1
            if self._num_opened == len(self._thinking.start_ids):
                self._begin_thought()
            return True
        self._state = _State.ANSWER
        return self._may_answer

    def _begin_thought(self) -> None:
        if self._matcher is not None:
            self._matcher.reset()
        self.is_complete = False
        self._state = _State.THINKING
        self._watch_budget()

    def _think(self, token_id: int) -> bool:
        self._num_thought += 1
        if self._end.follow(token_id):
            self._state = _State.ANSWER
        else:
            self._watch_budget()
        return True

    def _watch_budget(self) -> None:
        if self._state is _State.THINKING and self._budget is not None and self._num_thought >= self._budget:
            self._state = _State.CLOSING

    def _force(self, token_id: int) -> bool:
        if token_id != self._thinking.force_ids[self._num_forced]:
            return False
        self._num_forced += 1
        # The model may have been about to close its thought: then the first forced tokens completed that.
        closed_itself = self._end.follow(token_id) and self._num_forced < len(self._thinking.end_ids)
        if closed_itself or self._num_forced == len(self._thinking.force_ids):
            self._state = _State.ANSWER
        return True

    def _answer(self, token_id: int) -> bool:
        matcher = self._matcher
        if matcher is None:
            return True
        if token_id in self._eos_token_ids and matcher.is_accepting():
            self.is_complete = True
            return True
        if not matcher.consume_token(token_id):
            return False
        if self._closing is not None:
            self._closing.advance(token_id)
        self.is_complete = matcher.is_stopped() and matcher.is_accepting()
        return True

    def _may_consume(self, token_id: int) -> bool:
        if self._matcher is None or (token_id in self._eos_token_ids and self._matcher.is_accepting()):
            return True
        return self._matcher.validate_tokens([token_id]) == 1


def fill_masks(constraints: Sequence[RequestConstraint | None]) -> np.ndarray | None:
    """The mask of a step, int32 [len(constraints), ceil(V / 32)]: all ones where there is None; None where no row needs one."""
    asking = [(at, one) for at, one in enumerate(constraints) if one is not None and one.needs_mask]
    if not asking:
        return None
    mask = np.full((len(constraints), asking[0][1].num_words), -1, np.int32)
    matchers = [(matcher, at) for at, one in asking if (matcher := one.asking_matcher) is not None]
    if len(matchers) > 1:
        _executor().unsafe_compute_mask_ptr(matchers, mask.ctypes.data, mask.strides[0], len(mask))
    elif matchers:
        matchers[0][0].unsafe_compute_mask_ptr(mask[matchers[0][1]].ctypes.data, mask.strides[0])
    for at, one in asking:
        one.finish(mask[at])
    return mask


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor()
