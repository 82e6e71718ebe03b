"""Scales and turns of the KV cache at start: found in the checkpoint or in a file, or made from the shipped texts; then checked.

Knows where calibrations are kept, the tokenizer and the runner. Called while an engine is built, between loading weights and
allocating the cache, and by `halfbyte calibrate`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.config import EngineConfig
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.errors import Refusal, UnsupportedError, UserError
from halfbyte.kvcache.formats import get_format
from halfbyte.kvcache.manager import KVCacheManager
from halfbyte.model_runner.safetensors_files import KV_CALIBRATION_NAME, weight_files
from halfbyte.model_runner.source import ModelFiles
from halfbyte.model_runner.texts import calibration_files, read_text, sample_files
from halfbyte.platform import cache_folder

if TYPE_CHECKING:
    from halfbyte.kvcache.scales import LayerScales
    from halfbyte.kvcache.tensors import LayerParts
    from halfbyte.model_runner.calibration import Calibration, LayerStatistics
    from halfbyte.model_runner.runner import ModelRunner

WINDOW_TOKENS = 1024
MAX_TOKENS = 8192
CHECK_WINDOW_TOKENS = 384
# Mean KL to the model's own dtype per token of held-back text above which a calibrated format is refused.
MAX_CHECK_KL = 0.1
STEP_TOKENS = 256
# Tokens that see little of a text look unlike all others, and are kept in the model's dtype.
_LEFT_OUT_TOKENS = 16
_SAMPLED_PAGES, _PAGE_BYTES = 1024, 4096

log = logging.getLogger(__name__)

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class KVParts:
    """Of each layer, scales and turns. digest: of what the cached numbers depend on beside tokens and weights; empty: nothing."""

    layers: list[LayerParts]
    digest: bytes
    lines: list[str]


def needs_calibration(layer_dtypes: Sequence[str]) -> bool:
    """Whether a layer's format has turns that are fitted to the model."""
    return any("calibrated" in get_format(name).rotations for name in layer_dtypes)


def prepare_parts(
    config: EngineConfig, files: ModelFiles, runner: ModelRunner, tokenizer: Callable[[], Tokenizer], tell: Tell
) -> KVParts:
    """Scales and turns for the formats of `config`. A calibration that is needed and nowhere to be found is made and kept.

    runner: with the model loaded and no cache yet. `tell` hears of each part of the work as it begins.
    """
    names = config.cache.layer_dtypes
    stored, lines = runner.stored_scales
    reads_scales = any(side.codec.uses_scale for name in names for side in get_format(name).sides or ())
    is_calibrated = any(layer.calibrated for layer in stored)
    found = None
    if needs_calibration(names):
        found = _find(config, files, runner) or _make(config, files, runner, tokenizer(), tell)
    elif reads_scales and not is_calibrated:
        found = _find(config, files, runner)
    if config.cache.kv_calibration is not None and found is None:
        why = "the checkpoint has scales of its own" if reads_scales else f"{config.cache.kv_cache_dtype} KV needs none"
        log.warning("--kv-calibration is not used: %s", why)
    lines = list(lines) if reads_scales and (is_calibrated or found is None) else []
    if found is not None:
        lines.append(f"KV calibration: {found.num_tokens:,} tokens, weights {found.fingerprint[:12]}")
    elif any("fp8_e4m3" in name for name in names) and not is_calibrated:
        model = config.model.model
        log.warning("fp8 KV without scales: they are taken as 1, which may cost answers; run `halfbyte calibrate %s` once", model)
    measured = [None] * len(names) if found is None else found.layers
    layers = [_layer_parts(*layer) for layer in zip(names, stored, measured, strict=True)]
    return KVParts(layers, found.digest if found is not None else b"", lines)


def _layer_parts(name: str, stored: LayerScales, statistics: LayerStatistics | None) -> LayerParts:
    """Scales of the checkpoint come before those of a calibration, but for turned keys, of which the checkpoint knows nothing."""
    kv_format = get_format(name)
    if statistics is None or kv_format.sides is None:
        return stored, None
    fitted = statistics.scales(*kv_format.sides)
    if kv_format.rotations[0] != "calibrated":
        return stored if stored.calibrated else fitted, None
    return replace(fitted, v_G=stored.v_G) if stored.calibrated else fitted, statistics.turns()


def calibrate(
    config: EngineConfig, files: ModelFiles, runner: ModelRunner, windows: Sequence[list[int]], tell: Tell
) -> Calibration:
    """Run windows of tokens through the model once, and fit every layer to what it saw."""
    from halfbyte.model_runner.calibration import Calibration, HeadMoments, statistics_of
    from halfbyte.model_runner.head_taps import tap_heads
    from halfbyte.model_runner.scoring import steps

    plain = plain_runner(config, runner, max(map(len, windows)))
    manager = new_manager(plain)
    moments = [HeadMoments(spec) for spec in runner.model.attention_specs()]
    total, done = sum(map(len, windows)), 0
    with tap_heads(runner.model, STEP_TOKENS) as heads:
        for window in windows:
            tell(f"calibrating the KV cache: {100 * done // total}% of {total:,} tokens")
            for start, num_tokens in steps(plain, manager, window, STEP_TOKENS):
                left_out = min(num_tokens, max(0, _LEFT_OUT_TOKENS - start))
                for layer, (q_THD, k_TGD, v_TGD) in zip(moments, heads(num_tokens), strict=True):
                    layer.add(q_THD[left_out:], k_TGD[left_out:], v_TGD[left_out:])
            done += len(window)
    statistics = tuple(statistics_of(layer) for layer in moments)
    return Calibration(statistics, weights_fingerprint(files), moments[0].num_tokens)


def check(config: EngineConfig, runner: ModelRunner, tokenizer: Tokenizer) -> str:
    """Compare the runner's formats with the model's own dtype on held-back text: a line for the log.

    runner: with its parts set; it gets a small cache for the while. UnsupportedError when the KL is above `MAX_CHECK_KL` and
    `kv_check` is "refuse".
    """
    import torch

    from halfbyte.model_runner.scoring import compare, score

    length = min(CHECK_WINDOW_TOKENS, runner.model.config.max_position)
    windows = token_windows(tokenizer, sample_files(), length, CHECK_WINDOW_TOKENS * 4)
    plain = plain_runner(config, runner, length)
    runner.allocate_for(length)
    managers = new_manager(plain), new_manager(runner)
    kl_sum, count = 0.0, 0
    for window in windows:
        # one after the other: the two share the model
        expected = list(score(plain, managers[0], window, STEP_TOKENS))
        for expected_NV, found_NV in zip(expected, score(runner, managers[1], window, STEP_TOKENS), strict=True):
            kl_N = compare(expected_NV, found_NV, torch.zeros(len(found_NV), dtype=torch.int64)).kl_N
            kl_sum, count = kl_sum + float(kl_N.sum()), count + len(kl_N)
    kl, name = kl_sum / count, config.cache.layers_name
    line = f"KV check: {name} against {config.model.dtype}, KL {kl:.4f} per token over {count:,} tokens (limit {MAX_CHECK_KL})"
    if kl <= MAX_CHECK_KL:
        return line
    if config.cache.kv_check == "refuse":
        raise UnsupportedError(Refusal(line, "use --kv-cache-dtype kv6 or fp8, or start anyway with --kv-check warn"))
    log.warning("%s: answers will suffer", line)
    return line


def plain_runner(config: EngineConfig, runner: ModelRunner, num_tokens: int) -> ModelRunner:
    """The same model over a cache in its own dtype, with room for one text of `num_tokens`."""
    dtype = config.model.dtype
    cache = replace(config.cache, kv_cache_dtype=dtype, layer_dtypes=(dtype,) * len(config.cache.layer_dtypes), first_tokens=0)
    plain = type(runner)(replace(config, cache=cache), runner.model, runner.backend)
    plain.allocate_for(num_tokens)
    return plain


def new_manager(runner: ModelRunner) -> KVCacheManager:
    """For the cache that the runner has, without sharing."""
    return KVCacheManager(runner.layout, runner.num_blocks, enable_prefix_caching=False, max_num_batched_tokens=STEP_TOKENS)


def token_windows(tokenizer: Tokenizer, files: Sequence[Path], length: int, max_tokens: int) -> list[list[int]]:
    """Windows of at most `length` tokens, each begun as a prompt is, from all files in turn until there are `max_tokens`."""
    first_ids = tokenizer.encode("")
    texts = [tokenizer.encode(read_text(path), add_special_tokens=False) for path in files]
    step = length - len(first_ids)
    windows = [first_ids + text[start : start + step] for start in range(0, max(map(len, texts)), step) for text in texts]
    kept, total = [], 0
    for window in windows:
        part = window[: max_tokens - total]
        if len(part) > len(first_ids) + _LEFT_OUT_TOKENS:
            kept.append(part)
            total += len(part)
    return kept


def weights_fingerprint(files: ModelFiles) -> str:
    """Of the files that hold the weights: their sizes and evenly spread pages of them, which any training changes."""
    found = hashlib.sha256()
    paths = [files.path] if files.path.is_file() else weight_files(files.path)
    for path in paths:
        size = path.stat().st_size
        found.update(f"{size}\n".encode())
        with path.open("rb") as file:
            for page in range(_SAMPLED_PAGES):
                file.seek(max(0, size - _PAGE_BYTES) * page // _SAMPLED_PAGES)
                found.update(file.read(_PAGE_BYTES))
    return found.hexdigest()


def calibration_paths(files: ModelFiles, fingerprint: str) -> Iterator[Path]:
    """Where a calibration is looked for: beside the model, then in the user's cache folder."""
    yield beside_model(files)
    yield cache_folder() / "kv_calibration" / f"{fingerprint}.safetensors"


def beside_model(files: ModelFiles) -> Path:
    is_file = files.path.is_file()
    return files.path.with_name(f"{files.path.name}.{KV_CALIBRATION_NAME}") if is_file else files.path / KV_CALIBRATION_NAME


def _find(config: EngineConfig, files: ModelFiles, runner: ModelRunner) -> Calibration | None:
    """The file that was named, or one of these weights where such files are kept."""
    from halfbyte.model_runner.calibration import load_calibration

    fingerprint, specs = weights_fingerprint(files), runner.model.attention_specs()
    if config.cache.kv_calibration is not None:
        path = Path(config.cache.kv_calibration)
        found = load_calibration(path, specs)
        if found.fingerprint != fingerprint:
            raise UserError(
                f"--kv-calibration {path} was made for other weights; make one with halfbyte calibrate {config.model.model}",
                param="kv_calibration",
            )
        return found
    for path in calibration_paths(files, fingerprint):
        if path.is_file() and (found := load_calibration(path, specs)).fingerprint == fingerprint:
            return found
    return None


def _make(config: EngineConfig, files: ModelFiles, runner: ModelRunner, tokenizer: Tokenizer, tell: Tell) -> Calibration:
    """Calibrate on the shipped texts, and keep the outcome for the next start."""
    length = min(WINDOW_TOKENS, runner.model.config.max_position)
    found = calibrate(config, files, runner, token_windows(tokenizer, calibration_files(), length, MAX_TOKENS), tell)
    path = list(calibration_paths(files, found.fingerprint))[-1]
    try:
        found.save(path)
    except OSError as error:
        log.warning("the KV calibration cannot be kept in %s (%s): it will be made again at the next start", path, error)
    return found
