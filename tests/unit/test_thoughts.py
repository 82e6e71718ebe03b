"""Where thoughts end: by a token, or by a text that any tokens may spell."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.engine.grammar.constraint import RequestConstraint
from halfbyte.engine.grammar.thoughts import EndOfThought, overlong_tokens
from halfbyte.types import Constraint, Thinking

TEXTS = [b"", b"a", b"</", b"think", b">", b"</think>", b">{", b"k", b"thin", b" </t", b"hink>\n", b"</think>x", b"<"]
MARK = b"</think>"


def token_bytes(token_id: int) -> bytes:
    return TEXTS[token_id]


def row_of(*ids: int) -> np.ndarray:
    """Written out bit by bit."""
    return np.array([sum(1 << i for i in ids)], np.int32)


@pytest.mark.parametrize("ids", [[2, 3, 4], [2, 8, 7, 4], [1, 9, 10], [5], [2, 2, 3, 4]])
def test_any_tokens_that_spell_the_mark_end_the_thought(ids: list[int]) -> None:
    end = EndOfThought([2, 3, 4], token_bytes)
    *before, last = [end.follow(i) for i in ids]
    assert not any(before) and last is (ids != [1, 9, 10])
    assert [EndOfThought([2, 3, 4]).follow(i) for i in ids].count(True) == 0, "by ids a fresh one needs all of them"


def test_a_mark_of_one_token_is_that_token_alone() -> None:
    end = EndOfThought([5], token_bytes)
    assert [end.follow(i) for i in (2, 3, 4, 5)] == [False, False, False, True]
    assert not EndOfThought([]).follow(5), "a thought without a mark has no end"


def test_tokens_that_go_on_behind_the_mark_are_known_by_how_much_of_it_is_out() -> None:
    rows = overlong_tokens(MARK, token_bytes, len(TEXTS))
    assert {count: row.tolist() for count, row in rows.items()} == {
        0: row_of(11).tolist(),
        3: row_of(10).tolist(),
        7: row_of(6).tolist(),
    }


def test_a_thought_before_a_grammar_ends_between_tokens() -> None:
    """Else what follows the mark in the same token would be in no grammar."""
    end = EndOfThought([2, 3, 4], token_bytes, overlong_tokens(MARK, token_bytes, len(TEXTS)))
    for token_id, expected in ((1, row_of(11)), (2, row_of(11)), (3, row_of(6, 11)), (1, row_of(11)), (9, row_of(10, 11))):
        end.follow(token_id)
        found = end.barred_W()
        assert found is not None and found.tolist() == expected.tolist()


def test_thoughts_without_a_grammar_need_no_mask() -> None:
    thinking = Thinking([12], [2, 3, 4], [2, 3, 4], is_open=True, budget=3)
    end = EndOfThought([2, 3, 4], token_bytes, overlong_tokens(MARK, token_bytes, len(TEXTS)))
    constraint = RequestConstraint(Constraint(None, thinking), len(TEXTS), [0], end=end)
    constraint.start(20)
    assert not constraint.needs_mask
    for token_id in (1, 1, 1):
        assert constraint.accept(token_id)
    assert constraint.needs_mask, "the budget is used up"
    row = np.zeros(1, np.int32)
    constraint.fill(row)
    assert row.tolist() == row_of(2).tolist()
