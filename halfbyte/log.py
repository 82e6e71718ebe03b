"""Log lines and start-up phases: one event is one line on standard error.

Text of clients may be part of a message: control characters are escaped, so that nobody can forge a line. Called once per
process by `halfbyte.entrypoints.cli` and `halfbyte.engine.process`; modules take `logging.getLogger(__name__)`. Configures
the "halfbyte" logger only: the logging of a program that imports Halfbyte is its own.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")

# what could end a line or drive a terminal: C0, DEL, C1 and Unicode's two line separators
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {0x2028: "\\u2028", 0x2029: "\\u2029"}
_CONTROL |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}


class _LineFormatter(logging.Formatter):
    """`2026-11-29 14:50:01.123 INFO engine.core: message`; a traceback follows indented, since it is never a client's text."""

    default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix("halfbyte.")
        line = f"{self.formatTime(record)} {record.levelname} {name}: {one_line(record.getMessage())}"
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line += "".join(f"\n    {one_line(part)}" for part in trace.splitlines())
        return line


def setup_logging(level: str = "info", stream: TextIO | None = None) -> None:
    """Send Halfbyte's log to `stream` (standard error). A second call replaces the first."""
    logger = logging.getLogger("halfbyte")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_LineFormatter())
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


def adopt_logger(name: str) -> None:
    """Print a library's log as part of ours, in our form; its level stays its own."""
    logger = logging.getLogger(name)
    logger.handlers = list(logging.getLogger("halfbyte").handlers)
    logger.propagate = False


def phase(name: str, seconds: float, stream: TextIO | None = None) -> None:
    """Print one start-up phase and its time. People wait for these lines, so they do not go through the log's level."""
    print(f"  {one_line(name):<28} {seconds:7.2f} s", file=stream or sys.stderr, flush=True)


def note(text: str, stream: TextIO | None = None) -> None:
    """Print one line that belongs to the start-up and not to the log."""
    print(one_line(text), file=stream or sys.stderr, flush=True)


def one_line(text: str) -> str:
    """`text` with its control characters escaped."""
    return text.translate(_CONTROL)
