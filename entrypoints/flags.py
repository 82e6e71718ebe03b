"""The command line's grammar: flags declared as data, read into `EngineOptions` and `ServerConfig`.

Knows how a value is written (sizes, JSON, lists, switches, `--config file.yaml`), not what it means: that is `resolve`'s. A
wrong command line is a `UsageError`: one line, exit code 2. The tables are in `flag_table`; the commands call `parse`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal, NoReturn

from halfbyte.errors import HalfbyteError, UserError

Kind = Literal["text", "integer", "size", "length", "number", "switch", "json", "json_list", "texts"]
Owner = Literal["engine", "server", "command"]

SIZE_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
AUTO_LENGTH = -1

_FLAG = re.compile(r"--?[A-Za-z][^\s=]*")
_SIZE = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)([kKmMgG]?)")


class UsageError(UserError):
    """The command line itself is wrong: exit code 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One option. `field` is the attribute it sets (by default its name); `choices` is called only when it is needed.

    A positional has no dashes and may be left out. `check` raises HalfbyteError for a value that is wrong.
    """

    name: str
    help: str
    owner: Owner = "command"
    kind: Kind = "text"
    field: str = ""
    short: str = ""
    choices: Callable[[], Sequence[str]] | None = None
    check: Callable[[Any], None] | None = None
    positional: bool = False
    group: str = "general"

    @property
    def target(self) -> str:
        return self.field or self.name.replace("-", "_")

    @property
    def dest(self) -> str:
        """Where argparse keeps the value: a positional and a flag may have one target, but not both a value."""
        return f"positional {self.target}" if self.positional else self.target

    @property
    def spellings(self) -> list[str]:
        """The forms that the parser accepts, the long one first."""
        long = [f"--{self.name}"] + ([f"--no-{self.name}"] if self.kind == "switch" else [])
        return long + ([self.short] if self.short else [])


@dataclass(frozen=True, slots=True)
class Parsed:
    """The values that were given, by owner and field. What was not given is not there."""

    engine: Mapping[str, Any]
    server: Mapping[str, Any]
    command: Mapping[str, Any]


def parse(
    command: str,
    description: str,
    flags: Sequence[Flag],
    argv: Sequence[str],
    refused: Mapping[str, str] | None = None,
) -> Parsed:
    """Read `argv` (without the command's name). `refused`: names known from elsewhere -> what to do instead ("" for nothing).

    `--help` prints and raises SystemExit(0). Everything that is wrong raises UsageError.
    """
    checker = _NameChecker(flags, refused or {})
    config_path, words = _take_config(checker.spell(argv))
    parser = _build(command, description, flags)
    if "-h" in words or "--help" in words:
        parser.print_help()
        raise SystemExit(0)
    given = _read_words(parser, flags, words)
    if config_path is not None:
        given = _read_file(parser, flags, checker, config_path) | given
    by_owner: dict[str, dict[str, Any]] = {"engine": {}, "server": {}, "command": {}}
    for flag in flags:
        if flag.target in given:
            by_owner[flag.owner][flag.target] = given[flag.target]
    return Parsed(**by_owner)


def parse_size(text: str) -> int:
    """`32768`, `32k` (10^3), `32K` (2^10), `1.5G`: a whole number. ValueError otherwise."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write 4096, 4k (4000) or 4K (4096); k, m, g and K, M, G")
    number, suffix = match.groups()
    size = Decimal(number) * SIZE_SUFFIXES.get(suffix, 1)
    if size != int(size):
        raise ValueError(f"{text!r} is not a whole number")
    return int(size)


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of printing usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(re.sub(r"^argument ([^:]*): ", _last_long_name, message))


def _last_long_name(match: re.Match[str]) -> str:
    names = match.group(1).split("/")
    return next((name for name in names if name.startswith("--")), names[0]) + ": "


class _NameChecker:
    """Says of each flag in a command line whether it is known, known but not supported, or a mistake."""

    def __init__(self, flags: Sequence[Flag], refused: Mapping[str, str]) -> None:
        self._known = {"-h", "--help", "--config"}.union(*(flag.spellings for flag in flags if not flag.positional))
        self._json = {f"--{flag.name}" for flag in flags if flag.kind == "json"}
        self._refused = refused

    def spell(self, argv: Sequence[str], where: str = "") -> list[str]:
        """`argv` with each flag in its canonical spelling (dashes). UsageError for the first that is not known."""
        words: list[str] = []
        for index, word in enumerate(argv):
            if word == "--":
                return [*words, *argv[index:]]
            match = _FLAG.match(word)
            if match is None or (match.end() < len(word) and word[match.end()] != "="):
                words.append(word)
                continue
            name, rest = match.group(), word[match.end() :]
            base, dot, keys = name.partition(".")
            base = "--" + base[2:].replace("_", "-") if base.startswith("--") else base
            self._check(base, bool(dot), where)
            words.append(base + dot + keys + rest)
        return words

    def _check(self, name: str, dotted: bool, where: str) -> None:
        if name in self._known and (not dotted or name in self._json):
            return
        if dotted and name in self._known:
            raise UsageError(f"{where}{name} takes no dotted keys: they are for {', '.join(sorted(self._json))}")
        bare = re.sub(r"^--no-", "--", name)
        for known in (name, bare, "-O" if re.fullmatch(r"-O\d", name) else ""):
            if known in self._refused:
                instead = self._refused[known]
                raise UsageError(f"{where}{name} is not supported yet" + (f": {instead}" if instead else ""))
        near = difflib.get_close_matches(name, self._known, n=1, cutoff=0.5) if name.startswith("--") else []
        raise UsageError(f"{where}unknown flag {name}" + (f"; did you mean {near[0]}?" if near else "; see --help"))


def _build(command: str, description: str, flags: Sequence[Flag]) -> argparse.ArgumentParser:
    positionals = "".join(f" [{flag.name.upper()}]" for flag in flags if flag.positional)
    parser = _Parser(
        prog=f"halfbyte {command}",
        usage=f"halfbyte {command}{positionals} [flags]",
        description=description,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, Any] = {}
    for flag in flags:
        group = groups.get(flag.group) or groups.setdefault(flag.group, parser.add_argument_group(flag.group))
        _add(group, flag)
    general = groups.get("general") or parser
    general.add_argument("--config", metavar="FILE", help="YAML file of flags; the command line wins over it")
    general.add_argument("-h", "--help", action="store_true", help="show this and leave")
    return parser


def _add(group: Any, flag: Flag) -> None:
    text = flag.help.replace("%", "%%")
    if flag.choices is not None:
        text += f" ({', '.join(flag.choices())})"
    names = [*([flag.short] if flag.short else []), f"--{flag.name}"]
    if flag.positional:
        group.add_argument(flag.dest, metavar=flag.name.upper(), nargs="?", help=text)
    elif flag.kind == "switch":
        group.add_argument(*names, dest=flag.target, action=argparse.BooleanOptionalAction, help=text)
    elif flag.kind == "texts":
        group.add_argument(*names, dest=flag.target, nargs="+", action="extend", metavar="X", help=text)
    else:
        group.add_argument(*names, dest=flag.target, type=_READERS[flag.kind], metavar=_METAVARS[flag.kind], help=text)


def _reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse shows the text of ArgumentTypeError, and hides that of ValueError."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, InvalidOperation) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _integer(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text.strip()):
        raise ValueError(f"{text!r} is not an integer")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _length(text: str) -> int:
    return AUTO_LENGTH if text.strip().lower() == "auto" else parse_size(text)


def _json_object(text: str) -> dict[str, Any]:
    value = _json(text, """'{"key": 1}'""")
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object, such as '{{\"key\": 1}}'")
    return value


def _json_list(text: str) -> list[str]:
    value = _json(text, """'["https://example.org"]'""")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{text!r} is not a JSON list of texts, such as '[\"https://example.org\"]'")
    return value


def _json(text: str, example: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is not JSON ({error.msg} at column {error.colno}); write {example}") from None


_READERS: Mapping[Kind, Callable[[str], Any]] = {
    "text": str,
    "integer": _reader(_integer),
    "size": _reader(parse_size),
    "length": _reader(_length),
    "number": _reader(_number),
    "json": _reader(_json_object),
    "json_list": _reader(_json_list),
}
_METAVARS: Mapping[Kind, str] = {
    "text": "X",
    "integer": "N",
    "size": "N",
    "length": "N",
    "number": "N",
    "json": "JSON",
    "json_list": "JSON",
}


def _check(flag: Flag, value: Any) -> None:
    if flag.check is not None:
        try:
            flag.check(value)
        except HalfbyteError as error:
            raise UsageError(str(error)) from None
    elif flag.choices is not None and value not in flag.choices():
        raise UsageError(f"--{flag.name}: {value!r} is not one of {', '.join(flag.choices())}")


def _split_dotted(words: Sequence[str], flags: Sequence[Flag]) -> tuple[list[str], list[tuple[list[str], Any]]]:
    """Take `--flag.key.key value` out of the words: the rest, and (path from the field on, value) of each."""
    targets = {f"--{flag.name}": flag.target for flag in flags if flag.kind == "json"}
    rest: list[str] = []
    dotted: list[tuple[list[str], Any]] = []
    source = iter(words)
    for word in source:
        name, equals, text = word.partition("=")
        base, dot, keys = name.partition(".")
        if base not in targets or not dot:
            rest.append(word)
            continue
        value = text if equals else next(source, None)
        path = keys.split(".")
        if value is None or not all(path):
            raise UsageError(f"{name}: expected a key and a value, as in {base}.key value")
        dotted.append(([targets[base], *path], _loose_json(value)))
    return rest, dotted


def _loose_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _merge(given: dict[str, Any], path: Sequence[str], value: Any) -> None:
    place = given
    for key in path[:-1]:
        inner = place.setdefault(key, {})
        if not isinstance(inner, dict):
            raise UsageError(f"--{'.'.join(path)}: {key} is set to {inner!r} already")
        place = inner
    place[path[-1]] = value


def _read_words(parser: argparse.ArgumentParser, flags: Sequence[Flag], words: Sequence[str]) -> dict[str, Any]:
    """The values that the words give, by target, checked."""
    words, dotted = _split_dotted(words, flags)
    given = vars(parser.parse_args(words))
    for path, value in dotted:
        _merge(given, path, value)
    for flag in flags:
        if flag.positional and flag.dest in given:
            if flag.target in given:
                raise UsageError(f"{flag.name} is given twice: {given[flag.dest]!r} and --{flag.target} {given[flag.target]!r}")
            given[flag.target] = given.pop(flag.dest)
    for flag in flags:
        if flag.target in given:
            _check(flag, given[flag.target])
    return given


def _read_file(parser: argparse.ArgumentParser, flags: Sequence[Flag], checker: _NameChecker, path: str) -> dict[str, Any]:
    """The values of `--config`'s file, under the same rules as the command line's."""
    by_name = {f"--{flag.name}": flag for flag in flags if not flag.positional}
    words: list[str] = []
    for key, value in _load_yaml(path).items():
        [name] = checker.spell([f"--{key}"], f"{path}: ")
        if name not in by_name:
            raise UsageError(f"{path}: {key} cannot stand in a file")
        if value is not None:
            words += _as_words(by_name[name], value, f"{path}: ")
    try:
        return _read_words(parser, flags, words)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _take_config(words: list[str]) -> tuple[str | None, list[str]]:
    rest: list[str] = []
    path = None
    source = iter(words)
    for word in source:
        name, equals, text = word.partition("=")
        if name != "--config":
            rest.append(word)
            continue
        path = text if equals else next(source, None)
        if not path:
            raise UsageError("--config: expected a file")
    return path, rest


def _load_yaml(path: str) -> Mapping[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise UsageError(f"--config: {path} must hold flags and their values, one `name: value` per line")
    return loaded


def _as_words(flag: Flag, value: Any, where: str) -> list[str]:
    """A file's value as it would stand on the command line."""
    name = f"--{flag.name}"
    if flag.kind == "switch":
        if not isinstance(value, bool):
            raise UsageError(f"{where}{flag.name} must be true or false, got {value!r}")
        return [name if value else f"--no-{flag.name}"]
    if flag.kind in ("json", "json_list"):
        return [f"{name}={json.dumps(value)}"]
    if flag.kind == "texts":
        return [f"{name}={item}" for item in (value if isinstance(value, list) else [value])]
    if isinstance(value, bool | list | dict):
        raise UsageError(f"{where}{flag.name} must be a single value, got {value!r}")
    return [f"{name}={value}"]
