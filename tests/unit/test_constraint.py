"""One request's constraint: which tokens it allows in which state, and what ends it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from halfbyte.engine.grammar.compile import GrammarCompiler
from halfbyte.engine.grammar.constraint import RequestConstraint, fill_masks
from halfbyte.engine.grammar.rows import ids_of
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.types import Constraint, Thinking

Make = Callable[..., RequestConstraint]
THINK, END, END_2, OTHER = 300, 301, 302, 303  # pieces of words, which serve as marks


@pytest.fixture(scope="module")
def eos(json_tokenizer: Tokenizer) -> int:
    assert json_tokenizer.eos_token_id is not None
    return json_tokenizer.eos_token_id


@pytest.fixture(scope="module")
def compiler(json_tokenizer: Tokenizer, eos: int) -> GrammarCompiler:
    return GrammarCompiler(json_tokenizer, json_tokenizer.vocab_size, [eos])


@pytest.fixture
def make(compiler: GrammarCompiler, eos: int) -> Make:
    def make_one(grammar: str | None = None, thinking: Thinking | None = None, max_tokens: int = 100) -> RequestConstraint:
        matcher = None if grammar is None else compiler.matcher(grammar)
        made = RequestConstraint(Constraint(grammar, thinking), compiler.vocab_size, [eos], matcher)
        made.start(max_tokens)
        return made

    return make_one


def thoughts(is_open: bool | None = None, budget: int | None = None, start: list[int] | None = None) -> Thinking:
    return Thinking(start or [THINK], [END, END_2], [OTHER, END, END_2], is_open, budget)


def allowed(constraint: RequestConstraint) -> set[int]:
    row = np.zeros(constraint.num_words, np.int32)
    constraint.fill(row)
    return set(ids_of(row))


def say(constraint: RequestConstraint, tokens: list[int]) -> None:
    for token in tokens:
        assert not constraint.needs_mask or token in allowed(constraint)
        assert constraint.accept(token), constraint.error


def test_a_grammar_allows_its_tokens_and_the_end_only_where_it_may_end(make: Make, json_tokenizer: Tokenizer, eos: int) -> None:
    digits = {json_tokenizer.encode(digit)[0] for digit in "0123456789"}
    one = make("start: /[0-9]{1,9}/")
    assert digits <= allowed(one) and eos not in allowed(one)
    say(one, json_tokenizer.encode("1"))
    assert digits | {eos} <= allowed(one) and not one.is_complete
    say(one, [eos])
    assert one.is_complete


def test_it_is_complete_with_the_token_after_which_nothing_can_follow(make: Make, json_tokenizer: Tokenizer) -> None:
    one = make('start: "yes" | "no"')
    *first, last = json_tokenizer.encode("yes")
    say(one, first)
    assert one.may_need_mask and not one.is_complete
    say(one, [last])
    assert one.is_complete and not one.may_need_mask


def test_a_token_that_is_not_allowed_is_the_requests_error(make: Make, json_tokenizer: Tokenizer, eos: int) -> None:
    for token in (json_tokenizer.encode("x")[0], eos):
        one = make("start: /[0-9]+/")
        assert not one.accept(token) and "grammar" in (one.error or "")
        assert not one.accept(json_tokenizer.encode("1")[0]), "and stays that"


def test_a_model_may_begin_to_think_or_to_answer(make: Make, json_tokenizer: Tokenizer) -> None:
    yes = json_tokenizer.encode("yes")
    one = make('start: "yes"', thoughts())
    assert {THINK, yes[0]} <= allowed(one) and OTHER not in allowed(one)
    say(one, yes)
    assert one.is_complete


def test_a_beginning_that_fits_both_is_followed_in_both(make: Make, json_tokenizer: Tokenizer) -> None:
    a, b, c = (json_tokenizer.encode(letter)[0] for letter in "abc")
    for rest, thinks in (([b], False), ([c], True)):
        one = make('start: "ab"', thoughts(start=[a, c]))
        say(one, [a])
        assert {b, c} <= allowed(one)
        say(one, rest)
        assert one.needs_mask is not thinks and one.is_complete is not thinks
    one = make('start: "xb"', thoughts(start=[a, c]))
    say(one, [a])
    assert allowed(one) == {c}, "no answer begins like this"


def test_a_thought_is_free_until_all_of_its_end_is_out(make: Make, json_tokenizer: Tokenizer) -> None:
    yes = json_tokenizer.encode("yes")
    one = make('start: "yes"', thoughts())
    say(one, [THINK])
    for token in (OTHER, yes[0], END, OTHER, END):
        assert not one.needs_mask
        say(one, [token])
    say(one, [END_2])
    assert one.needs_mask and THINK not in allowed(one)
    say(one, yes)
    assert one.is_complete


@pytest.mark.parametrize("grammar", [None, 'start: "yes"'])
def test_a_budget_forces_the_end_of_a_thought(make: Make, grammar: str | None) -> None:
    one = make(grammar, thoughts(is_open=True, budget=2))
    say(one, [OTHER])
    assert not one.needs_mask
    say(one, [OTHER])
    for token in (OTHER, END, END_2):
        assert one.needs_mask and allowed(one) == {token}
        say(one, [token])
    assert one.needs_mask is one.may_need_mask is (grammar is not None)


def test_an_end_that_was_half_out_may_be_completed_by_the_forced_one(make: Make) -> None:
    one = make(None, Thinking([THINK], [END, END_2], [END_2, OTHER], True, 2))
    say(one, [OTHER, END])
    assert allowed(one) == {END_2}
    say(one, [END_2])
    assert not one.may_need_mask


def test_without_a_budget_to_spend_no_thought_is_begun(make: Make, json_tokenizer: Tokenizer) -> None:
    assert THINK not in allowed(make('start: "yes"', thoughts(budget=0)))
    free = make(None, thoughts(budget=0))
    assert free.needs_mask and allowed(free).issuperset(set(range(json_tokenizer.vocab_size)) - {THINK})
    assert THINK not in allowed(free)
    assert allowed(make(None, thoughts(is_open=True, budget=0))) == {OTHER}


def test_a_budget_leaves_room_for_the_end_and_an_answer(make: Make) -> None:
    one = make(None, thoughts(is_open=True, budget=50), max_tokens=10)
    for _ in range(6):
        assert not one.needs_mask
        say(one, [OTHER])
    assert allowed(one) == {OTHER}
    say(one, [OTHER, END, END_2])


def test_a_steps_mask_has_ones_where_nothing_is_asked(make: Make, json_tokenizer: Tokenizer) -> None:
    grammars = ('start: "yes"', "start: /[0-9]+/", 'start: "no"')
    constrained = [make(grammar) for grammar in grammars]
    free = make(None, thoughts(is_open=True, budget=9))
    assert fill_masks([None, free]) is None
    for count in (1, 3):
        mask = fill_masks([None, *constrained[:count], free])
        assert mask is not None and mask.dtype == np.int32 and (mask[[0, -1]] == -1).all()
        for row, grammar in zip(mask[1:-1], grammars, strict=False):
            assert set(ids_of(row)) == allowed(make(grammar)), "alone and in a batch"
