"""Adapters as users name them: `--lora-modules` and the routes that load one while the server runs.

A name is a label for the wire, a path a folder of this machine; both are checked here before anything looks at files. Imports no
torch and touches no file. Called by `resolve`, the routes and `LLM`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import msgspec

from halfbyte.errors import UserError

MAX_NAME_CHARS = 128
MAX_PATH_CHARS = 4096
_NOT_IN_NAMES = frozenset("/\\")


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter to be loaded at start. base_model_name: what /v1/models calls its parent; None: the model's served name."""

    name: str
    path: str
    base_model_name: str | None = None


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Which adapter an `LLM` uses for a prompt, with vLLM's names. lora_int_id: a positive number of the caller's own; what tells
    adapters apart is the name. load_inplace: read the folder again, and let the name stand for what is there now."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False

    def __post_init__(self) -> None:
        check_adapter_name(self.lora_name, "lora_name")
        check_adapter_path(self.lora_path, "lora_path")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise UserError(f"lora_int_id must be an integer above 0, got {self.lora_int_id!r}", param="lora_int_id")


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that the engine holds. adapter_id: a positive number that only this load of it ever has."""

    name: str
    path: str
    adapter_id: int
    base_model_name: str | None = None


def check_adapter_name(name: object, param: str) -> str:
    """The name, if it can be one. UserError names `param`."""
    if isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name == name.strip() and _is_label(name):
        return name
    raise UserError(
        f"{param} must be 1 to {MAX_NAME_CHARS} printable characters without slashes, got {_shown(name)}", param=param
    )


def check_adapter_path(path: object, param: str) -> str:
    """The path, if it can be that of a folder. UserError names `param`."""
    if not isinstance(path, str) or not path.strip() or "\0" in path or len(path) > MAX_PATH_CHARS:
        raise UserError(f"{param} must be the path of a folder, got {_shown(path)}", param=param)
    if ".." in PurePath(path).parts:
        raise UserError(f"{param} must not contain '..', got {_shown(path)}", param=param)
    return path


def parse_lora_module(given: object) -> LoraModule:
    """One of `--lora-modules`: NAME=PATH, or an object with name, path and base_model_name, as JSON or as it is."""
    param = "lora_modules"
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise UserError(f"--lora-modules: {given!r} is not JSON; write NAME=PATH", param=param) from None
    if isinstance(given, str):
        name, equals, path = given.partition("=")
        values: Mapping[Any, Any] = {"name": name, "path": path} if equals else {}
    else:
        values = given if isinstance(given, Mapping) else {}
    unknown = set(values) - {"name", "path", "base_model_name"}
    if unknown or not {"name", "path"} <= set(values):
        form = '{"name": ..., "path": ..., "base_model_name": ...}'
        raise UserError(f"--lora-modules takes NAME=PATH or {form}, got {given!r}", param=param)
    base = values.get("base_model_name")
    if base is not None and (not isinstance(base, str) or not base):
        raise UserError(f"--lora-modules: base_model_name must be a text, got {base!r}", param=param)
    name, path = values["name"], values["path"]
    return LoraModule(check_adapter_name(name, param), check_adapter_path(path, param), base)


def _is_label(name: str) -> bool:
    return name.isprintable() and name not in (".", "..") and not _NOT_IN_NAMES.intersection(name)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
