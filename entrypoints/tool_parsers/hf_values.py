"""What a whole region of a response_template means: its content parsed, its transform applied, its calls told.

Knows the content parsers of templates and how their values become a call's arguments. It must not know streams, delimiters or
tokens. Called by `hf_calls` for the regions that cannot be read as they come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import regex

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.tool_parsers.response_template import Region, path_of
from halfbyte.entrypoints.tool_parsers.typed import as_json, types_of


class Malformed(Exception):
    """A region's text is not what its template says."""


def calls_of(region: Region, body: str, groups: Mapping[str, str], tools: Mapping[str, Tool]) -> list[tuple[str, str]]:
    """(name, arguments as JSON) of each call in `body`. groups: what its opener captured. Malformed if a call has no name."""
    try:
        value = parsed(body, region.content, region.content_args)
    except (ValueError, RecursionError, TimeoutError) as error:
        raise Malformed from error
    if region.transform_each:
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise Malformed
        values = [_transformed(region.transform, {**groups, **item}) for item in value]
    elif region.transform is not None:
        values = [_transformed(region.transform, {**groups, "content": value})]
    else:
        values = value if isinstance(value, list) else [value]
    return [_call(value, tools) for value in values]


def parsed(text: str, content: str, args: Mapping[str, Any]) -> Any:
    """The value that the content parser makes of `text`. ValueError if it cannot."""
    return _PARSERS[content](text, args)


def _call(value: Any, tools: Mapping[str, Tool]) -> tuple[str, str]:
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name.strip():
        raise Malformed
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        return name, _arguments(arguments, tools.get(name.strip()))
    if isinstance(arguments, str):
        return name, arguments.strip() or "{}"
    return name, "{}" if arguments is None else _dumped(arguments)


def _arguments(arguments: dict[str, Any], tool: Tool | None) -> str:
    """Texts are cast to what the tool's schema says; other values stay."""
    written = []
    for key, value in arguments.items():
        types = types_of(tool, key)
        if isinstance(value, list) and types and "array" not in types:  # of a key that came several times
            text = f"[{', '.join(_cast(item, types) for item in value)}]"
        else:
            text = _cast(value, types)
        written.append(f"{_dumped(key)}: {text}")
    return "{" + ", ".join(written) + "}"


def _cast(value: Any, types: tuple[str, ...]) -> str:
    return as_json(value, types) if isinstance(value, str) else _dumped(value)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """The transform with its placeholders replaced; None stands for what a value lacks."""
    if isinstance(transform, Mapping):
        return {key: _transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_transformed(value, scope) for value in transform]
    path = path_of(transform)
    if path is None:
        return transform
    value: Any = scope
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _text(text: str, args: Mapping[str, Any]) -> str:
    return text.strip() if args.get("strip", True) else text


def _bool(text: str, args: Mapping[str, Any]) -> bool:
    return text.strip().lower() in ("true", "1")


def _json(text: str, args: Mapping[str, Any]) -> Any:
    """JSON, or a dialect: strings between other marks, keys without quotes, or plain text."""
    pairs = [(regex.escape(opening), regex.escape(close)) for opening, close in args.get("string_delims", ())]
    strings = [f"{opening}(?P<own>.*?){close}" for opening, close in pairs]
    keys = [r"(?P<before>[{,]\s*)(?P<key>\w+)(?=\s*:)"] if args.get("unquoted_keys") else []
    written = text
    if strings or keys:
        pattern = "|".join([*(f"(?:{one})" for one in strings), r'"(?:\\.|[^"\\])*"', *keys])
        written = regex.sub(pattern, _as_plain_json, text, flags=regex.DOTALL)
    try:
        return json.loads(written, strict=False)
    except ValueError:
        if args.get("allow_non_json"):
            return _text(text, args)
        raise


def _as_plain_json(match: regex.Match[str]) -> str:
    groups = match.groupdict()
    if groups.get("own") is not None:
        return _dumped(groups["own"])
    if groups.get("key") is not None:
        return str(groups["before"]) + _dumped(groups["key"])
    return match.group()


def _tags(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    repeated: set[str] = set()
    for match in regex.finditer(args["tag_pattern"], text, flags=regex.DOTALL, timeout=1.0):
        key, value = match.group("key"), _nested(match.group("value") or "", args)
        if args.get("merge_duplicates") and key in found:
            found[key] = [*found[key], value] if key in repeated else [found[key], value]
            repeated.add(key)
        else:
            found[key] = value
    return found


def _lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    separator = args.get("kv_sep", ":")
    found = {}
    for line in text.split(args.get("line_sep", "\n")):
        key, separated, value = _text(line, args).partition(separator)
        if separated:
            found[_text(key, args)] = _nested(_text(value, args), args)
    return found


def _nested(text: str, args: Mapping[str, Any]) -> Any:
    parser: Mapping[str, Any] | None = args.get("value_parser")
    return text if parser is None else parsed(text, parser.get("name", "text"), parser.get("args", {}))


_PARSERS: Mapping[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "text": _text,
    "int": lambda text, args: int(text),
    "float": lambda text, args: float(text),
    "bool": _bool,
    "json": _json,
    "xml-inline": _tags,
    "kv-lines": _lines,
}
