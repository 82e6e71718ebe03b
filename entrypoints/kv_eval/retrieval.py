"""Retrieval: a long list of `NAME -> code` lines between filler, and a last line that lacks its code.

The answer stands in the prompt word for word, so that a wrong digit is the cache's doing (or the model's, which the baseline
shows). Completion prompts: base models can answer them as well as chat models. Called by `evaluate`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import zip_longest

from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints.kv_eval.questions import Question
from halfbyte.errors import UserError

# A document is asked several times. A few take turns: the second query of each finds it in the prefix cache, from which the
# others of its kind do not drive it out.
_QUERIES_PER_DOCUMENT = 10
_DOCUMENTS_AT_ONCE = 4
_MAX_ANSWER_TOKENS = 10
_HEADING = "Codes of the storage rooms. Each line gives the name of a room and its four-digit code.\n\n"
_NAMES = """
    Amber Anchor Apricot Arrow Aspen Badger Bamboo Barley Basil Beacon Bishop Bramble Bronze Cactus Camel Candle Canyon
    Cedar Cherry Cinder Cobalt Comet Copper Coral Cricket Crystal Dagger Daisy Delta Dolphin Dragon Eagle Ember Falcon
    Feather Fennel Fiddle Finch Flint Forest Garnet Ginger Glacier Goose Granite Hammer Harbor Hazel Heron Honey Indigo
    Island Ivory Jasper Juniper Kestrel Kettle Lantern Lemon Lilac Lion Lotus Magnet Maple Marble Meadow Mercury Mirror
    Monsoon Nectar Needle Olive Onyx Orchid Oyster Panther Pebble Pepper Pigeon Poppy Quartz Raven Ribbon Saddle Saffron
    Salmon Silver Sparrow Spruce Summit Thistle Tiger Tulip Velvet Violet Walnut
"""
_FILLER = (
    "The caretaker checks the locks on the first Monday of the month.",
    "Visitors sign the book at the desk before they go upstairs.",
    "A new lamp was ordered for the corridor on the east side.",
    "The lift is slow in winter, and most people take the stairs.",
    "Parcels that nobody collects are kept behind the counter for two weeks.",
    "Paint and solvents belong in the shed, never in a room without a window.",
    "The floor plan by the entrance shows an older state of the building.",
    "Keys must not be lent to anybody who is not on the list.",
)


def make_questions(tokenizer: Tokenizer, lengths: Sequence[int], num_queries: int, seed: int) -> list[Question]:
    """`num_queries` questions per length, over prompts of about that many tokens."""
    questions = []
    for length in lengths:
        documents = []
        for start in range(0, num_queries, _QUERIES_PER_DOCUMENT):
            rng = random.Random(f"{seed} {length} {start}")
            documents.append(_ask_document(tokenizer, length, min(_QUERIES_PER_DOCUMENT, num_queries - start), rng))
        for first in range(0, len(documents), _DOCUMENTS_AT_ONCE):
            rounds = zip_longest(*documents[first : first + _DOCUMENTS_AT_ONCE])
            questions += [question for each in rounds for question in each if question is not None]
    return questions


def is_code(text: str, code: str) -> bool:
    """Whether the first number of an answer is the code."""
    found = re.search(r"\d+", text)
    return found is not None and found.group() == code


def longest_prompt(num_tokens: int) -> int:
    """The prompt length that leaves room for the answer in `num_tokens`."""
    return num_tokens - _MAX_ANSWER_TOKENS


def _ask_document(tokenizer: Tokenizer, length: int, num_queries: int, rng: random.Random) -> list[Question]:
    names = _NAMES.split()
    rng.shuffle(names)
    # enough between the lines that the names suffice for any length
    most_filler = 2 + length // 700
    text, codes = _HEADING, dict[str, str]()
    for name in names:
        code = str(rng.randrange(1000, 10000))
        filler = "".join(f"{sentence}\n" for sentence in rng.choices(_FILLER, k=rng.randint(0, most_filler)))
        line = f"{name} -> {code}\n{filler}"
        if len(tokenizer.encode(_query(text + line, names[0]))) > length:
            break
        text += line
        codes[name] = code
    if not codes:
        raise UserError(f"a retrieval prompt of {length} tokens holds no line; use longer ones", param="retrieval_lengths")
    asked = rng.sample(sorted(codes), min(num_queries, len(codes)))
    asked += rng.choices(sorted(codes), k=num_queries - len(asked))
    return [_question(tokenizer, length, _query(text, name), codes[name]) for name in asked]


def _query(document: str, name: str) -> str:
    return f"{document}\nThe line of {name} once more:\n{name} ->"


def _question(tokenizer: Tokenizer, length: int, prompt: str, code: str) -> Question:
    return Question(
        kind=str(length),
        prompt_token_ids=tokenizer.encode(prompt),
        max_tokens=_MAX_ANSWER_TOKENS,
        is_right=lambda text: is_code(text, code),
        stop=("\n",),
    )
