"""What a request asks of its answer, as one text: a Lark grammar with the rule `start`.

Knows the forms in which people ask (a JSON schema, a regular expression, choices, a grammar, tags in a text) and what each may
look like. It must not know tokens or the library's matchers. Called through `compile`.
"""

from __future__ import annotations

import json
from typing import Any

from halfbyte.engine.grammar.json_schema import GrammarOptions, prepare
from halfbyte.engine.grammar.schema_reader import Work
from halfbyte.engine.grammar.source_lark import checked_grammar
from halfbyte.engine.grammar.source_regex import RegexError, translate
from halfbyte.engine.grammar.source_tags import lark_of_tags
from halfbyte.errors import UserError
from halfbyte.types import StructuredOutputsParams

MAX_CHOICE_CHARS = 256 << 10


def lark_of(asked: StructuredOutputsParams, defaults: GrammarOptions, param: str | None = None) -> str:
    """The grammar of what is asked. param: what errors name, for the field of `structured_outputs`.

    UserError says what is wrong, and where.
    """
    if asked.disable_any_whitespace and asked.whitespace_pattern is not None:
        field = param or "structured_outputs.whitespace_pattern"
        raise UserError(f"{field}: give whitespace_pattern or disable_any_whitespace, not both", param=field)
    options = GrammarOptions(
        asked.disable_any_whitespace or (defaults.disable_any_whitespace and asked.whitespace_pattern is None),
        asked.disable_additional_properties or defaults.disable_additional_properties,
        asked.whitespace_pattern if asked.whitespace_pattern is not None else defaults.whitespace_pattern,
    )

    def named(field: str) -> str:
        return param or f"structured_outputs.{field}"

    if asked.regex is not None:
        return _regex(asked.regex, named("regex"))
    if asked.choice is not None:
        return _choice(asked.choice, named("choice"))
    field = next(name for name in ("grammar", "structural_tag", "json_object", "json") if getattr(asked, name) is not None)

    work = Work()

    def schema_of(schema: Any) -> Any:
        return prepare(schema, options=options, param=named(field), work=work)

    if asked.grammar is not None:
        return checked_grammar(asked.grammar, schema_of, named(field))
    if asked.structural_tag is not None:
        return lark_of_tags(asked.structural_tag, schema_of, named(field))
    return f"start: %json {json.dumps(schema_of({'type': 'object'} if asked.json is None else asked.json))}\n"


def _regex(pattern: str, param: str) -> str:
    """The whole answer matches: anchors at its ends say nothing new."""
    try:
        return f"start: /(?:{translate(pattern, whole=True)})/\n"
    except RegexError as error:
        raise UserError(f"{param} cannot be used: {error}", param=param) from None


def _choice(choices: list[str], param: str) -> str:
    if (size := sum(map(len, choices))) > MAX_CHOICE_CHARS:
        raise UserError(f"{param} has {size} characters in all, the limit is {MAX_CHOICE_CHARS}", param=param)
    return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, dict.fromkeys(choices)))}\n"
