"""The `halfbyte` command: picks the command, turns errors into one line and an exit code.

Knows no flags and imports a command only when it runs: `halfbyte --help` must answer at once. Exit codes: 0, 1 (a
HalfbyteError), 2 (the command line is wrong), 130 (Ctrl-C). Called by the console script and `python -m halfbyte`.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from halfbyte import __version__
from halfbyte.entrypoints.flags import UsageError
from halfbyte.errors import HalfbyteError
from halfbyte.log import LEVELS, one_line, setup_logging

# command -> (its module, what it does); the modules have `run(argv) -> exit code`
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("halfbyte.entrypoints.commands.serve", "serve a model over HTTP, OpenAI-compatible"),
    "generate": ("halfbyte.entrypoints.commands.generate", "complete one prompt and print the text"),
    "run-batch": ("halfbyte.entrypoints.commands.run_batch", "answer the requests of a file, OpenAI's batch format"),
    "chat": ("halfbyte.entrypoints.commands.chat", "talk to a running server"),
    "fetch": ("halfbyte.entrypoints.commands.fetch", "download a model of the catalogue and print its path"),
    "preload": ("halfbyte.entrypoints.commands.preload", "make ahead what a start would make, and measure kernels on a GPU"),
    "bench": ("halfbyte.entrypoints.commands.bench", "measure latency, throughput, a server, its start or the kernels"),
    "calibrate": ("halfbyte.entrypoints.commands.calibrate", "measure a model once for low-precision KV caches"),
    "decisions": ("halfbyte.entrypoints.commands.decisions", "fit temperatures of structured decisions to labelled questions"),
    "kv-eval": ("halfbyte.entrypoints.commands.kv_eval", "measure what KV cache formats cost in accuracy"),
    "support": ("halfbyte.entrypoints.commands.support", "what this build supports, on which platforms"),
    "kv-plan": ("halfbyte.entrypoints.commands.kv_plan", "what each KV format makes of a given memory"),
    "kv-tune": ("halfbyte.entrypoints.commands.kv_tune", "find the KV format of each layer that costs the least accuracy"),
    "download-kernels": ("halfbyte.entrypoints.commands.download_kernels", "install FlashInfer's finished kernels"),
    "collect-env": ("halfbyte.entrypoints.commands.collect_env", "what this machine has, for a bug report"),
}

_EXIT_INTERRUPTED = 130


class Command(Protocol):
    """What each module in `commands` is."""

    def run(self, argv: Sequence[str]) -> int:
        """Parse and do; the exit code."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line. Never raises for a HalfbyteError: it becomes one line on standard error."""
    words = list(sys.argv[1:] if argv is None else argv)
    level = _log_level(words)
    setup_logging(level)
    try:
        code = _run(words)
        sys.stdout.flush()  # here a reader that is gone is an error that can be handled; at exit it is not
        return code
    except UsageError as error:
        return _fail(error, level, code=2)
    except HalfbyteError as error:
        return _fail(error, level, code=1)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader of our output is gone (`halfbyte support | head`); standard output must not be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] in ("-v", "--version", "version"):
        print(f"halfbyte {__version__}")
        return 0
    name = words[0].replace("_", "-")
    if name not in COMMANDS:
        near = [] if name.startswith("-") else difflib.get_close_matches(name, COMMANDS, n=1)
        raise UsageError(f"unknown command {words[0]!r}; {f'did you mean {near[0]}?' if near else 'see halfbyte --help'}")
    command = cast(Command, import_module(COMMANDS[name][0]))
    try:
        return command.run(words[1:])
    except SystemExit as stop:  # --help
        return int(stop.code or 0)


def _help() -> str:
    rows = [f"  {name:<16} {does}" for name, (_, does) in COMMANDS.items()]
    return "\n".join(["usage: halfbyte COMMAND [flags]", "", *rows, "", "`halfbyte COMMAND --help` shows a command's flags."])


def _log_level(words: Sequence[str]) -> str:
    """`--log-level` counts before the flags are read, so that it holds for errors in them too."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == "--log-level":
            value = value if equals else "".join(words[index + 1 : index + 2])
            return value if value in LEVELS else "info"
    return "info"


def _fail(error: HalfbyteError, level: str, code: int) -> int:
    if level == "debug":
        import traceback

        traceback.print_exc()
    print(f"halfbyte: error: {one_line(str(error))}", file=sys.stderr)
    return code
