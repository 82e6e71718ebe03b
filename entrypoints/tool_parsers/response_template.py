"""A checkpoint's own description of its answers: the `response_template` of its `tokenizer_config.json`, checked and frozen.

Knows which keys a template (version 1) may have and what Halfbyte can serve of them. It must not know tokens or streams.
Made once per server by the syntax `hf`; UserError says what is wrong with a template, and where.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import regex

from halfbyte.errors import UserError

PARAM = "response_template"
_CONTENT_ARGS: dict[str, frozenset[str]] = {
    "text": frozenset({"strip"}),
    "int": frozenset({"strip"}),
    "float": frozenset({"strip"}),
    "bool": frozenset({"strip"}),
    "json": frozenset({"unquoted_keys", "string_delims", "allow_non_json", "strip"}),
    "xml-inline": frozenset({"tag_pattern", "value_parser", "merge_duplicates"}),
    "kv-lines": frozenset({"line_sep", "kv_sep", "value_parser", "strip"}),
}
_TOP_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
    *("repeats", "join", "optional", "transform", "transform_each"),
}
_FIELDS = ("thinking", "content", "tool_calls")
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


@dataclass(frozen=True, slots=True)
class Delimiter:
    """What opens or closes a region: any of `literals`, the longest that comes, or else a match of `pattern`."""

    literals: tuple[str, ...] = ()
    pattern: str = ""

    @property
    def source(self) -> str:
        """It as a regular expression."""
        return self.pattern or "|".join(map(regex.escape, sorted(self.literals, key=len, reverse=True)))


@dataclass(frozen=True, slots=True)
class CallShape:
    """Where a call's name and arguments are. name_group: the group of the opener that is the name, None if it is in the value.

    name_keys, argument_keys: the keys that lead to them through the objects of the value.
    """

    name_group: str | None
    name_keys: tuple[str, ...]
    argument_keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A field of the template: a part of the answer. opening: None: the text outside of all others. closing: None: up to the end.

    call_shape: None for text, and where the transform makes name or arguments of something else than one part of the value.
    """

    name: str
    opening: Delimiter | None = None
    closing: Delimiter | None = None
    content: str = "text"
    content_args: Mapping[str, Any] = field(default_factory=dict)
    repeats: bool = False
    transform: Any = None
    transform_each: bool = False
    call_shape: CallShape | None = None

    @property
    def strips(self) -> bool:
        """Whether white space around its text is no part of it."""
        return bool(self.content_args.get("strip", True))


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """anchor: a regular expression; behind its last match in a prompt the answer begins."""

    anchor: str
    regions: Mapping[str, Region]

    @property
    def outside(self) -> Region | None:
        """What text outside of all delimiters is; None: nothing."""
        return next((region for region in self.regions.values() if region.opening is None), None)

    def prefix_of(self, prompt: str) -> str:
        """What the prompt already has of the answer: all that is behind its last anchor; the whole prompt when it has none."""
        end = 0
        for match in regex.finditer(self.anchor, prompt, flags=regex.DOTALL):
            end = match.end()
        return prompt[end:]


def load_response_template(template: Mapping[str, Any] | None) -> ResponseTemplate:
    """The template, checked."""
    if template is None:
        raise UserError(
            "the parser hf reads answers by the checkpoint's response_template, but its tokenizer_config.json has none;"
            " choose the parser of the model's own family",
            param=PARAM,
        )
    _expect(isinstance(template, Mapping), "it must be an object")
    _known(template, _TOP_KEYS, "it")
    _expect(template.get("version", 1) == 1, f"version {template.get('version')!r} is not known; 1 is")
    defaults, fields = template.get("defaults", {}), template.get("fields")
    _expect(isinstance(defaults, Mapping) and set(defaults) <= {"role"}, "defaults can only be an object with role")
    if not isinstance(fields, Mapping) or not fields:
        raise _wrong("fields must be an object, and not empty")
    _known(fields, _FIELDS, "fields", "an answer of the API has no others")
    anchor = _delimiter(template, "start_anchor", "the template")
    if anchor is None:
        raise _wrong("it needs start_anchor or start_anchor_pattern")
    regions = {name: _region(name, given) for name, given in fields.items()}
    without = [name for name, region in regions.items() if region.opening is None]
    _expect(len(without) <= 1, f"only one field can be without an opener; {' and '.join(without)} are")
    _expect("tool_calls" not in without, "tool_calls needs open or open_pattern")
    if not without and "content" not in regions:
        regions["content"] = Region("content")
    return ResponseTemplate(anchor.source, regions)


def path_of(value: object) -> tuple[str, ...] | None:
    """The names in a placeholder like `{content.name}`; None for anything else."""
    match = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
    return tuple(match.group(1).split(".")) if match else None


def _region(name: str, given: object) -> Region:
    where = f"fields.{name}"
    if not isinstance(given, Mapping):
        raise _wrong(f"{where} must be an object")
    _known(given, _FIELD_KEYS, where)
    opening, closing = _delimiter(given, "open", where), _delimiter(given, "close", where)
    content, args = given.get("content", "text"), given.get("content_args", {})
    _check_content(content, args, where)
    for key in ("repeats", "optional", "transform_each"):
        _expect(isinstance(given.get(key, False), bool), f"{where}.{key} must be true or false")
    _expect(given.get("join") is None, f"{where}.join cannot be served: parts are told as they come")
    transform, each = given.get("transform"), given.get("transform_each", False)
    if name != "tool_calls":
        _expect(content == "text", f"{where}.content must be text")
        _expect(transform is None and not each, f"{where}.transform cannot be served: text is told as it comes")
    _expect(transform is not None or not each, f"{where}.transform_each needs a transform")
    if opening is not None and opening.pattern:
        _expect(regex.fullmatch(opening.pattern, "") is None, f"{where}.open_pattern matches where there is nothing")
    groups = [group for group in (opening, closing) if group is not None for group in regex.compile(group.source).groupindex]
    _expect(transform is not None or not groups, f"{where}: the groups {', '.join(groups)} need a transform that uses them")
    opening_groups = list(regex.compile(opening.source).groupindex) if opening is not None else []
    _check_placeholders(transform, None if each else {"content", *opening_groups}, f"{where}.transform")
    shape = _call_shape(transform, opening_groups, each) if name == "tool_calls" else None
    return Region(name, opening, closing, content, dict(args), given.get("repeats", False), transform, each, shape)


def _delimiter(given: Mapping[str, Any], key: str, where: str) -> Delimiter | None:
    """What `key` (literals) or `key`_pattern says."""
    literals, pattern = given.get(key), given.get(f"{key}_pattern")
    _expect(literals is None or pattern is None, f"{where} cannot have both {key} and {key}_pattern")
    if pattern is not None:
        _check_pattern(pattern, f"{where}.{key}_pattern")
        return Delimiter(pattern=pattern)
    if literals is None:
        return None
    texts = [literals] if isinstance(literals, str) else literals
    fits = isinstance(texts, list) and texts and all(isinstance(text, str) and text for text in texts)
    _expect(bool(fits), f"{where}.{key} must be a text or a list of texts, none of them empty")
    return Delimiter(tuple(dict.fromkeys(texts)))


def _check_pattern(pattern: object, where: str) -> None:
    if not isinstance(pattern, str) or not pattern:
        raise _wrong(f"{where} must be a regular expression")
    try:
        regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise _wrong(f"{where} is no regular expression: {error}") from None


def _check_content(content: object, args: object, where: str) -> None:
    if not isinstance(content, str) or content not in _CONTENT_ARGS:
        raise _wrong(f"{where}.content must be one of {', '.join(_CONTENT_ARGS)}, got {content!r}")
    if not isinstance(args, Mapping):
        raise _wrong(f"{where}.content_args must be an object")
    _known(args, _CONTENT_ARGS[content], f"{where}.content_args")
    where = f"{where}.content_args"
    for key in ("line_sep", "kv_sep"):
        _expect(isinstance(args.get(key, " "), str) and args.get(key, " ") != "", f"{where}.{key} must be a text, and not empty")
    pairs = args.get("string_delims", [])
    fits = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    fits = fits and all(isinstance(text, str) and text for pair in pairs for text in pair)
    _expect(fits, f"{where}.string_delims must be a list of pairs of texts")
    if content == "xml-inline":
        _check_pattern(args.get("tag_pattern"), f"{where}.tag_pattern")
        groups = regex.compile(args["tag_pattern"]).groupindex
        _expect({"key", "value"} <= set(groups), f"{where}.tag_pattern needs the groups key and value")
    if (nested := args.get("value_parser")) is not None:
        if not isinstance(nested, Mapping):
            raise _wrong(f"{where}.value_parser must be an object")
        _known(nested, {"name", "args"}, f"{where}.value_parser")
        _check_content(nested.get("name", "text"), nested.get("args", {}), f"{where}.value_parser")


def _check_placeholders(node: Any, known: set[str] | None, where: str) -> None:
    """known: what placeholders may begin with; None where that is decided by each value."""
    for child in node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ():
        _check_placeholders(child, known, where)
    if not isinstance(node, str) or not _PLACEHOLDER.search(node):
        return
    path = path_of(node)
    if path is None:
        raise _wrong(f"{where}: {node!r} mixes a placeholder with text")
    _expect(known is None or path[0] in known, f"{where}: {node} is not defined; {', '.join(sorted(known or ()))} are")


def _call_shape(transform: Any, groups: list[str], each: bool) -> CallShape | None:
    whole = ("content",) if transform is None else path_of(transform)
    if whole is not None:
        function: Any = (*whole, "function")
    else:
        function = transform.get("function", transform) if isinstance(transform, Mapping) else None
        function = path_of(function) or function
    if isinstance(function, tuple):
        name, arguments = (*function, "name"), (*function, "arguments")
    elif isinstance(function, Mapping):
        name, arguments = path_of(function.get("name")) or (), path_of(function.get("arguments")) or ()
    else:
        return None
    if not name or not arguments or (arguments[0] in groups and arguments[0] != "content"):
        return None

    def keys(path: tuple[str, ...]) -> tuple[str, ...]:
        return path if each else path[1:]

    if name[0] in groups:
        return CallShape(name[0], (), keys(arguments)) if len(name) == 1 else None
    name_keys, argument_keys = keys(name), keys(arguments)
    shared = min(len(name_keys), len(argument_keys))
    return None if name_keys[:shared] == argument_keys[:shared] else CallShape(None, name_keys, argument_keys)


def _known(given: Mapping[str, Any], known: Any, where: str, why: str = "") -> None:
    unknown = [str(key) for key in given if key not in known]
    reason = f" ({why})" if why else ""
    _expect(not unknown, f"{where} cannot have {', '.join(unknown)}{reason}; it can have {', '.join(sorted(known))}")


def _expect(fits: bool, wrong: str) -> None:
    if not fits:
        raise _wrong(wrong)


def _wrong(what: str) -> UserError:
    return UserError(f"the checkpoint's response_template cannot be used: {what}", param=PARAM)
