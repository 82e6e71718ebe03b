"""Commands of several kinds, `halfbyte COMMAND KIND`: which kind a line asks for. Knows names only; the command runs the kind."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from halfbyte.entrypoints.flags import UsageError


def choose_kind(command: str, kinds: Mapping[str, str], argv: Sequence[str]) -> tuple[str, list[str]] | None:
    """(the kind, the words behind it); None where help was asked for, which is printed. kinds: name -> what it does."""
    kind, *words = argv or [""]
    if kind in ("-h", "--help", "help"):
        print(_help(command, kinds))
        return None
    if kind not in kinds:
        near = difflib.get_close_matches(kind, kinds, n=1)
        asked = f"unknown kind {kind!r}" if kind and not kind.startswith("-") else f"{command} needs a kind"
        raise UsageError(f"{asked}; did you mean {near[0]}?" if near else f"{asked}: halfbyte {command} {'|'.join(kinds)}")
    return kind, words


def _help(command: str, kinds: Mapping[str, str]) -> str:
    rows = [f"  {name:<12} {does}" for name, does in kinds.items()]
    last = f"`halfbyte {command} KIND --help` shows a kind's flags; --log-level is in each of them."
    return "\n".join([f"usage: halfbyte {command} KIND [flags]", "", *rows, "", last])
