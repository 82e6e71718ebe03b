"""Structural tags: text in which marked parts, such as calls of tools, follow a schema. They become Lark rules.

Knows the two forms in which requests describe them. It must not know tools or models. Called by `source_forms`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from halfbyte.engine.grammar.source_regex import RegexError, translate
from halfbyte.errors import UserError

MAX_DEPTH = 20
MAX_CHARS = 1 << 20
MAX_RULES = 1_000
# What a format is made of: a fixed text, any text (None), or a Lark expression.
Part = str | None | tuple[str]


def lark_of_tags(text: str, schema_of: Callable[[Any], Any], param: str) -> str:
    """The grammar of a structural tag, as JSON text. schema_of: makes a schema one that is enforced."""
    if len(text) > MAX_CHARS:
        raise UserError(f"{param} has {len(text)} characters, the limit is {MAX_CHARS}", param=param)
    try:
        asked = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{param} is not JSON: {error}", param=param) from None
    writer = _Writer(schema_of, param)
    if not isinstance(asked, dict):
        raise writer.fail("must be an object")
    if "structures" in asked:
        tags = [_modern(each, writer) for each in writer.array(asked, "structures")]
        form = {"type": "triggered_tags", "triggers": asked.get("triggers"), "tags": tags}
    elif "format" in asked:
        form = asked["format"]
    else:
        raise writer.fail("needs format, or structures and triggers")
    start = writer.expression(writer.parts(form, 0), is_last=True)
    return "\n".join([f"start: {start}", *writer.rules, r"TEXT: /(?s:.*)/", ""])


def _modern(structure: Any, writer: _Writer) -> Any:
    if not isinstance(structure, dict) or "begin" not in structure:
        raise writer.fail("structures must hold objects with begin, schema and end")
    schema = structure.get("schema", True)
    end = structure.get("end", "")
    return {"type": "tag", "begin": structure["begin"], "content": {"type": "json_schema", "json_schema": schema}, "end": end}


class _Writer:
    def __init__(self, schema_of: Callable[[Any], Any], param: str) -> None:
        self.schema_of = schema_of
        self.param = param
        self.rules: list[str] = []

    def fail(self, message: str) -> UserError:
        return UserError(f"{self.param} {message}", param=self.param)

    def rule(self, body: str, options: str = "") -> str:
        if len(self.rules) == MAX_RULES:
            raise self.fail(f"becomes more than {MAX_RULES} rules: fewer tags may do")
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def array(self, form: Any, key: str) -> list[Any]:
        value = form.get(key)
        if not isinstance(value, list) or not value:
            raise self.fail(f"needs {key}, an array that is not empty")
        return value

    def text(self, form: Any, key: str) -> str:
        value = form.get(key)
        if not isinstance(value, str):
            raise self.fail(f"needs {key}, a text")
        return value

    def parts(self, form: Any, depth: int) -> list[Part]:
        """A format as its parts, one behind the other."""
        if not isinstance(form, dict) or not isinstance(form.get("type"), str):
            raise self.fail("holds a format that is no object with a type")
        if depth > MAX_DEPTH:
            raise self.fail(f"is nested more than {MAX_DEPTH} deep")
        if form.get("excludes"):
            raise self.fail("uses excludes, which is not supported")
        kind = form["type"]
        match kind:
            case "const_string":
                return [self.text(form, "value")]
            case "any_text":
                return [None]
            case "json_schema":
                if form.get("style", "json") != "json":
                    raise self.fail(f"asks for the style {form['style']!r} of json_schema; json is supported")
                return [(self.rule(f"%json {json.dumps(self.schema_of(form.get('json_schema', True)))}"),)]
            case "regex":
                return [(self.regex(self.text(form, "pattern")),)]
            case "tag":
                return self.tag(form, depth)
            case "sequence":
                return [part for each in self.array(form, "elements") for part in self.parts(each, depth + 1)]
            case "or":
                return [(self.choice([self.parts(each, depth + 1) for each in self.array(form, "elements")]),)]
            case "tags_with_separator":
                return [self.separated(form, depth)]
            case "triggered_tags":
                return self.triggered(form, depth)
        raise self.fail(f"has a format of type {kind!r}; supported are {', '.join(KINDS)}")

    def regex(self, pattern: str) -> str:
        try:
            return self.rule(f"/(?:{translate(pattern, whole=True)})/")
        except RegexError as error:
            raise self.fail(f"has a regular expression that cannot be used: {error}") from None

    def tag(self, form: Any, depth: int) -> list[Part]:
        if not isinstance(form, dict):
            raise self.fail("holds a tag that is no object")
        end = form.get("end", "")
        if isinstance(end, list) and len(end) == 1:
            end = end[0]
        if not isinstance(end, str):
            raise self.fail("has a tag whose end is no text")
        return [self.text(form, "begin"), *self.parts(form.get("content"), depth + 1), end]

    def choice(self, options: list[list[Part]]) -> str:
        return f"({' | '.join(self.expression(option, is_last=False) for option in options)})"

    def separated(self, form: Any, depth: int) -> Part:
        tag = self.choice([self.tag(each, depth) for each in self.array(form, "tags")])
        more = "" if form.get("stop_after_first") else f" ({_quoted(self.text(form, 'separator'))} {tag})*"
        return (f"({tag}{more})" if form.get("at_least_one") else f"({tag}{more})?",)

    def triggered(self, form: Any, depth: int) -> list[Part]:
        """Any text, in which a trigger begins a tag."""
        triggers = sorted((str(each) for each in self.array(form, "triggers") if each), key=len, reverse=True)
        if not triggers:
            raise self.fail("needs triggers that are not empty")
        bodies: dict[str, list[str]] = {}
        for each in self.array(form, "tags"):
            begin, *rest = self.tag(each, depth)
            trigger = next((text for text in triggers if str(begin).startswith(text)), None)
            if trigger is None:
                raise self.fail(f"has a tag that begins with {begin!r}, which is none of its triggers")
            body = self.expression([str(begin)[len(trigger) :], *rest], is_last=False)
            bodies.setdefault(trigger, []).append(body)

        def tags(before: Callable[[str], str]) -> str:
            """One tag, behind its trigger."""
            return self.rule(" | ".join(f"{before(trigger)} ({' | '.join(each)})" for trigger, each in bodies.items()))

        at_least_one, only_one = bool(form.get("at_least_one")), bool(form.get("stop_after_first"))
        first = tags(_quoted) if at_least_one else ""
        if at_least_one and only_one:
            return [(first,)]
        behind_text = tags(lambda trigger: self.rule(f"TEXT {_quoted(trigger)}", "[lazy]"))
        if only_one:
            return [(f"({behind_text} | {self.rule('TEXT')})",)]
        return [(f"{first} {behind_text}*",), None]

    def expression(self, parts: list[Part], *, is_last: bool) -> str:
        """Parts as one Lark expression. Any text ends where the fixed text behind it begins, or where everything ends."""
        joined: list[Part] = []
        for part in parts:
            if isinstance(part, str) and joined and isinstance(joined[-1], str):
                joined[-1] += part
            elif part != "" and not (part is None and joined and joined[-1] is None):
                joined.append(part)
        written: list[str] = []
        for at, part in enumerate(joined):
            before = joined[at - 1] if at else ""
            if isinstance(part, tuple):
                if before is None:
                    raise self.fail("has any_text before something that is no fixed text: where it ends cannot be told")
                written.append(part[0])
            elif isinstance(part, str):
                written.append(self.rule(f"TEXT {_quoted(part)}", "[lazy]") if at and before is None else _quoted(part))
        if joined and joined[-1] is None:
            if not is_last:
                raise self.fail("has any_text or triggered_tags before something that is no fixed text")
            written.append(self.rule("TEXT"))
        return " ".join(written) or '""'


def _quoted(text: str) -> str:
    return json.dumps(text)


KINDS = (
    *("const_string", "any_text", "json_schema", "regex", "tag", "sequence", "or"),
    *("tags_with_separator", "triggered_tags"),
)
