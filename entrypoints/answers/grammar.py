"""The grammar of a whole answer with tool calls: only calls, or text in which calls may stand, or calls or something else.

Puts together what a syntax says of its calls (`CallGrammar`) and what may be around them. Knows Lark and marks; knows no request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers.protocol import CallGrammar, JsonTerm, ToolSyntax

_TEXT = "/(.|\\n)+/"


def tools_grammar(
    syntax: ToolSyntax,
    marks: Marks,
    tools: Sequence[Tool],
    json_term: JsonTerm,
    *,
    required: bool,
    parallel: bool,
    or_else: str | None = None,
) -> str:
    """Lark with the rule `start`. required: nothing but calls. parallel: any number of them, else one.

    or_else: a Lark term that an answer without calls must be; None: any text, which may also stand before and between calls.
    """
    calls = syntax.grammar(tools, json_term, parallel=parallel)
    trigger = marks.terminal(calls.trigger)
    if required:
        start = f"start: {trigger} calls\n"
    elif or_else is not None:
        start = f"start: {trigger} calls | {calls.answer_head} {or_else}\n"
    elif calls.answer_head:
        start = f"start: {trigger} calls | {calls.answer_head} TEXT?\nTEXT: {_TEXT}\n"
    elif calls.anchored:
        start = f"start: {trigger} calls | other\n{_other(calls)}"
    else:
        start = f"start: (lead calls){'*' if parallel else '?'} tail\n{_around(calls, marks)}"
    return f"{start}{calls.rules}\n"


def _around(calls: CallGrammar, marks: Marks) -> str:
    """`lead` is text up to and with the first trigger, `tail` is text without one."""
    trigger = marks.terminal(calls.trigger)
    # special tokens are never part of a text
    barred = [_expression(text) for text in calls.others if not marks.is_special(text)]
    text = _without(barred)
    if not marks.is_special(calls.trigger):
        barred.append(_expression(calls.trigger))
    if marks.token_id(calls.trigger) is not None:
        lead = f"lead: TEXT? {trigger}"
    elif calls.others:
        lead = f"lead: TAIL? {trigger}"
    else:
        lead = f"lead[suffix={trigger}]: /(.|\\n)*/"
    return f"{lead}\ntail: TAIL?\nTEXT: {text}\nTAIL: {_without(barred)}\n"


def _other(calls: CallGrammar) -> str:
    """An answer that does not begin as calls do."""
    first = "".join(sorted({_expression(text[0]) for text in (calls.trigger, *calls.others)}))
    return f"other: OTHER?\nOTHER: /[^{first}\\s](.|\\n)*/\n"


def _without(barred: Sequence[str]) -> str:
    """A terminal of text with none of some expressions in it."""
    return f"{_TEXT} & ~/(.|\\n)*({'|'.join(barred)})(.|\\n)*/" if barred else _TEXT


def _expression(text: str) -> str:
    """`text` in a regular expression of Lark."""
    return re.escape(text).replace("/", "\\/").replace('"', "\\x22")
