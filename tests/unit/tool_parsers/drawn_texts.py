"""Texts drawn at random from the grammars of syntaxes, and the tools that they call.

A text ends: after a while what closes is preferred. Used by the tests of grammars.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from halfbyte.engine.grammar.compile import GrammarCompiler, GrammarOptions
from halfbyte.engine.grammar.json_schema import prepare
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers.protocol import ToolSyntax
from tests.unit.tool_parsers.token_marks import EOS, tokenizer_with


def an_object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TOOLS = [
    Tool("now"),
    Tool("nothing", an_object([])),
    Tool("write_text", an_object(["text"], text={"type": "string"}, title={"type": "string"})),
    Tool(
        "set-all",
        an_object(
            ["count", "share", "on", "kind"],
            count={"type": "integer"},
            share={"type": "number"},
            on={"type": "boolean"},
            kind={"type": "string", "enum": ["a b", "c"]},
            limit={"type": "integer"},
        ),
    ),
    Tool(
        "nest",
        an_object(
            ["at", "tags"],
            at=an_object(["x"], x={"type": "integer"}, label={"type": "string"}),
            tags={"type": "array", "items": {"type": "string"}, "maxItems": 3},
        ),
    ),
]
BY_NAME = {tool.name: tool for tool in TOOLS}
MAX_TOKENS, CLOSE_AFTER_TOKENS = 2500, 120
NUM_ALLOWED_IN_TEXT = 90
CLOSERS = frozenset(b"\"'}])")


class Writing:
    """A syntax, and a vocabulary of single bytes and `tokens`."""

    def __init__(self, make: Callable[[Marks], ToolSyntax], tokens: Sequence[str]) -> None:
        self.tokenizer: Tokenizer = tokenizer_with(*tokens)
        self.marks = Marks(self.tokenizer if tokens else None)
        self.syntax = make(self.marks)
        eos = self.tokenizer.token_id(EOS)
        assert eos is not None
        self.eos = eos
        self.compiler = GrammarCompiler(self.tokenizer, self.tokenizer.vocab_size, [eos])
        self.mask = allocate_token_bitmask(1, self.tokenizer.vocab_size)

    def draw(self, lark: str, draw: random.Random) -> str:
        """An answer of the grammar as a reader gets it."""
        matcher = self.compiler.matcher(lark)
        assert not matcher.is_error(), f"{matcher.get_error()}\n{lark}"
        literals = [json.loads(found).encode() for found in re.findall(r'"(?:[^"\\]|\\.)+"', re.sub(r"%json .*", "", lark))]
        pieces: list[str] = []
        written, planned = bytearray(), b""
        for count in range(MAX_TOKENS):
            allowed = self._allowed(matcher)
            assert allowed, (bytes(written), matcher.get_error())
            is_closing = count > CLOSE_AFTER_TOKENS
            if is_closing and not planned and len(allowed) > NUM_ALLOWED_IN_TEXT and draw.random() < 0.5:
                planned = draw.choice(literals)  # one of them closes the text
            token = self._planned(allowed, planned)
            if token is None:
                planned, token = b"", self._choose(allowed, bytes(written), draw, is_closing=is_closing)
            planned = planned[1:]
            if token == self.eos:
                return "".join([*pieces, written.decode()])
            assert matcher.consume_token(token)
            if token in self.tokenizer.added_ids:
                pieces += [written.decode(), self.marks.mark(self.tokenizer.token_text(token))]
                written.clear()
            else:
                written += self.tokenizer.token_bytes(token)
        raise AssertionError(f"no end: {''.join(pieces)}{bytes(written)!r}")

    def _allowed(self, matcher: llguidance.LLMatcher) -> list[int]:
        fill_next_token_bitmask(matcher, self.mask)
        return [int(i) for i in np.unpackbits(self.mask.view(np.uint8)[0], bitorder="little").nonzero()[0]]

    def _planned(self, allowed: list[int], planned: bytes) -> int | None:
        return next((token for token in allowed if planned and self.tokenizer.token_bytes(token) == planned[:1]), None)

    def _choose(self, allowed: list[int], written: bytes, draw: random.Random, *, is_closing: bool) -> int:
        ends = [token for token in allowed if token == self.eos]
        if ends and (is_closing or draw.random() < 0.3):
            return ends[0]
        marks = [token for token in allowed if token in self.tokenizer.added_ids and token != self.eos]
        if marks and (is_closing or draw.random() < 0.5):
            return draw.choice(marks)
        byte_of = {token: self.tokenizer.token_bytes(token) for token in allowed if token not in self.tokenizer.added_ids}
        closers = [token for token, byte in byte_of.items() if byte[0] in CLOSERS]
        if closers and draw.random() < (0.5 if is_closing else 0.1):
            return draw.choice(closers)
        if written[-1:].isdigit():  # exponents would be of any length
            byte_of = {token: byte for token, byte in byte_of.items() if byte not in b"eE"} or byte_of
        plain = [token for token, byte in byte_of.items() if 32 <= byte[0] < 127]
        mostly_plain = plain and len(allowed) > NUM_ALLOWED_IN_TEXT and draw.random() < 0.9
        return draw.choice(plain if mostly_plain else list(byte_of) or marks or ends)


def marks_of(make: Callable[[Marks], ToolSyntax]) -> tuple[str, ...]:
    """The marks that a syntax asks for, without texts of no tag's shape."""
    asked: dict[str, None] = {}

    class Asked(Marks):
        def token_id(self, text: str) -> int | None:
            asked[text] = None
            return None

    make(Asked()).grammar(TOOLS, lambda schema: "/x/", parallel=True)
    return tuple(text for text in asked if re.fullmatch(r"\W*[<\[].*[>\]]", text))


def json_term(schema: Any) -> str:
    return f"%json {json.dumps(prepare(schema, options=GrammarOptions(), param='tools'))}"
