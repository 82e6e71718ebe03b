"""Whatever is sampled from the masks: an answer is whole when its tokens run out, from the least that it can do with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from halfbyte.engine.grammar.closing import Closing, Vocabulary, reach_of
from halfbyte.engine.grammar.compile import GrammarCompiler, GrammarOptions, lark_of
from halfbyte.engine.grammar.constraint import RequestConstraint
from halfbyte.engine.grammar.rows import ids_of
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.types import Constraint, StructuredOutputsParams

MAX_TOKENS = 60


def fixed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TEXT, NUMBER, WHOLE = {"type": "string"}, {"type": "number"}, {"type": "integer"}
PET = fixed(kind={"enum": ["cat", "dog", "hamster"]}, age=WHOLE)
WIDE = fixed(**{f"field{i}": TEXT for i in range(2)})
SCHEMAS: dict[str, Any] = {
    "flat": fixed(a=TEXT, b=WHOLE, c={"type": "boolean"}),
    "nested": fixed(u=fixed(n=TEXT, p={"type": "array", "items": PET})),
    "minItems": {"type": "array", "items": NUMBER, "minItems": 3},
    "pattern": fixed(i={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, n={"type": "string", "minLength": 5}),
    "wide items": {"type": "array", "items": WIDE},
    "wide option": WIDE | {"properties": {"o": WIDE, "t": TEXT}, "required": ["t"]},
    "recursive": {"$defs": {"t": fixed(v=WHOLE, k={"type": "array", "items": {"$ref": "#/$defs/t"}})}, "$ref": "#/$defs/t"},
    "linked": {
        "$defs": {"n": fixed(v=WHOLE, next={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})},
        "$ref": "#/$defs/n",
    },
    "any of": {"anyOf": [WHOLE, fixed(x={"anyOf": [TEXT, {"type": "null"}]}), {"type": "array", "items": WHOLE, "minItems": 4}]},
    "anything": True,
}
REGEXES = (r"(ab|c{20})*[0-9]+\.[0-9]{2}", r"[a-z]{2,10}@[a-z]{3,12}\.(com|org)", r"yes|no|a long story that ends")


@pytest.fixture(scope="module")
def compiler(json_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(json_tokenizer, json_tokenizer.vocab_size, [json_tokenizer.vocab_size - 1])


@pytest.fixture(scope="module")
def vocabulary(json_tokenizer: Tokenizer, compiler: GrammarCompiler) -> Vocabulary:
    return Vocabulary(json_tokenizer, compiler)


@pytest.fixture(scope="module")
def sample(compiler: GrammarCompiler, vocabulary: Vocabulary) -> Callable[..., list[int]]:
    """The tokens of a request that takes any of those that its masks allow."""

    def sample_one(grammar: str, reach: int, max_tokens: int, dice: np.random.Generator) -> list[int]:
        eos = compiler.vocab_size - 1
        closing = Closing(vocabulary, reach)
        one = RequestConstraint(Constraint(grammar), compiler.vocab_size, [eos], compiler.matcher(grammar), closing)
        one.start(max_tokens)
        row, tokens = np.zeros(one.num_words, np.int32), []
        while len(tokens) < max_tokens and not one.is_complete:
            one.fill(row)
            tokens.append(int(dice.choice(ids_of(row))))
            assert one.accept(tokens[-1]), one.error
        return tokens[:-1] if tokens[-1] == eos else tokens

    return sample_one


def least(vocabulary: Vocabulary, compiler: GrammarCompiler, grammar: str) -> list[int]:
    path = vocabulary.path(compiler.matcher(grammar), tries_all=True)
    assert path is not None
    return path


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_is_whole_whatever_the_number_of_tokens(
    name: str,
    compiler: GrammarCompiler,
    vocabulary: Vocabulary,
    sample: Callable[..., list[int]],
    json_tokenizer: Tokenizer,
) -> None:
    grammar = lark_of(StructuredOutputsParams(json=SCHEMAS[name]), GrammarOptions())
    reach, dice = reach_of(vocabulary, compiler.matcher(grammar)), np.random.default_rng(0)
    shortest = least(vocabulary, compiler, grammar)
    json.loads(json_tokenizer.decode(shortest))
    for max_tokens in range(len(shortest), MAX_TOKENS + 1):
        tokens = sample(grammar, reach, max_tokens, dice)
        text = b"".join(map(json_tokenizer.token_bytes, tokens)).decode()
        json.loads(text)
        whole = compiler.matcher(grammar)
        assert whole.consume_tokens(tokens) and whole.is_accepting(), text


@pytest.mark.parametrize("regex", REGEXES)
def test_other_texts_are_whole_too(
    regex: str,
    compiler: GrammarCompiler,
    vocabulary: Vocabulary,
    sample: Callable[..., list[int]],
    json_tokenizer: Tokenizer,
) -> None:
    grammar = lark_of(StructuredOutputsParams(regex=regex), GrammarOptions())
    reach, dice = reach_of(vocabulary, compiler.matcher(grammar)), np.random.default_rng(0)
    for max_tokens in range(len(least(vocabulary, compiler, grammar)), MAX_TOKENS + 1):
        text = b"".join(map(json_tokenizer.token_bytes, sample(grammar, reach, max_tokens, dice))).decode()
        assert re.fullmatch(regex, text)


def test_with_too_few_tokens_an_answer_is_cut_and_nothing_fails(
    compiler: GrammarCompiler, vocabulary: Vocabulary, sample: Callable[..., list[int]]
) -> None:
    grammar = lark_of(StructuredOutputsParams(json=SCHEMAS["flat"]), GrammarOptions())
    dice = np.random.default_rng(0)
    for max_tokens in range(1, len(least(vocabulary, compiler, grammar))):
        assert len(sample(grammar, 4, max_tokens, dice)) == max_tokens


def test_while_there_is_room_a_mask_is_the_grammars_own(compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
    grammar = lark_of(StructuredOutputsParams(json=SCHEMAS["nested"]), GrammarOptions())
    matcher, closing = compiler.matcher(grammar), Closing(vocabulary, 10)
    row = vocabulary.allowed(matcher)
    before = row.copy()
    closing.restrict(matcher, row, 500)
    assert (row == before).all()


def test_what_is_in_the_cards_is_seen_before_the_first_token(compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
    def reach(schema: Any) -> int:
        return reach_of(vocabulary, compiler.matcher(lark_of(StructuredOutputsParams(json=schema), GrammarOptions())))

    assert reach(SCHEMAS["minItems"]) < 6 < reach(SCHEMAS["wide items"]) and reach(SCHEMAS["wide option"]) > 6
