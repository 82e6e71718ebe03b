"""`halfbyte calibrate MODEL`: measure once what a model's queries, keys and values look like, and keep it beside the model.

Knows the flags, the terminal and where the file goes; `halfbyte.engine.kv_calibration` measures. docs/kv_scales.md says when
this is worth a command, since formats that need a calibration make one by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tqdm import tqdm

from halfbyte.config import EngineOptions
from halfbyte.engine.front import load_front
from halfbyte.engine.kv_calibration import MAX_TOKENS, WINDOW_TOKENS, beside_model, calibrate, calibration_paths, token_windows
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints.bench.shared_flags import MODEL, count_flag
from halfbyte.entrypoints.flag_table import ENGINE_FLAGS, LOG_LEVEL, REFUSED_FLAGS, engine_options
from halfbyte.entrypoints.flags import Flag, parse
from halfbyte.errors import UserError
from halfbyte.model_runner.decoder_config import config_from_files
from halfbyte.model_runner.source import ModelFiles
from halfbyte.model_runner.texts import calibration_files

if TYPE_CHECKING:
    from halfbyte.model_runner.calibration import Calibration
    from halfbyte.model_runner.runner import ModelRunner

# The first tokens of a window are left out, so that a short one teaches little.
MIN_LENGTH = 64

_MODEL_FIELDS = frozenset(flag.target for flag in ENGINE_FLAGS if flag.group == "model") - {"max_model_len", "seed"}


def _check_output(name: str) -> None:
    """Said before the measurement, not after it."""
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--output: {name!r} must be a file in a folder that exists", param="output")


def _check_texts(names: Sequence[str]) -> None:
    if missing := [name for name in names if not Path(name).is_file()]:
        raise UserError(f"--text: {missing[0]!r} is not a file", param="text")


FLAGS = (
    MODEL,
    Flag(
        name="text",
        help="text files like what will be served, UTF-8 (default: the shipped texts)",
        kind="texts",
        check=_check_texts,
    ),
    Flag(name="output", help="file to write (default: beside a model of yours, else in the cache folder)", check=_check_output),
    count_flag("max-tokens", "tokens that are run, of all texts in turn", MAX_TOKENS, MIN_LENGTH),
    count_flag("length", "tokens of the windows that texts are cut into", WINDOW_TOKENS, MIN_LENGTH),
    LOG_LEVEL,
    *(flag for flag in ENGINE_FLAGS if flag.target in _MODEL_FIELDS),
)


def run(argv: Sequence[str]) -> int:
    parsed = parse("calibrate", "Measure a model once for low-precision KV caches.", FLAGS, argv, REFUSED_FLAGS)
    given, options = parsed.command, engine_options(parsed)
    front = load_front(options)
    texts = [Path(name) for name in given["text"]] if "text" in given else calibration_files()
    length = _window_length(given.get("length"), front.files, options)
    windows = _windows(front.tokenizer, texts, length, given.get("max_tokens", MAX_TOKENS))
    found = measure(options, front.files, windows)
    path = _keep(found, [Path(given["output"])] if "output" in given else list(_places(front.files, found.fingerprint)))
    for line in _report(found, path, options.model, is_found="output" not in given):
        print(line)
    return 0


def measure(options: EngineOptions, files: ModelFiles, windows: Sequence[list[int]]) -> Calibration:
    """Load the model, run the windows, and let it go again. A bar shows how far it is, on a terminal."""
    from halfbyte.engine.build import build_engine

    # The cache of the engine itself stays unused: as small and as plain as one can be.
    plain = replace(options, kv_cache_dtype="bfloat16", max_num_seqs=1, max_model_len=max(map(len, windows)))
    core, _ = build_engine(plain)
    try:
        runner = cast("ModelRunner", core.runner)
        sizes = [len(window) for window in windows]
        with tqdm(total=sum(sizes), desc="Calibrating", unit="token", disable=None) as progress:
            finished = iter([0, *sizes])

            def advance(line: str) -> None:
                """Called as each window begins: the one before it is done."""
                progress.update(next(finished))

            found = calibrate(runner.config, files, runner, windows, advance)
            progress.update(sizes[-1])
        return found
    finally:
        core.close()


def _window_length(asked: int | None, files: ModelFiles, options: EngineOptions) -> int:
    """As asked, or the default where the model has as many positions."""
    longest = config_from_files(files, options.hf_overrides or {}).max_position
    if asked is not None and asked > longest:
        raise UserError(f"--length {asked} is more than the {longest} positions of this model", param="length")
    return asked or min(WINDOW_TOKENS, longest)


def _windows(tokenizer: Tokenizer, texts: Sequence[Path], length: int, max_tokens: int) -> list[list[int]]:
    windows = token_windows(tokenizer, texts, length, max_tokens)
    if sum(map(len, windows)) < MIN_LENGTH:
        raise UserError(f"--text: {', '.join(map(str, texts))} have fewer than {MIN_LENGTH} tokens; give more", param="text")
    return windows


def _places(files: ModelFiles, fingerprint: str) -> Iterator[Path]:
    """Where engines look: beside the model if it is the user's own, then in the cache folder."""
    *_, cached = calibration_paths(files, fingerprint)
    if os.path.exists(os.path.expanduser(files.name)):
        yield beside_model(files)
    yield cached


def _keep(found: Calibration, places: Sequence[Path]) -> Path:
    """Write the file to the first place that can be written to."""
    problems = []
    for path in places:
        try:
            found.save(path)
        except OSError as error:
            problems.append(f"{path} ({error.strerror or error})")
        else:
            return path
    raise UserError(f"the calibration cannot be written to {' or '.join(problems)}; name a file with --output", param="output")


def _report(found: Calibration, path: Path, model: str, *, is_found: bool) -> Iterator[str]:
    """is_found: whether engines look there by themselves."""
    import torch

    from halfbyte.kvcache.formats.base import Side
    from halfbyte.kvcache.formats.fp8 import Fp8Codec

    fp8 = Side(Fp8Codec("fp8_e4m3"))
    scales = [layer.scales(fp8, fp8) for layer in found.layers]
    k_LG, v_LG = torch.stack([layer.k_G for layer in scales]), torch.stack([layer.v_G for layer in scales])
    yield f"wrote {path}"
    yield f"measured on {found.num_tokens:,} tokens, {len(found.layers)} layers"
    yield f"fp8 scales: K {k_LG.min():.3g} to {k_LG.max():.3g}, V {v_LG.min():.3g} to {v_LG.max():.3g}"
    place = "" if is_found else f" --kv-calibration {path}"
    yield f"use it: halfbyte serve {model} --kv-cache-dtype fp8{place} (kv4, kv5 and kv6 use it, too)"
