"""Where the answers of a batch go: a file that is there once it is whole, or a pipe that gets them as they come.

Until then answers lie in a file beside it, NAME.part, in the order of the requests. Each has an id that says which line of which
input it answers, so that a run that was killed is taken up behind its last whole line, and nothing is added to answers of
something else. Must not know how lines are answered. Called by the run-batch command.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec

from halfbyte.entrypoints.batch import Answer, Line, LineReader
from halfbyte.errors import HalfbyteError, UserError

STANDARD = "-"
SUFFIX = ".part"


class Kept(NamedTuple):
    """Answers that were there before: how many, and how many of them are errors."""

    num_lines: int = 0
    num_failed: int = 0


class Output(Protocol):
    """What a run needs of the place of its answers. `write` takes one line and hands it to the system before it returns."""

    def begin(self) -> None: ...

    def write(self, data: bytes) -> None: ...

    def sync(self) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class _Body(msgspec.Struct):
    model: Any = None


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Found(msgspec.Struct):
    """The fields of an answer that say what it answers."""

    id: str
    custom_id: Any
    response: _Response | None
    error: Any

    @property
    def model(self) -> Any:
        if self.response is None or self.response.status_code != HTTPStatus.OK:
            return None
        try:
            return msgspec.json.decode(self.response.body, type=_Body).model
        except msgspec.DecodeError:
            return None


class PipeOutput:
    """Standard output, a pipe or a device. Nothing in it can be kept or replaced."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._file: BinaryIO = sys.stdout.buffer

    def begin(self) -> None:
        """A pipe may keep its writer waiting until somebody reads."""
        if self._name != STANDARD:
            with _problem(self._name):
                self._file = open(self._name, "wb", buffering=0)  # noqa: SIM115 - `close` does

    def write(self, data: bytes) -> None:
        with _problem(self._name):
            _write(self._file, data)
            self._file.flush()

    def sync(self) -> None:
        """What is written has left."""

    def finish(self) -> None:
        """The reader sees the end when the process ends."""

    def close(self) -> None:
        if self._file is not sys.stdout.buffer:
            self._file.close()


class FileOutput:
    """NAME, by way of NAME.part, which is this run's alone while it is open. UserError when another run has it.

    overwrite: whatever is there may go. Call `keep`, then `begin`, then `write`, then `finish`; `close` in any case.
    """

    def __init__(self, name: str, overwrite: bool) -> None:
        self._name = name
        self._overwrite = overwrite
        self._path = Path(os.path.realpath(name))
        self.part = self._path.with_name(self._path.name + SUFFIX)
        with _problem(self.part):
            self._file = open(self.part, "a+b", buffering=0)  # noqa: SIM115 - `close` does
        self._identity = os.fstat(self._file.fileno())
        self._size = 0
        if not self._lock():
            self._file.close()
            raise UserError(f"--output-file: another run writes {str(self.part)!r}", param="output_file")

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.stat(self.part), self._identity)  # the run that had it may just have finished it
        except OSError:
            return False

    def keep(self, requests: BinaryIO, reader: LineReader, model: str | None) -> Kept:
        """Find the answers that an earlier run left, and read past their requests.

        model: what is asked where a request names none; None when that is not known. UserError when the answers are those of
        other requests. With `overwrite` there are none.
        """
        if self._overwrite:
            return Kept()
        with _problem(self.part), open(self.part, "rb") as answers:
            kept, self._size = _match(answers, requests, reader, model, self.part.name)
        return kept

    def is_whole(self, requests: BinaryIO, model: str | None) -> Kept | None:
        """What NAME has if it holds the answers to all requests; None if it is not there. UserError if it is anything else."""
        if self._overwrite or not self._path.exists():
            return None
        reader = LineReader()
        with _problem(self._path), open(self._path, "rb") as answers:
            kept, size = _match(answers, requests, reader, model, self._name)
            if size != answers.seek(0, os.SEEK_END):
                raise _foreign(self._name, "its last line is not whole")
        if _next(requests, reader) is not None:
            raise _foreign(self._name, f"the input goes on behind its {kept.num_lines} lines")
        return kept

    def begin(self) -> None:
        """From here on answers are added. What they replace goes now."""
        with _problem(self.part):
            if self._overwrite:
                self._path.unlink(missing_ok=True)
            self._file.truncate(self._size)

    def write(self, data: bytes) -> None:
        with _problem(self.part):
            _write(self._file, data)

    def sync(self) -> None:
        """What is written so far survives the machine's end, too."""
        with _problem(self.part):
            os.fsync(self._file.fileno())

    def finish(self) -> None:
        """All answers are there: the file gets its name."""
        self.sync()
        with _problem(self._path):
            os.replace(self.part, self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def close(self) -> None:
        """An empty NAME.part is not left behind."""
        with contextlib.suppress(OSError):
            left = os.stat(self.part)
            if not left.st_size and os.path.samestat(left, self._identity):
                self.part.unlink()
        self._file.close()


def is_special(name: str) -> bool:
    """Whether it is standard output, a pipe or a device: what cannot be kept in a file beside it."""
    return name == STANDARD or (os.path.exists(name) and not stat.S_ISREG(os.stat(name).st_mode))


def _match(answers: BinaryIO, requests: BinaryIO, reader: LineReader, model: str | None, name: str) -> tuple[Kept, int]:
    """(the whole lines of `answers`, their bytes). `reader` reads their requests, no more. UserError if they are others'."""
    num_lines = num_failed = size = 0
    for data in answers:
        if not data.endswith(b"\n"):  # written when its run was killed
            break
        num_lines += 1
        try:
            found = msgspec.json.decode(data, type=_Found)
        except msgspec.DecodeError:
            raise _foreign(name, f"its line {num_lines} is no answer of a batch") from None
        line = _next(requests, reader)
        if line is None:
            raise _foreign(name, f"it has more lines than the input, whose last is {reader.number}")
        if found.id != line.id:
            same = found.custom_id == line.custom_id
            asked = f"another request of the custom_id {_short(line.custom_id)}" if same else f"{_short(found.custom_id)}"
            raise _foreign(
                name, f"its line {num_lines} answers {asked}, and line {reader.number} of the input is {_short(line.custom_id)}"
            )
        if model is not None and isinstance(line, Line) and not line.model and found.model not in (None, model):
            raise _foreign(
                name, f"its line {num_lines} is an answer of the model {_short(found.model)}, and this one is {model!r}"
            )
        num_failed += found.error is not None
        size += len(data)
    return Kept(num_lines, num_failed), size


def _next(requests: BinaryIO, reader: LineReader) -> Line | Answer | None:
    """The next line that is not blank. UserError when the input cannot be read."""
    while True:
        try:
            text = requests.readline()
        except OSError as error:
            raise UserError(f"--input-file: cannot be read: {error.strerror}", param="input_file") from None
        if not text:
            return None
        if (line := reader.read(text)) is not None:
            return line


def _foreign(name: str, why: str) -> UserError:
    return UserError(
        f"--output-file: {name!r} is there and does not belong to this batch: {why}; --overwrite replaces it", param="output_file"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _write(file: BinaryIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


@contextlib.contextmanager
def _problem(place: str | Path) -> Iterator[None]:
    """An error of the system is one line that names the file. A reader that is gone stays what it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise HalfbyteError(f"--output-file: cannot write {str(place)!r}: {error.strerror}") from None
