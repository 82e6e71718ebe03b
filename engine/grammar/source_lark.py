"""Grammars that requests bring as text, Lark or EBNF: measured and made safe before the library reads them.

Knows the outline of both notations: texts, expressions, comments, brackets, rules, JSON inside. It must not know requests.
Called by `source_forms`. What a grammar means is the library's affair; that it cannot hurt the process is this module's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from halfbyte.errors import UserError
from halfbyte.log import one_line

MAX_CHARS = 64 << 10
MAX_DEPTH = 20
# Each rule may lead to the next, and the library follows them on its stack.
MAX_RULES = 1_000

_PIECES = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*")
    |(?P<expression>/(?:[^/\\\n]|\\.)+/)
    |(?P<json>%(?:json|llguidance|regex)(?![\w-])\s*)
    |(?P<open>[(\[{])|(?P<close>[)\]}])
    |(?P<rule>(?<![^\n])[ \t]*[?!]?[A-Za-z_][\w-]*[^\S\n]*(?:\[[^\]\n]*\]|\{[^}\n]*\}|::[\w-]*)?[^\S\n]*:)
    |(?P<other>[^"/#%()\[\]{}\n]+|.|\n)""",
    re.VERBOSE,
)
_EBNF = re.compile(r"(?m)^[ \t]*[A-Za-z_][\w-]*[ \t]*::=")
_ESCAPED = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|x([0-9A-Fa-f]{2}))")


def checked_grammar(text: str, schema_of: Callable[[Any], Any], param: str) -> str:
    """The grammar in Lark. schema_of: makes the schema that stands behind `%json` one that is enforced."""
    if len(text) > MAX_CHARS:
        raise UserError(f"{param} has {len(text)} characters, the limit is {MAX_CHARS}", param=param)
    if _EBNF.search(text):
        text = _from_ebnf(text, param)
    return "".join(_pieces(text, schema_of, param))


def _pieces(text: str, schema_of: Callable[[Any], Any], param: str) -> Iterator[str]:
    at = depth = num_rules = 0
    while at < len(text):
        found = _PIECES.match(text, at)
        assert found is not None, "every character is a piece"
        piece, at = found[0], found.end()
        if found.lastgroup == "json":
            try:
                value, end = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{param}: behind {piece.strip()} there is no JSON: {error}", param=param) from None
            piece += json.dumps(schema_of(value)) if piece.startswith("%json") else text[at:end]
            at = end
        elif found.lastgroup == "open":
            depth += 1
            if depth > MAX_DEPTH:
                raise UserError(f"{param} nests brackets more than {MAX_DEPTH} deep", param=param)
        elif found.lastgroup == "close":
            depth -= 1
        elif found.lastgroup == "rule":
            num_rules += 1
            if num_rules > MAX_RULES:
                raise UserError(f"{param} has more than {MAX_RULES} rules", param=param)
            if option := re.search(r"\b(temperature|stop)\b\s*=", piece):
                raise UserError(f"{param}: the option {option[1]} of a rule is not supported", param=param)
        yield piece


def _from_ebnf(text: str, param: str) -> str:
    """GBNF, which is also what other engines call EBNF; its first rule is `root`."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    _check_brackets(text, param)
    try:
        return str(gbnf_to_lark(_ESCAPED.sub(_character, text)))
    except Exception as error:  # the converter raises plain Exception for what it cannot read
        raise UserError(f"{param} cannot be read as EBNF: {one_line(str(error))[:300]}", param=param) from None


def _check_brackets(text: str, param: str) -> None:
    depth = 0
    for found in re.finditer(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|\#[^\n]*|[()]', text):
        depth += (found[0] == "(") - (found[0] == ")")
        if depth > MAX_DEPTH:
            raise UserError(f"{param} nests brackets more than {MAX_DEPTH} deep", param=param)


def _character(found: re.Match[str]) -> str:
    """An escaped character itself, where it means nothing else in a text or class."""
    code = int(found[1] or found[2] or found[3], 16)
    char = chr(code) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else ""
    return char if char.isprintable() and char not in '"\\[]^-/' and char else found[0]
