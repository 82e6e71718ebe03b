"""One event is one line: nothing that a client sends can add one."""

from __future__ import annotations

import io
import logging
import re

import pytest

from halfbyte.log import adopt_logger, one_line, phase, setup_logging


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def test_a_record_is_one_line(stream: io.StringIO) -> None:
    setup_logging("info", stream)
    logging.getLogger("halfbyte.engine.core").info("id %s", "a\nERROR forged\x1b[2J\r\u2028x\t")
    line = stream.getvalue()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO engine\.core: id .*\n", line)
    assert line.endswith("id a\\nERROR forged\\x1b[2J\\r\\u2028x\\t\n")


def test_level_and_second_setup(stream: io.StringIO) -> None:
    setup_logging("info", stream)
    setup_logging("warning", stream)
    logging.getLogger("halfbyte.x").info("no")
    logging.getLogger("halfbyte.x").warning("yes")
    assert len(stream.getvalue().splitlines()) == 1


def test_traceback_is_indented(stream: io.StringIO) -> None:
    setup_logging("info", stream)
    try:
        raise RuntimeError("first\nsecond")
    except RuntimeError:
        logging.getLogger("halfbyte.x").exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("ERROR x: failed")
    assert rest and all(line.startswith("    ") for line in rest)


def test_other_loggers_are_left_alone(stream: io.StringIO) -> None:
    before = list(logging.getLogger().handlers)
    setup_logging("debug", stream)
    assert logging.getLogger().handlers == before


def test_phase(capsys: pytest.CaptureFixture[str]) -> None:
    phase("load weights", 1.239)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"  load weights +1\.24 s\n", captured.err)


def test_one_line_keeps_text() -> None:
    assert one_line("Größe 漢字 🙂") == "Größe 漢字 🙂"


def test_an_adopted_library_prints_in_our_form(stream: io.StringIO) -> None:
    setup_logging("info", stream)
    adopt_logger("some.library")
    library = logging.getLogger("some.library.access")
    library.setLevel(logging.INFO)
    library.info("GET %s", "/a\nb")
    assert "INFO some.library.access: GET /a\\nb" in stream.getvalue() and stream.getvalue().count("\n") == 1
