"""`halfbyte run-batch -i IN -o OUT`: the server's POST routes, called by the lines of a file instead of by clients.

Knows the flags, the two files and the terminal. The application is the one that `serve` builds, called without a socket, so
that limits, errors and answers are the server's. What a line is, and in which order lines are answered, is
`halfbyte.entrypoints.batch`'s. docs/serve.md describes the format.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from halfbyte.config import EngineOptions, ServerConfig
from halfbyte.entrypoints.batch import Answer, Batch, FileLines, Line, answered
from halfbyte.entrypoints.bench.shared_flags import count_flag
from halfbyte.entrypoints.flag_table import ENGINE_FLAGS, LOG_LEVEL, REFUSED_FLAGS, SERVER_FLAGS, engine_options, server_config
from halfbyte.entrypoints.flags import Flag, UsageError, parse
from halfbyte.errors import EngineDeadError, HalfbyteError, UserError
from halfbyte.log import note

if TYPE_CHECKING:
    import httpx
    from fastapi import FastAPI

    from halfbyte.engine.async_engine import AsyncEngine
    from halfbyte.engine.client import EngineClient
    from halfbyte.engine.front import Front

STANDARD = "-"
LEAST_OPEN_LINES = 32

# What of the server's flags means something without a socket: the group HTTP does not, but for these.
_KEPT = frozenset({"served_model_names", "max_body_bytes", "enable_log_requests", "disable_log_stats"})
_NO_SOCKET = "nothing listens here; leave it out"
_NO_STREAMS = "answers are not streamed here; leave it out"
_NO_QUEUE_LIMIT = "lines wait for their turn; --max-concurrent-lines says how many are open at once"
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
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"--output-file: {name!r} cannot be written", param="output_file")


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
    Flag(name="overwrite", help="replace an output file that exists (default: off)", kind="switch"),
    count_flag("max-concurrent-lines", "lines that are open at once", f"twice --max-num-seqs, at least {LEAST_OPEN_LINES}"),
    LOG_LEVEL,
    *(flag for flag in ENGINE_FLAGS if flag.target not in _QUEUE_LIMITS),
    *(flag for flag in SERVER_FLAGS if _without_socket(flag)),
)

REFUSED: Mapping[str, str] = {
    **REFUSED_FLAGS,
    **{f"--{flag.name}": _NO_SOCKET for flag in SERVER_FLAGS if not _without_socket(flag)},
    **{f"--{flag.name}": _NO_QUEUE_LIMIT for flag in ENGINE_FLAGS if flag.target in _QUEUE_LIMITS},
    "--enable-force-include-usage": _NO_STREAMS,
    "--output-tmp-dir": "answers are written to --output-file itself",
    "--enable-metrics": _NO_SOCKET,
    "--url": _NO_SOCKET,
}


@dataclass(frozen=True, slots=True)
class Job:
    """What the command's own flags say. max_open_lines: None is twice what the engine runs at once."""

    source: str
    target: str
    overwrite: bool
    max_open_lines: int | None


def run(argv: Sequence[str]) -> int:
    parsed = parse("run-batch", "Answer the requests of a file, OpenAI's batch format.", FLAGS, argv, REFUSED)
    given = parsed.command
    if "input_file" not in given or "output_file" not in given:
        raise UsageError("run-batch needs two files: halfbyte run-batch -i requests.jsonl -o answers.jsonl")
    job = Job(given["input_file"], given["output_file"], given.get("overwrite", False), given.get("max_concurrent_lines"))
    options, server = engine_options(parsed), server_config(parsed, {})  # a server's keys are no matter of this one
    _check_target(job)
    return run_job(job, options, server)


def run_job(job: Job, options: EngineOptions, server: ServerConfig) -> int:
    """Start the engine, answer the file, stop. Returns 0, also when lines failed; EngineDeadError when the engine did."""
    import uvloop

    from halfbyte.entrypoints.launch import interrupt_on_sigterm, start_engine

    interrupt_on_sigterm()
    if options.max_num_mixed_tokens is None:  # nobody waits for a token, all for the whole
        options = replace(options, max_num_mixed_tokens=0)
    file = _open_input(job.source)
    client, front, server = start_engine(options, server)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_serve_file(job, file, client, front, options.seed, server))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _serve_file(
    job: Job, file: BinaryIO, client: EngineClient, front: Front, seed: int | None, server: ServerConfig
) -> int:
    from halfbyte.entrypoints.launch import make_engine, model_temperatures
    from halfbyte.entrypoints.server import build_app

    engine = make_engine(client, front, seed, server)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # an answer is not cut in the middle
    try:
        with _open_output(job) as write:
            app = build_app(engine, server, model_temperatures(front, server))
            await answer_file(engine, app, file, write, job.max_open_lines)
        return 0
    finally:
        await engine.close()


async def answer_file(
    engine: AsyncEngine, app: FastAPI, file: BinaryIO, write: Callable[[bytes], None], max_open_lines: int | None = None
) -> None:
    """Call the routes of `app` with each line of `file`; `write` gets the answers. Says at the end how many there were.

    EngineDeadError when the engine ends before the file does: what was written until then are whole lines.
    """
    import httpx

    started_s = time.monotonic()
    texts = FileLines(file)
    watch = asyncio.create_task(_end_with(engine, texts))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None, trust_env=False) as http:
        routes = Routes(engine, http)
        batch = Batch(routes.answer, write, max_open_lines or max(LEAST_OPEN_LINES, 2 * engine.info.max_num_seqs))
        try:
            await batch.run(texts)
            if engine.dead is not None and not texts.finished:
                raise EngineDeadError(engine.dead)
        except EngineDeadError as error:
            raise EngineDeadError(f"{error}; written until then: {_lines(batch.num_written)}") from None
        except asyncio.CancelledError:
            note(f"interrupted; written until then: {_lines(batch.num_written)}")
            raise
        finally:
            watch.cancel()
            texts.end()
    note(f"{_lines(batch.num_written)} in {time.monotonic() - started_s:.1f} s, {batch.num_failed} failed")


class Routes:
    """The application's routes as lines call them."""

    def __init__(self, engine: AsyncEngine, http: httpx.AsyncClient) -> None:
        self._engine = engine
        self._http = http

    async def answer(self, line: Line) -> Answer:
        """The route's answer, or its error. EngineDeadError when there is no answer because the engine is gone."""
        request_id = uuid.uuid4().hex
        headers = {"content-type": "application/json", "x-request-id": request_id}
        response = await self._http.post(line.url, content=line.body, headers=headers)
        if response.is_server_error and self._engine.dead is not None:
            raise EngineDeadError(self._engine.dead)
        return answered(line, request_id, response.status_code, response.content)


async def _end_with(engine: AsyncEngine, texts: FileLines) -> None:
    """Read no further when the engine is gone, also while a pipe keeps the reader waiting."""
    await engine.died.wait()
    texts.end()


def _lines(number: int) -> str:
    return f"{number} line{'' if number == 1 else 's'}"


def _check_target(job: Job) -> None:
    """UserError when the output would replace what somebody wants to keep."""
    path = Path(job.target)
    if job.target == STANDARD or not path.is_file():
        return
    if job.source != STANDARD and os.path.samefile(job.source, path):
        raise UserError(f"--output-file: {job.target!r} is the input", param="output_file")
    if not job.overwrite:
        raise UserError(f"--output-file: {job.target!r} exists; --overwrite replaces it", param="output_file")


def _open_input(name: str) -> BinaryIO:
    try:
        # not sys.stdin's own object: a thread that waits in it must not keep the interpreter from closing it
        return open(0, "rb", closefd=False) if name == STANDARD else open(name, "rb")
    except OSError as error:
        raise UserError(f"--input-file: cannot read {name!r}: {error.strerror}", param="input_file") from None


@contextlib.contextmanager
def _open_output(job: Job) -> Iterator[Callable[[bytes], None]]:
    """A function that writes a line and flushes it. HalfbyteError when the file cannot be written."""

    def problem(error: OSError) -> HalfbyteError:
        return HalfbyteError(f"--output-file: cannot write {job.target!r}: {error.strerror}")

    def write(data: bytes) -> None:
        try:
            left = memoryview(data)
            while left:
                left = left[out.write(left) :]
            out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise problem(error) from None

    with contextlib.ExitStack() as opened:
        out: BinaryIO = sys.stdout.buffer
        if job.target != STANDARD:
            replaces = job.overwrite or _is_special(Path(job.target))
            try:
                out = opened.enter_context(open(job.target, "wb" if replaces else "xb", buffering=0))
            except OSError as error:
                raise problem(error) from None
        yield write


def _is_special(path: Path) -> bool:
    """Whether it is a pipe or a device: nothing in it could be replaced."""
    return path.exists() and not path.is_file()
