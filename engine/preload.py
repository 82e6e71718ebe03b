"""What a start would otherwise make, made ahead: `halfbyte preload` starts the engine once, ends it, and starts it again.

The first start fetches, compiles and calibrates, as any start does; the second one tells what the next takes. Measures attention
kernels before that, when asked to. Knows where things are kept; torch is imported on the way, for measuring alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.config import EngineConfig, EngineOptions
from halfbyte.engine.build import absent_backends, resolve_all
from halfbyte.engine.client import ProcessClient
from halfbyte.engine.front import find_model
from halfbyte.errors import Refusal, UnsupportedError
from halfbyte.model_runner.decoder_config import DecoderConfig, config_from_files
from halfbyte.platform import Platform, cache_folder, detect_platform

if TYPE_CHECKING:
    from halfbyte.kernels.triton.tiles import Table

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where things are kept. num_before, num_made: files that were there, and that came."""

    name: str
    path: Path
    num_before: int
    num_made: int


@dataclass(frozen=True, slots=True)
class Preloaded:
    """model: where it lies. report: the lines of the first start's log. phases: its parts, with their seconds; next_phases: those
    of the start after it."""

    model: Path
    places: list[Place]
    report: list[str]
    phases: list[tuple[str, float]]
    next_phases: list[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Tuned:
    """table: what was measured now. path: of the file that it is kept in."""

    table: Table
    path: Path


def preload(options: EngineOptions, tell: Tell) -> Preloaded:
    """Two starts, as a server makes them. Raises what stops a start: a HalfbyteError with a one-line message."""
    before = {name: (path, _files(path)) for name, path in _places(detect_platform(options.device))}
    files = find_model(options.model, options)
    options = replace(options, model=str(files.path))
    tell("starting the engine")
    phases, report = _start(options)
    places = [Place(name, path, len(found), len(_files(path) - found)) for name, (path, found) in before.items()]
    tell("starting it again, as the next start will")
    next_phases, _ = _start(options)
    return Preloaded(files.path, places, report, phases, next_phases)


def autotune(options: EngineOptions, tell: Tell) -> Tuned:
    """Measure the attention kernels for the model's kinds of layer on this machine's GPU, and keep what is fastest.

    UnsupportedError on a CPU, before anything is fetched or read, and where another back end attends.
    """
    platform = detect_platform(options.device)
    if (refusal := refuse_autotune(platform)) is not None:
        raise UnsupportedError(refusal)
    files = find_model(options.model, options)
    decoder = config_from_files(files, options.hf_overrides or {})
    config = resolve_all(options, files, decoder, platform, absent_backends(platform), streams=True)
    if config.attention_backend != "triton":
        reason = f"--autotune measures the Triton attention kernels, and attention is by {config.attention_backend} here"
        raise UnsupportedError(Refusal(reason, "leave it out, or use --attention-backend triton"))
    return _measure(config, decoder, platform, tell)


def refuse_autotune(platform: Platform) -> Refusal | None:
    if platform.device != "cpu":
        return None
    reason = "--autotune is for GPUs: the CPU kernels are cut by instruction set, and a start takes the best that the machine has"
    return Refusal(reason, "leave it out")


def _measure(config: EngineConfig, decoder: DecoderConfig, platform: Platform, tell: Tell) -> Tuned:
    from halfbyte.kernels.triton.tiles import keep_table
    from halfbyte.model_runner.attention_tiles import measure_layers
    from halfbyte.model_runner.runner import first_tokens

    table = measure_layers(config, decoder, platform, first_tokens(config), tell)
    return Tuned(table, keep_table(table))


def _start(options: EngineOptions) -> tuple[list[tuple[str, float]], list[str]]:
    """The parts of a start with their seconds, and what it says."""
    client = ProcessClient.start(options)
    try:
        return list(client.info.phases), list(client.info.report)
    finally:
        client.close()


def _places(platform: Platform) -> list[tuple[str, Path]]:
    """Where starts on this device keep what they make: Triton and FlashInfer have caches of their own."""
    calibration = ("KV calibration", cache_folder() / "kv_calibration")
    if platform.device == "cpu":
        return [("CPU kernels", cache_folder() / "kernels"), calibration]
    found = [
        calibration,
        ("FlashInfer kernels", Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()), ".cache/flashinfer")),
    ]
    if find_spec("triton") is not None:
        import triton

        found.append(("Triton kernels", Path(triton.knobs.cache.dir)))
    return found


def _files(path: Path) -> frozenset[Path]:
    return frozenset(each for each in path.rglob("*") if each.is_file())
