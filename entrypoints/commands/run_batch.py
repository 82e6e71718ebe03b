"""`halfbyte run-batch -i IN -o OUT`: the server's POST routes, called by the lines of a file instead of by clients.

Knows the flags, and brings together what they ask for: lines (`halfbyte.entrypoints.batch`), the file of their answers
(`batch_output`), and what answers (`batch_routes`). That is the application which `serve` builds, called without a socket, so
that limits, errors and answers are the server's; or a server that runs already. docs/serve.md describes the format.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

from halfbyte.config import EngineOptions, ServerConfig
from halfbyte.entrypoints.batch import LineReader, lines
from halfbyte.entrypoints.batch_output import STANDARD, SUFFIX, FileOutput, Kept, Output, PipeOutput, is_special
from halfbyte.entrypoints.bench.shared_flags import count_flag
from halfbyte.entrypoints.flag_table import (
    API_KEY_VARIABLES,
    ENGINE_FLAGS,
    LOG_LEVEL,
    REFUSED_FLAGS,
    SERVER_FLAGS,
    engine_options,
    server_config,
)
from halfbyte.entrypoints.flags import Flag, Parsed, UsageError, parse
from halfbyte.errors import HalfbyteError, UserError
from halfbyte.log import note

if TYPE_CHECKING:
    from halfbyte.engine.client import EngineClient
    from halfbyte.engine.front import Front
    from halfbyte.entrypoints.batch_routes import Routes

LEAST_OPEN_LINES = 32
SYNC_S = 1.0

# What of the server's flags means something without a socket: the group HTTP does not, but for these.
_KEPT = frozenset({"served_model_names", "max_body_bytes", "enable_log_requests", "disable_log_stats"})
_NO_SOCKET = "nothing listens here; leave it out"
_NO_STREAMS = "answers are not streamed here; leave it out"
_NO_QUEUE_LIMIT = "lines wait for their turn; --max-concurrent-lines says how many are open at once"
_WITHOUT = " without --overwrite"
_QUEUE_LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")


def _without_socket(flag: Flag) -> bool:
    return flag.target in _KEPT or (flag.group != "HTTP" and flag.target != "enable_force_include_usage")


def _check_place(flag: str, name: str) -> None:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name):
        raise UserError(f"{flag}: {name!r} is an address; name a file, or {STANDARD} for a pipe")
    if not name or Path(name).is_dir():
        raise UserError(f"{flag}: {name!r} must be a file")


def _check_input(name: str) -> None:
    _check_place("--input-file", name)
    if name != STANDARD and not Path(name).exists():
        raise UserError(f"--input-file: there is no {name!r}", param="input_file")


def _check_output(name: str) -> None:
    """Said before the model is loaded, not after it."""
    _check_place("--output-file", name)
    if name == STANDARD:
        return
    path = Path(name)
    if not path.parent.is_dir():
        raise UserError(f"--output-file: {name!r} must be in a folder that exists", param="output_file")
    if not os.access(path if is_special(name) else path.parent, os.W_OK):
        raise UserError(f"--output-file: {name!r} cannot be written", param="output_file")


def _check_url(name: str) -> None:
    try:
        parts = urlsplit(name)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known or not name.isprintable():
        raise UserError(f"--url: {name!r} must be http:// or https:// and a host", param="url")


FLAGS = (
    Flag(
        name="input-file", short="-i", help="file of requests, one JSON object per line; - is standard input", check=_check_input
    ),
    Flag(
        name="output-file",
        short="-o",
        help="file of answers, in the order of the requests; - is standard output",
        check=_check_output,
    ),
    Flag(name="overwrite", help="replace answers that exist, whole or not, and begin anew (default: off)", kind="switch"),
    Flag(
        name="url",
        help="let the server that runs there answer (default: an engine of the command's own)",
        check=_check_url,
    ),
    Flag(name="api-key", help=f"with --url: the server's key (default: {API_KEY_VARIABLES[0]})"),
    count_flag(
        "max-concurrent-lines",
        "lines that are open at once",
        f"twice --max-num-seqs, at least {LEAST_OPEN_LINES}; with --url {LEAST_OPEN_LINES}",
    ),
    LOG_LEVEL,
    *(flag for flag in ENGINE_FLAGS if flag.target not in _QUEUE_LIMITS),
    *(flag for flag in SERVER_FLAGS if _without_socket(flag)),
)

REFUSED: Mapping[str, str] = {
    **REFUSED_FLAGS,
    **{f"--{flag.name}": _NO_SOCKET for flag in SERVER_FLAGS if not _without_socket(flag) and flag.target != "api_keys"},
    **{f"--{flag.name}": _NO_QUEUE_LIMIT for flag in ENGINE_FLAGS if flag.target in _QUEUE_LIMITS},
    "--enable-force-include-usage": _NO_STREAMS,
    "--output-tmp-dir": f"answers that are not whole yet are in --output-file with {SUFFIX} behind its name",
    "--enable-metrics": _NO_SOCKET,
}


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be answered, and into what. reader has read what `kept` answers. max_open_lines: None for the default."""

    file: BinaryIO
    reader: LineReader
    output: Output
    kept: Kept
    max_open_lines: int | None
    hint: str


def run(argv: Sequence[str]) -> int:
    """Returns 0, also when lines failed; HalfbyteError when the engine or the server did."""
    from halfbyte.entrypoints.launch import interrupt_on_sigterm

    parsed = parse("run-batch", "Answer the requests of a file, OpenAI's batch format.", FLAGS, argv, REFUSED)
    given = parsed.command
    if "input_file" not in given or "output_file" not in given:
        raise UsageError("run-batch needs two files: halfbyte run-batch -i requests.jsonl -o answers.jsonl")
    _check_together(parsed)
    options, server = engine_options(parsed), server_config(parsed, {})  # a server's keys are no matter of this one
    source, target = given["input_file"], given["output_file"]
    _check_files(source, target)
    interrupt_on_sigterm()
    model = None if "url" in given else (server.served_model_names or (options.model,))[0]
    with contextlib.closing(_open_output(target, given.get("overwrite", False))) as output:
        file, reader, kept, hint = _open_input(source), LineReader(), Kept(), ""
        if isinstance(output, FileOutput):
            with contextlib.ExitStack() as unread:
                unread.callback(file.close)
                if (whole := output.is_whole(file, model)) is not None:
                    note(f"{target} has the answers already: {lines(whole.num_lines)}, {whole.num_failed} failed")
                    return 0
                kept = output.keep(file, reader, model)
                unread.pop_all()
            hint = f" ({output.part.name}); the same command{_WITHOUT if given.get('overwrite') else ''} goes on behind them"
        if kept.num_lines:
            note(f"going on behind line {reader.number} of the input: {lines(kept.num_lines)} are answered in {target}{SUFFIX}")
        job = Job(file, reader, output, kept, given.get("max_concurrent_lines"), hint)
        if "url" in given:
            return _in_loop(_ask_server(job, given["url"], given.get("api_key")))
        return _start_and_ask(job, options, server)


def _start_and_ask(job: Job, options: EngineOptions, server: ServerConfig) -> int:
    """Start the engine, answer the file, stop."""
    from halfbyte.entrypoints.launch import start_engine

    if options.max_num_mixed_tokens is None:  # nobody waits for a token, all for the whole
        options = replace(options, max_num_mixed_tokens=0)
    client, front, server = start_engine(options, server)
    return _in_loop(_ask_engine(job, client, front, options.seed, server))


def _in_loop(work: Coroutine[Any, Any, None]) -> int:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(work)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    return 0


async def _ask_engine(job: Job, client: EngineClient, front: Front, seed: int | None, server: ServerConfig) -> None:
    from halfbyte.entrypoints.batch_routes import OwnRoutes
    from halfbyte.entrypoints.launch import make_engine, model_temperatures
    from halfbyte.entrypoints.server import build_app

    engine = make_engine(client, front, seed, server)
    try:
        app = build_app(engine, server, model_temperatures(front, server))
        async with OwnRoutes.open(engine, app) as routes:
            await _answer(job, routes, open_lines(job.max_open_lines, engine.info.max_num_seqs))
    finally:
        await engine.close()


async def _ask_server(job: Job, url: str, key: str | None) -> None:
    from halfbyte.entrypoints.batch_routes import ServerRoutes
    from halfbyte.entrypoints.http_client import key_headers

    max_open_lines = open_lines(job.max_open_lines)
    async with ServerRoutes.open(url, key_headers(key), max_open_lines) as routes:
        await _answer(job, routes, max_open_lines)


def open_lines(asked: int | None, max_num_seqs: int = 0) -> int:
    """How many lines are open at once: what was asked, else twice what an engine runs at once."""
    return asked or max(LEAST_OPEN_LINES, 2 * max_num_seqs)


async def _answer(job: Job, routes: Routes, max_open_lines: int) -> None:
    from halfbyte.entrypoints.batch_routes import answer_file

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # an answer is not cut in the middle
    job.output.begin()
    syncing = asyncio.create_task(_keep_synced(job.output))
    try:
        await answer_file(routes, job.file, job.output.write, max_open_lines, reader=job.reader, kept=job.kept, hint=job.hint)
    finally:
        syncing.cancel()
    job.output.finish()


async def _keep_synced(output: Output) -> None:
    """Beside the loop, since a disk may take its time. What goes wrong here is said by the next write, or at the end."""
    with contextlib.suppress(HalfbyteError):
        while True:
            await asyncio.sleep(SYNC_S)
            await asyncio.to_thread(output.sync)


def _check_together(parsed: Parsed) -> None:
    given = parsed.command
    if "url" not in given:
        if "api_key" in given:
            raise UsageError("--api-key is for --url: nothing listens here")
        return
    for flag in FLAGS:
        if flag.target in (parsed.engine if flag.owner == "engine" else parsed.server):
            raise UsageError(f"--{flag.name} is the server's to set where --url lets one answer: leave it out")


def _check_files(source: str, target: str) -> None:
    """UserError when the output, on its way or whole, would replace the input."""
    for name in (target, os.path.realpath(target) + SUFFIX):
        if STANDARD not in (source, target) and os.path.exists(name) and os.path.samefile(source, name):
            raise UserError(f"--output-file: {name!r} is the input", param="output_file")


def _open_input(name: str) -> BinaryIO:
    try:
        # not sys.stdin's own object: a thread that waits in it must not keep the interpreter from closing it
        return open(0, "rb", closefd=False) if name == STANDARD else open(name, "rb")
    except OSError as error:
        raise UserError(f"--input-file: cannot read {name!r}: {error.strerror}", param="input_file") from None


def _open_output(name: str, overwrite: bool) -> Output:
    return PipeOutput(name) if is_special(name) else FileOutput(name, overwrite)
