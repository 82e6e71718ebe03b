"""`halfbyte kv-plan MODEL`: bytes, tokens and requests of each KV format in a given memory, before any weight is read.

Reads the flags, asks `kv_plan.plan` for each format and prints a table or JSON, and draws a picture. docs/kv_plan.md describes
what it prints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from halfbyte.config import EngineConfig
from halfbyte.engine.front import find_model
from halfbyte.entrypoints.flag_table import ENGINE_FLAGS, LOG_LEVEL, engine_options
from halfbyte.entrypoints.flags import Flag, UsageError, parse
from halfbyte.entrypoints.kv_plan.plan import Question, Roofline, auto_format, longest_context, plan_format, resolved
from halfbyte.entrypoints.kv_plan.report import Report, as_lines, as_object
from halfbyte.entrypoints.kv_plan.units import parse_bytes, parse_bytes_per_s
from halfbyte.entrypoints.kv_plan.weights import StepWeights, step_weights
from halfbyte.errors import HalfbyteError, UserError
from halfbyte.kvcache.formats import FORMATS
from halfbyte.model_runner.decoder_config import DecoderConfig, config_from_files
from halfbyte.platform import PLATFORM_NAMES, Platform, detect_platform, platform_named
from halfbyte.resolve import DTYPE_ALIASES

# The engine's flags that a plan depends on.
_ENGINE_FIELDS = frozenset(
    {"model", "revision", "hf_token", "download_dir", "hf_overrides", "dtype", "max_model_len", "block_size"}
    | {"max_num_batched_tokens", "attention_backend", "kv_cache_dtype_skip_layers", "kv_cache_first_tokens"}
)


def _amount(name: str, read: Callable[[str], int]) -> Callable[[str], None]:
    """The check of a flag that `read` understands."""

    def check(text: str) -> None:
        try:
            read(text)
        except ValueError as error:
            raise UserError(f"--{name}: {error}", param=name) from None

    return check


def _count(name: str) -> Callable[[int], None]:
    def check(count: int) -> None:
        if count < 1:
            raise UserError(f"--{name} must be at least 1, got {count}", param=name)

    return check


FLAGS = (
    Flag(
        name="model",
        help="catalogue name, .gguf file, folder (its config.json is enough) or hub id",
        positional=True,
        owner="engine",
    ),
    Flag(name="kv-cache-dtype", help="formats to plan: names, auto, k:NAME,v:NAME for pairs (default: all)", kind="texts"),
    Flag(name="memory", help="of the KV cache, such as 40GiB (default: none, bytes alone)", check=_amount("memory", parse_bytes)),
    Flag(name="platform", help="where the model is to run (default: this machine)", choices=lambda: PLATFORM_NAMES),
    Flag(
        name="bandwidth",
        help="of the memory, such as 3.35TB/s: adds the most tokens/s that it allows",
        check=_amount("bandwidth", parse_bytes_per_s),
    ),
    Flag(name="measure", help="measure the bandwidth of this machine's CPU instead", kind="switch"),
    Flag(name="batch", help="requests that decode at once, for tokens/s (default: 1)", kind="size", check=_count("batch")),
    Flag(name="context", help="tokens of each, for tokens/s (default: --max-model-len)", kind="size", check=_count("context")),
    Flag(name="json", help="as JSON", kind="switch"),
    Flag(name="plot", help="draw a bar per format into this file, such as plan.png or plan.svg"),
    LOG_LEVEL,
    *(flag for flag in ENGINE_FLAGS if flag.target in _ENGINE_FIELDS),
)


def run(argv: Sequence[str]) -> int:
    parsed = parse("kv-plan", "Show what each KV format makes of a given memory, from the configuration alone.", FLAGS, argv)
    given, options = parsed.command, engine_options(parsed)
    picture = Path(given["plot"]) if "plot" in given else None
    if picture is not None:
        from halfbyte.entrypoints.kv_plan.picture import check_path

        check_path(picture)
    platform = platform_named(given["platform"]) if "platform" in given else detect_platform()
    files = find_model(options.model, options)
    decoder = config_from_files(files, options.hf_overrides or {})
    config = resolved(options, files, decoder, platform)
    weights = step_weights(files, decoder)
    memory_bytes = parse_bytes(given["memory"]) if "memory" in given else None
    roofline = _roofline(given, config, decoder, platform, weights)
    question = Question(options, files, decoder, platform, config, memory_bytes, roofline)
    rows = [plan_format(name, question) for name in _names(given, question)]
    report = Report(options.model, question, weights, rows)
    print(json.dumps(as_object(report), indent=2) if given.get("json") else "\n".join(as_lines(report)))
    if picture is not None:
        from halfbyte.entrypoints.kv_plan.picture import draw

        draw(report.plans, f"{Path(options.model).name}, {decoder.architecture}, on {platform.architecture}", picture)
    return 0


def _names(given: Mapping[str, Any], question: Question) -> list[str]:
    """The formats that were asked for, each once; `auto` is the one that it stands for."""
    asked = [DTYPE_ALIASES.get(name, name) for name in given.get("kv_cache_dtype", FORMATS)]
    return list(dict.fromkeys(auto_format(question)[0] if name == "auto" else name for name in asked))


def _roofline(
    given: Mapping[str, Any], config: EngineConfig, decoder: DecoderConfig, platform: Platform, weights: StepWeights
) -> Roofline | None:
    """What --bandwidth, --measure, --batch and --context ask for together."""
    if "bandwidth" in given and given.get("measure"):
        raise UsageError("--bandwidth says what --measure would find out: give one of them")
    if given.get("measure"):
        bytes_per_s = _measured(given, platform)
    elif "bandwidth" in given:
        bytes_per_s = float(parse_bytes_per_s(given["bandwidth"]))
    elif unused := [name for name in ("batch", "context") if name in given]:
        raise UsageError(f"--{unused[0]} is for tokens/s, which need --bandwidth or --measure")
    else:
        return None
    longest = longest_context(config, decoder)
    context = given.get("context", longest)
    if context > longest:
        raise UserError(f"--context {context} is more than the {longest} tokens of the longest request", param="context")
    return Roofline(bytes_per_s, weights.num_bytes, given.get("batch", 1), context)


def _measured(given: Mapping[str, Any], platform: Platform) -> float:
    """Bytes per second that this machine's threads read together."""
    if platform.device != "cpu" or "platform" in given:
        raise UsageError("--measure is for the CPU of this machine: leave --platform out, or use --bandwidth")
    from halfbyte.kernels.cpu.library import KernelsMissing
    from halfbyte.kernels.cpu.limits import measure

    try:
        return float(measure(platform.num_threads)["read_bytes_per_s"])
    except KernelsMissing as missing:
        raise HalfbyteError(f"--measure needs the compiled CPU kernels: {missing}; use --bandwidth") from None
