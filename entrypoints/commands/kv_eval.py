"""`halfbyte kv-eval MODEL`: what KV cache formats cost in accuracy, measured through the engine's own cache.

Knows the flags, the terminal and files; `halfbyte.entrypoints.kv_eval` measures. Tables go to standard output and progress to
standard error; with `--pick`, standard output has the name of one format only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from halfbyte.entrypoints.bench.plot import check_path
from halfbyte.entrypoints.bench.results import environment, save
from halfbyte.entrypoints.bench.shared_flags import MODEL, count_flag, range_check
from halfbyte.entrypoints.flag_table import ENGINE_FLAGS, LOG_LEVEL, REFUSED_FLAGS, engine_options
from halfbyte.entrypoints.flags import Flag, UsageError, parse
from halfbyte.entrypoints.kv_eval.plot import draw
from halfbyte.entrypoints.kv_eval.report import document, lines
from halfbyte.entrypoints.kv_eval.settings import TESTS, Settings, Thresholds
from halfbyte.entrypoints.kv_eval.verdict import pick
from halfbyte.errors import UserError
from halfbyte.kvcache.formats import FORMATS
from halfbyte.resolve import DTYPE_ALIASES

_KV_FLAG = next(flag for flag in ENGINE_FLAGS if flag.name == "kv-cache-dtype")
_OTHER_ENGINE_FLAGS = tuple(flag for flag in ENGINE_FLAGS if flag is not _KV_FLAG)
_DEFAULT = Settings()
_LIMITS = Thresholds()
# settings that only one test reads
_OF_TEST = {
    **dict.fromkeys(("text_files", "lengths", "step_tokens", "max_kl", "max_p99_kl", "plot"), "text"),
    **dict.fromkeys(("retrieval_lengths", "num_retrieval_queries", "max_retrieval_loss"), "retrieval"),
    **dict.fromkeys(("num_format_prompts", "max_format_loss"), "format"),
    **dict.fromkeys(("num_gsm8k_questions", "num_gsm8k_shots", "max_gsm8k_loss"), "gsm8k"),
}


def _check_formats(names: Sequence[str]) -> None:
    for name in names:
        _check_format(name)


def _check_format(name: str) -> None:
    if _KV_FLAG.check is not None:
        _KV_FLAG.check(name)


def _check_output(name: str) -> None:
    """Said before the measurement, not after it."""
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--output: {name!r} must be a file in a folder that exists")


def _check_tests(names: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in TESTS]:
        raise UserError(f"--tests: {unknown[0]!r} is not one of {', '.join(TESTS)}")


def _limit(field: str, what: str, high: float) -> Flag:
    name, default = field.replace("_", "-"), getattr(_LIMITS, field)
    text = f"{what} (default: {default:g})"
    return Flag(name=name, help=text, kind="number", check=range_check(name, 0, high), group="thresholds")


def _numbers(name: str, field: str, what: str, least: int) -> Flag:
    def check(words: Sequence[str]) -> None:
        if not all(word.isdecimal() and int(word) >= least for word in words):
            raise UserError(f"--{name} must be integers of at least {least}, got {' '.join(words)}")

    default = " ".join(map(str, getattr(_DEFAULT, field)))
    return Flag(name=name, field=field, help=f"{what} (default: {default})", kind="texts", check=check, group="tests")


def _count(name: str, field: str, what: str, least: int = 1) -> Flag:
    return replace(count_flag(name, what, getattr(_DEFAULT, field), least, group="tests"), field=field)


FLAGS = (
    MODEL,
    replace(
        _KV_FLAG,
        help="KV formats to measure (default: all but the baseline)",
        owner="command",
        kind="texts",
        field="formats",
        check=_check_formats,
    ),
    Flag(name="baseline", help="KV format to compare with; auto is the model's own type (default: auto)", check=_check_format),
    Flag(
        name="tests",
        help="what is measured (default: text retrieval)",
        kind="texts",
        choices=lambda: tuple(TESTS),
        check=_check_tests,
    ),
    Flag(name="text", field="text_files", help="text files to score besides the shipped ones", kind="texts", group="tests"),
    _numbers("length", "lengths", "tokens of the windows cut from each text", 3),
    _count("step-tokens", "step_tokens", "positions that are scored in one step; 1 reads the cache as a decode does"),
    _numbers("retrieval-lengths", "retrieval_lengths", "tokens of the retrieval prompts", 100),
    _count("retrieval-queries", "num_retrieval_queries", "retrieval queries per length"),
    _count("format-prompts", "num_format_prompts", "prompts that ask for JSON or a tool call"),
    Flag(name="gsm8k", field="gsm8k_file", help="JSONL file of problems; adds the gsm8k test", group="tests"),
    _count("gsm8k-questions", "num_gsm8k_questions", "problems of the file that are asked"),
    _count("gsm8k-shots", "num_gsm8k_shots", "problems of the file that are shown solved", least=0),
    _limit("max_kl", "largest mean KL per token that passes", 1e9),
    _limit("max_p99_kl", "largest 99th percentile of the KL", 1e9),
    _limit("max_retrieval_loss", "largest loss of retrieved codes, as a share", 1),
    _limit("max_format_loss", "largest loss of answers in form", 1),
    _limit("max_gsm8k_loss", "largest loss of right gsm8k answers", 1),
    Flag(name="output", help="also write everything to this JSON file", check=_check_output),
    Flag(name="plot", help="draw KL against bits per element into this file"),
    Flag(name="pick", help="print only the name of the densest format that passes; exit code 1 if none does", kind="switch"),
    LOG_LEVEL,
    *_OTHER_ENGINE_FLAGS,
)


def run(argv: Sequence[str]) -> int:
    parsed = parse("kv-eval", "Measure what KV cache formats cost in accuracy.", FLAGS, argv, REFUSED_FLAGS)
    command, options = parsed.command, engine_options(parsed)
    settings = make_settings(command, options.seed)
    formats = _formats(command, settings)
    plot = Path(command["plot"]) if "plot" in command else None
    if plot is not None:
        check_path(plot)
    from halfbyte.entrypoints.kv_eval.evaluate import evaluate

    picks = command.get("pick", False)
    report = evaluate(options, formats, settings, tell=_to(sys.stderr))
    tell = _to(sys.stderr if picks else sys.stdout)
    for line in lines(report):
        tell(line)
    if "output" in command:
        save(command["output"], document(report) | {"environment": environment()})
    if plot is not None:
        draw(report, plot)
    if picks:
        print(pick(report).name, flush=True)
    return 0


def make_settings(command: Mapping[str, Any], seed: int | None) -> Settings:
    """The settings that the flags give; a file of problems asks for its test. UsageError for flags of tests that do not run."""
    given = {field.name: command[field.name] for field in fields(Settings) if field.name in command}
    for name in ("lengths", "retrieval_lengths"):
        if name in given:
            given[name] = tuple(map(int, given[name]))
    if "text_files" in given:
        given["text_files"] = tuple(map(Path, given["text_files"]))
    tests = dict.fromkeys(given.get("tests", _DEFAULT.tests))
    if "gsm8k_file" in given:
        given["gsm8k_file"] = Path(given["gsm8k_file"])
        tests["gsm8k"] = None
    elif "gsm8k" in tests:
        raise UsageError("--tests gsm8k needs a file of problems: give it with --gsm8k FILE")
    for flag in FLAGS:
        test = _OF_TEST.get(flag.target)
        if flag.target in command and test is not None and test not in tests:
            raise UsageError(f"--{flag.name} is for the {test} test: add it to --tests, or leave the flag out")
    limits = {field.name: command[field.name] for field in fields(Thresholds) if field.name in command}
    given |= {"tests": tuple(tests), "thresholds": Thresholds(**limits), "seed": _DEFAULT.seed if seed is None else seed}
    return Settings(**given)


def _formats(command: Mapping[str, Any], settings: Settings) -> list[str]:
    """Those that were named, each once, or all that are not the baseline."""
    named = command.get("formats") or [name for name in FORMATS if name != settings.baseline]
    return list(dict.fromkeys(DTYPE_ALIASES.get(name, name) for name in named))


def _to(stream: Any) -> Callable[[str], None]:
    return lambda line: print(line, file=stream, flush=True)
