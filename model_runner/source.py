"""Where a model is: a catalogue name, a `.gguf` file, a Hugging Face folder or a hub id becomes files on this machine.

Knows names, folders and the hub's layout; opens nothing but small JSON files. It must not know weights, tokenizers or torch,
and imports the hub client only when a hub id has to be resolved. Called by both processes at start-up, and by the CLI.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from halfbyte.errors import ModelFileError, NotFoundError
from halfbyte.model_runner.catalogue import CATALOGUE, fetch

# Weights as safetensors, configuration as JSON, the tokenizer's files; never pickles, never code.
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja")
# Copies of the same weights in other layouts. Modules of sentence-transformers lie in folders that begin with a number.
_HUB_IGNORED = ("[!0-9]*/*", "*/*/*", "consolidated*")
_HUB_ID = re.compile(r"(?=.{3,96}\Z)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MAX_JSON_BYTES = 64 << 20

# generation_config.json name -> SamplingParams field, and the same for GGUF metadata.
_SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_GGUF_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_INTEGER_FIELDS = ("top_k", "max_tokens")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine. path: the `.gguf` file ("gguf"), or the folder with `config.json` ("hf").

    name: what the user wrote. commit: the hub's commit that was resolved, None for anything else.
    """

    name: str
    kind: Literal["gguf", "hf"]
    path: Path
    commit: str | None = None


def locate(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    hf_token: str | None = None,
    report: Callable[[str], None] | None = None,
) -> ModelFiles:
    """Find `model`, downloading it where its name says so. One line says what was tried when nothing is found.

    revision, hf_token: for hub ids. download_dir: where downloads go instead of the user's caches. report: see `fetch`.
    """
    path = Path(os.path.expanduser(model))
    exists = os.path.exists(path)  # False, not an OSError, for names that no path can have
    if model in CATALOGUE and not exists:
        return ModelFiles(model, "gguf", fetch(model, folder=download_dir, report=report))
    if exists and path.is_dir():
        return _from_folder(model, path)
    if path.suffix.lower() == ".gguf":
        if exists and path.is_file():
            return ModelFiles(model, "gguf", path)
        raise ModelFileError(f"{path} does not exist")
    if exists:
        raise ModelFileError(f"{path} is neither a .gguf file nor a folder with config.json and safetensors")
    if _HUB_ID.fullmatch(model):
        return _from_hub(model, revision, download_dir, hf_token)
    close = get_close_matches(model, CATALOGUE, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise NotFoundError(
        f"no model {model[:200]!r}: it is no catalogue name ({', '.join(CATALOGUE)}), no file or folder here, "
        f"and no hub id (owner/name){hint}",
        param="model",
    )


def _from_folder(name: str, folder: Path, commit: str | None = None) -> ModelFiles:
    """A folder with a configuration is a model; one with a tokenizer alone can still be named as a tokenizer."""
    if (folder / "config.json").is_file() or (folder / "tokenizer.json").is_file():
        return ModelFiles(name, "hf", folder, commit)
    found = sorted(file.name for file in folder.glob("*.gguf"))
    hint = f"; to run a GGUF file, name it: {folder / found[0]}" if found else ""
    raise ModelFileError(f"{folder} has no config.json{hint}")


def _from_hub(name: str, revision: str | None, download_dir: str | Path | None, token: str | None) -> ModelFiles:
    """Download a snapshot. Its folder is one commit, resolved once, however many files it has."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{name}@{revision}" if revision else name
    try:
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=download_dir,
                token=token,
                allow_patterns=list(HUB_PATTERNS),
                ignore_patterns=list(_HUB_IGNORED),
            )
        )
    except GatedRepoError:
        reason = "its owner grants access on request: accept the terms on its page and pass --hf-token"
    except RepositoryNotFoundError:
        reason = "the hub knows no such public model; a private one needs --hf-token, a local one a path that exists"
    except RevisionNotFoundError:
        reason = "the hub has the model, but not this revision"
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        reason = "the hub cannot be reached and the model is not in the local cache"
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = _first_line(error)
    else:
        return _from_folder(name, folder, folder.name)
    raise ModelFileError(f"cannot get {at}: {reason}")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model's folder. ModelFileError in one line when there is none."""
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise ModelFileError(f"{path} has {size} bytes, at most {_MAX_JSON_BYTES} are allowed")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON: {_first_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """`read_json`, or {} when the file does not exist."""
    return read_json(path) if path.is_file() else {}


def generation_defaults(files: ModelFiles, other: Path | None = None) -> dict[str, Any]:
    """The SamplingParams fields that the model's authors recommend; {} when the model says nothing.

    Folders say it in `generation_config.json` (max_new_tokens becomes max_tokens), GGUF files in `general.sampling.*`.
    other: a file of that form, or the folder that holds one, which counts instead and must exist.
    """
    if other is not None:
        path = other / "generation_config.json" if other.is_dir() else other
        return _sampling_fields(path, read_json(path), _SAMPLING_KEYS)
    if files.kind == "gguf":
        from halfbyte.model_runner.gguf import GGUFFile

        with GGUFFile(files.path) as gguf:
            return _sampling_fields(files.path, gguf.metadata, _GGUF_SAMPLING_KEYS)
    path = files.path / "generation_config.json"
    return _sampling_fields(path, read_optional_json(path), _SAMPLING_KEYS)


def _sampling_fields(path: Path, values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, field in names.items():
        value = values.get(name)
        if value is None:
            continue
        integer = field in _INTEGER_FIELDS
        if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)) or not math.isfinite(value):
            raise ModelFileError(f"{path}: {name} must be {'an integer' if integer else 'a number'}, got {value!r}")
        fields[field] = value if integer else float(value)
    return fields


def token_id_list(value: Any) -> tuple[int, ...]:
    """`eos_token_id` as configurations spell it (absent, one id, a list) as a tuple of ids."""
    ids = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0))
