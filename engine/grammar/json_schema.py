"""JSON schemas: what a request gives becomes one that llguidance enforces in full, or a UserError that says why not.

Knows which keywords the library takes and where it is looser than the standard. It must not know where schemas come from, nor
tokens. Called by `source_forms`. The stages: `schema_reader` reads, `schema_rewrites` replaces keywords, this module writes.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

from halfbyte.engine.grammar.schema_logic import DENIAL, facts, plain
from halfbyte.engine.grammar.schema_reader import AT, Document, Node, Schema, Work, json_depth, read
from halfbyte.engine.grammar.schema_rewrites import Rewriter
from halfbyte.engine.grammar.source_regex import UNWRITABLE, RegexError, translate
from halfbyte.errors import UserError

# The library counts in double precision: beyond this, whole numbers are not told apart.
MAX_EXACT = 2**53 - 1
# Fractions with more digits or places are read by it with an error in the last one.
EXACT_DIGITS = 15
EXACT_PLACES = 20
# Between two neighbouring whole numbers the library takes an excluded one for included. Fractions it does not.
OFF_WHOLE = 1e-9
MAX_REPEATS = 1_000_000
# The library reads JSON 128 levels deep, and a schema takes two: deep ones are cut into definitions.
LEVELS_OF_A_DEFINITION = 25
MAX_WRITTEN_DEPTH = 120
MAX_LEVELS = 1_200
MAX_TEXT_BYTES = 1 << 20
# Nothing, a space, or a line end and an indentation.
DEFAULT_WHITESPACE = r"\n[ \t]{0,20}| "
# The letters that may follow a backslash. Without `u` each text has one spelling, so that no member hides behind another name.
ESCAPES = 'nrbtf\\"'
_UNWRITABLE = re.compile(f"[{UNWRITABLE}]")
_BLANK = r"[ \t\n\r]|\\[ntrs]|\\x(?:20|0[9aAdD])"
_WHITESPACE = re.compile(rf"(?:{_BLANK}|\[(?:{_BLANK})+\]|[()|?*+]|\(\?:|\{{\d+(?:,\d*)?\}})*")


@dataclass(frozen=True, slots=True)
class GrammarOptions:
    """How JSON is written. whitespace_pattern: what may stand between its tokens, for the default."""

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


def prepare(schema: Any, *, options: GrammarOptions, param: str, work: Work | None = None) -> Any:
    """The schema for `%json`. schema: as an object or as JSON text. work: what all schemas of a request may take together.

    UserError names `param` and points at the bad node.
    """
    if isinstance(schema, str):
        schema = _parse(schema, param)
    document = read(schema, param, work or Work())
    written = _Writer(document, options.disable_additional_properties).write()
    if written is False:
        raise document.fail("#", "no value satisfies it")
    return {"x-guidance": json_style(options, param), **(written if isinstance(written, dict) else {})}


def _parse(text: str, param: str) -> Any:
    if len(text) > MAX_TEXT_BYTES:
        raise UserError(f"{param} has {len(text)} characters, the limit is {MAX_TEXT_BYTES}", param=param)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise UserError(f"{param} is not a JSON schema: {reason}", param=param) from None


def json_style(options: GrammarOptions, param: str) -> dict[str, Any]:
    """The library's options, which travel in the schema. UserError, naming `param`, for a pattern that is no white space."""
    style: dict[str, Any] = {"json_allowed_escapes": ESCAPES}
    if options.disable_any_whitespace:
        return style | {"whitespace_flexible": False}
    pattern = options.whitespace_pattern
    if pattern is None:
        return style | {"whitespace_pattern": DEFAULT_WHITESPACE}
    if _WHITESPACE.fullmatch(pattern) is None:
        raise UserError(
            f"whitespace_pattern {pattern!r} must match white space alone: space, \\t, \\n, \\r, \\s, with [], (), | and counts",
            param=param,
        )
    try:
        translated = translate(re.sub(r"\\s|\[[^]]*\]", _json_blanks, pattern), whole=True)
    except RegexError as error:
        raise UserError(f"whitespace_pattern {pattern!r} cannot be used: {error}", param=param) from None
    return style | {"whitespace_pattern": translated}


def _json_blanks(found: re.Match[str]) -> str:
    r"""`\s`, alone or in a class: the white space of JSON, which has less than Unicode."""
    blanks = found[0].replace("\\s", r" \t\n\r")
    return blanks if blanks.startswith("[") else f"[{blanks}]"


class _Writer:
    """Writes a document in the words of the library: all references lead to `$defs`."""

    def __init__(self, document: Document, is_closed: bool) -> None:
        self.document = document
        self.rewriter = Rewriter(document)
        self.is_closed = is_closed
        self.names = {at: f"d{number}" for number, at in enumerate(document.targets)}
        self.definitions: dict[str, Schema] = {}
        self.depth = 0

    def write(self) -> Schema:
        root = self.schema(self.document.root, "#")
        for at, name in self.names.items():
            self.definitions[name] = self.schema(self.document.targets[at], at)
        # At worst each leads to the next, and the library's stack holds them all.
        if sum(map(json_depth, self.definitions.values())) > MAX_LEVELS:
            raise self.document.fail("#", f"too many schemas refer to one another: {len(self.definitions)}")
        return {**root, "$defs": self.definitions} if isinstance(root, dict) and self.definitions else root

    def schema(self, schema: Schema, at: str, *, in_place: bool = False) -> Schema:
        """in_place: another schema says what else the value is, and closes the object that it may be."""
        if isinstance(schema, bool):
            return schema
        at = schema.get(AT, at)
        self.document.step()
        self.depth += 1
        if self.depth > MAX_WRITTEN_DEPTH:
            raise self.document.fail(at, f"what it becomes is nested more than {MAX_WRITTEN_DEPTH} deep")
        written = self.node({**schema, AT: at}, in_place)
        if self.depth > 1 and self.depth % LEVELS_OF_A_DEFINITION == 1:
            name = f"h{len(self.definitions)}"
            self.definitions[name] = written
            written = {"$ref": f"#/$defs/{name}"}
        self.depth -= 1
        return written

    def node(self, node: Node, in_place: bool) -> Node:
        node = self.rewriter.rewrite(node)
        if self.is_closed and not in_place and set(node) != {AT, "$ref"} and _names_members(node, self.document):
            in_place = bool({"allOf", "$ref", "anyOf"} & set(node))
            if in_place:
                node = self.rewriter.close(node, "additionalProperties", False)
            else:
                node.setdefault("additionalProperties", False)
        return {key: self.keyword(key, node[key], node, in_place) for key in _in_order(node) if key not in (AT, DENIAL)}

    def keyword(self, key: str, value: Any, node: Node, in_place: bool) -> Any:
        at = f"{node[AT]}/{key}"
        match key:
            case "$ref":
                return f"#/$defs/{self.names[value]}"
            case "properties":
                return {name: self.schema(each, f"{at}/{name}") for name, each in value.items()}
            case "patternProperties":
                patterns = {self.pattern(name, at): self.schema(each, f"{at}/{name}") for name, each in value.items()}
                if len(patterns) < len(value):
                    raise self.document.fail(at, "two patterns are the same expression")
                return patterns
            case "additionalProperties" | "items":
                return self.schema(value, at)
            case "prefixItems":
                return [self.schema(each, f"{at}/{index}") for index, each in enumerate(value)]
            case "allOf":
                return [self.schema(each, f"{at}/{index}", in_place=True) for index, each in enumerate(value)]
            case "anyOf":
                return [self.schema(each, f"{at}/{index}", in_place=in_place) for index, each in enumerate(value)]
            case "pattern":
                return self.pattern(value, at)
            case "type":
                return value[0] if len(value) == 1 else value
            case "const" | "enum" | "multipleOf":
                return self.exact(value, at)
            case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum":
                return self.bound(key, value, node, at)
            case "minProperties":
                return self.min_properties(value, node, at)
            case "minItems" | "minLength" | "maxItems" | "maxLength" | "maxProperties" if value > MAX_REPEATS:
                if key.startswith("min"):
                    raise self.document.fail(at, f"{value} is more than the limit, {MAX_REPEATS}")
                return MAX_REPEATS
        return value

    def pattern(self, text: str, at: str) -> str:
        try:
            return translate(text, whole=False)
        except RegexError as error:
            raise self.document.fail(at, f"the regular expression {text[:80]!r} cannot be used: {error}") from None

    def exact(self, value: Any, at: str) -> Any:
        """A value as it is. Numbers that the library would round are refused, and texts of which it would leave something out."""
        if isinstance(value, list):
            return [self.exact(each, at) for each in value]
        if isinstance(value, dict):
            return {name: self.exact(each, at) for name, each in value.items()}
        if isinstance(value, str) and _UNWRITABLE.search(value):
            raise self.document.fail(at, f"{value!r} holds a control character that cannot be written")
        if isinstance(value, float) and not value.is_integer() and _rounded(value, ROUND_FLOOR) != value:
            raise self.document.fail(at, f"{value} has more than {EXACT_DIGITS} digits or {EXACT_PLACES} places")
        if isinstance(value, (int, float)) and abs(value) > MAX_EXACT:
            raise self.document.fail(at, f"{value} is beyond the numbers that are told apart, {MAX_EXACT}")
        return plain(value)

    def bound(self, key: str, value: float, node: Node, at: str) -> float:
        """A bound that the library would round becomes a stricter one; one that lies beyond all exact numbers is refused."""
        is_upper = key in ("maximum", "exclusiveMaximum")
        if abs(value) > MAX_EXACT:
            if (value > 0) != is_upper:
                raise self.document.fail(at, f"{value} is beyond the numbers that are told apart, {MAX_EXACT}")
            return MAX_EXACT if is_upper else -MAX_EXACT
        if key.startswith("exclusive") and value == int(value) and node.get("type") != ["integer"]:
            off = max(OFF_WHOLE, math.ulp(value))
            value = value - off if is_upper else value + off
        return plain(value if value == int(value) else _rounded(value, ROUND_FLOOR if is_upper else ROUND_CEILING))

    def min_properties(self, value: int, node: Node, at: str) -> int:
        """The library does not see when a name that is not listed comes twice."""
        is_listed = node.get("additionalProperties") is False and not node.get("patternProperties")
        if value > len(set(node.get("required", ()))) + 1 and not is_listed:
            raise self.document.fail(at, "more than one member beyond those that are required is not enforced")
        return value


def _rounded(value: float, rounding: str) -> float:
    """The nearest number on one side that the library reads as it is."""
    short = Context(prec=EXACT_DIGITS, rounding=rounding).create_decimal(repr(value))
    exponent = short.as_tuple().exponent
    if isinstance(exponent, int) and exponent < -EXACT_PLACES:
        short = short.quantize(Decimal(1).scaleb(-EXACT_PLACES), rounding=rounding)
    return float(short)


def _in_order(node: Node) -> list[str]:
    """The node's own keywords side by side, where `properties` is: members come in the order of the schema."""
    in_place = ("allOf", "anyOf", "$ref")
    own = [key for key in node if key not in in_place]
    first = "properties" if "properties" in node else own[0]
    ordered: list[str] = []
    for key in node:
        if key == first:
            ordered += own
        elif key in in_place:
            ordered.append(key)
    return ordered


def _names_members(node: Node, document: Document) -> bool:
    return any({"properties", "patternProperties"} & set(fact) for fact in facts(node, document))
