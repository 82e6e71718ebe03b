"""A batch that is killed and run again: 1,000 lines, many of them wrong, end as if nothing had happened.

The engine is a script that answers the newest request first; the application, the files and the signals are real.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halfbyte.entrypoints import cli, launch
from halfbyte.entrypoints.batch_output import FileOutput
from tests.unit.batch_files import line, written
from tests.unit.held_engine import LastFirstClient, byte_tokenizer, stand_in

ROOT = Path(__file__).resolve().parents[2]
NUM_LINES = 1000
MODEL = ["--model", "scripted"]


def good(number: int, **changes: Any) -> bytes:
    return line(f"line-{number}", body={"prompt": [number % 256, number // 256, 7], "max_tokens": 1} | changes)


# what may be wrong with line `number`, and what is said of it: (status or None, a part of the message)
WRONG: list[tuple[Any, int | None, str]] = [
    (lambda number: b"not JSON\n", None, "is not a JSON object"),
    (lambda number: b"\xff\xfe{\x00}\x00\n", None, "is not a JSON object"),
    (lambda number: line(f"line-{number}", url=None), None, "url must be one of"),
    (lambda number: line(f"line-{number}", url="/v1/nothing"), None, "url must be one of"),
    (lambda number: line(None), None, "needs a custom_id"),
    (lambda number: line("line-1"), None, "repeats the custom_id 'line-1'"),
    (lambda number: line(f"line-{number}", body=None), None, "needs a body"),
    (lambda number: good(number, stream=True), None, "answers are not streamed here"),
    (lambda number: line(f"line-{number}", body=[1]), 400, "must be a JSON object"),
    (lambda number: good(number, temperature=9), 400, "temperature"),
    (lambda number: good(number, prompt=[1] * 65), 400, "max_model_len=64"),
    (lambda number: good(number, model="other"), 404, "does not exist"),
]


def batch(num_lines: int) -> tuple[bytes, list[tuple[int | None, str]]]:
    """The input, and what its lines that are not blank come to."""
    texts, expected = [b"\xef\xbb\xbf" + good(1)], [(200, "")]
    for number in range(2, num_lines + 1):
        if number % 10 == 5:
            texts.append((b"\n", b"  \r\n")[number // 10 % 2])
            continue
        if number % 10 == 7:
            make, status, said = WRONG[number // 10 % len(WRONG)]
            texts.append(make(number))
            expected.append((status, said))
            continue
        texts.append(good(number).replace(b"\n", b"\r\n") if number % 3 == 0 else good(number))
        expected.append((200, ""))
    return b"".join(texts).rstrip(b"\r\n"), expected


INPUT, EXPECTED = batch(NUM_LINES)


def without_times(answers: bytes) -> bytes:
    return re.sub(rb'"created":\d+', b'"created":0', answers)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options and the client of each engine that was started."""
    found: list[Any] = []
    tokenizer = byte_tokenizer()
    stand_in(monkeypatch.setattr, tokenizer, lambda: LastFirstClient(len(tokenizer)), found)
    monkeypatch.setattr(launch, "interrupt_on_sigterm", lambda: None)
    monkeypatch.setattr(cli, "setup_logging", lambda level: None)
    return found


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The input, the output, and the output on its way."""
    (tmp_path / "in.jsonl").write_bytes(INPUT)
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"


def command(source: Path, target: Path, *flags: str) -> list[str]:
    return ["run-batch", "-i", str(source), "-o", str(target), *MODEL, *flags]


def uninterrupted(files: tuple[Path, Path, Path]) -> bytes:
    source, target, _ = files
    assert cli.main(command(source, target)) == 0
    answers = target.read_bytes()
    target.unlink()
    return answers


def test_every_line_is_answered_or_named(started: list[Any], files: tuple[Path, Path, Path]) -> None:
    answers = written(uninterrupted(files))
    numbers = [number for number, text in enumerate(INPUT.split(b"\n"), 1) if text.strip()]
    assert len(answers) == len(EXPECTED) == len(numbers) == NUM_LINES - NUM_LINES // 10
    assert len({answer["id"] for answer in answers}) == len(answers)
    for number, answer, (status, said) in zip(numbers, answers, EXPECTED, strict=True):
        assert (answer["response"] or {}).get("status_code") == status, (number, answer)
        if status == 200:
            assert (answer["custom_id"], answer["error"]) == (f"line-{number}", None)
            assert answer["response"]["body"]["choices"][0]["text"] == byte_tokenizer().decode([number // 256])
        else:
            assert said in answer["error"]["message"]
        if status is None:
            assert answer["error"]["message"].startswith(f"line {number}")


def test_killed_and_run_again(files: tuple[Path, Path, Path], started: list[Any]) -> None:
    """Ends at random places, by every signal; then the same command once more."""
    source, target, part = files
    whole = uninterrupted(files)
    draw, num_before = random.Random(7), 0
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        words = [sys.executable, "-m", "tests.unit.held_engine", str(int(number)), str(draw.randrange(60, 250))]
        done = subprocess.run(
            [*words, *command(source, target)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=False,
            timeout=60,
        )
        is_kill = number == signal.SIGKILL
        assert done.returncode == (-signal.SIGKILL if is_kill else 130), done.stderr.decode()
        assert not target.exists()
        num_lines = part.read_bytes().count(b"\n")
        assert num_lines > num_before, "each run gets further"
        num_before = num_lines
        if not is_kill:
            assert f"interrupted; written until then: {num_lines} lines (out.jsonl.part); the same" in done.stderr.decode()
    assert cli.main(command(source, target)) == 0
    assert without_times(target.read_bytes()) == without_times(whole)
    assert not part.exists()


def test_it_goes_on_from_any_byte(files: tuple[Path, Path, Path], started: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """What a kill may leave: some whole lines and a piece of one. No line that is there whole is asked again."""
    source, target, part = files
    text, expected = batch(50)
    source.write_bytes(text)
    whole = uninterrupted(files)
    statuses = [status for status, _ in expected]
    draw = random.Random(3)
    for cut in (1, len(whole) - 1, len(whole), *(draw.randrange(len(whole)) for _ in range(6))):
        started.clear()
        capsys.readouterr()
        part.write_bytes(whole[:cut])
        assert cli.main(command(source, target)) == 0
        assert without_times(target.read_bytes()) == without_times(whole)
        target.unlink()
        kept = whole[:cut].count(b"\n")
        assert started[1].num_added == sum(status == 200 for status in statuses[kept:])
        num_failed = sum(status != 200 for status in statuses)
        said = capsys.readouterr().err
        assert (f"with those from before 45 lines, {num_failed} failed\n" in said) == (kept > 0)


def test_a_whole_output_is_left_alone(
    files: tuple[Path, Path, Path], started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, part = files
    source.write_bytes(batch(50)[0])
    whole = uninterrupted(files)
    target.write_bytes(whole)
    started.clear()
    capsys.readouterr()
    assert cli.main(command(source, target)) == 0
    assert capsys.readouterr().err.startswith(f"{target} has the answers already: 45 lines, 5 failed")
    assert not started and target.read_bytes() == whole and not part.exists()


TWO = good(1) + good(2)
FOREIGN = [
    (
        "other body",
        good(1) + good(2, max_tokens=2),
        "its line 2 answers another request of the custom_id 'line-2', and line 2 of",
    ),
    ("other order", good(2) + good(1), "its line 1 answers 'line-1', and line 1 of the input is 'line-2'"),
    ("blank line", good(1) + b"\n" + good(2), "its line 2 answers another request of the custom_id 'line-2', and line 3 of"),
    ("shorter", good(1), "it has more lines than the input, whose last is 1"),
]


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize(("other", "message"), [case[1:] for case in FOREIGN], ids=[case[0] for case in FOREIGN])
def test_answers_of_another_input_are_refused(
    other: bytes, message: str, is_whole: bool, tmp_path: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, part = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    source.write_bytes(TWO)
    assert cli.main(command(source, target)) == 0
    if not is_whole:
        target.rename(part)
    found = (target if is_whole else part).read_bytes()
    source.write_bytes(other)
    started.clear()
    capsys.readouterr()
    assert cli.main(command(source, target)) == 1
    error = capsys.readouterr().err
    assert "is there and does not belong to this batch: " in error and message in error
    assert error.endswith("; --overwrite replaces it\n") and error.count("\n") == 1
    assert not started and (target if is_whole else part).read_bytes() == found
    assert cli.main(command(source, target, "--overwrite")) == 0
    assert [answer["custom_id"] for answer in written(target.read_bytes())] == [
        json.loads(text)["custom_id"] for text in other.splitlines() if text
    ]
    assert not part.exists()


@pytest.mark.parametrize(
    ("found", "flags", "message"),
    [
        (b"my notes\n", [], "its line 1 is no answer of a batch"),
        (b'{"id": "x"}\n', [], "its line 1 is no answer of a batch"),
        (None, ["--model", "another"], "its line 1 is an answer of the model 'scripted', and this one is 'another'"),
        (None, ["--served-model-name", "mine"], "its line 1 is an answer of the model 'scripted', and this one is 'mine'"),
    ],
)
def test_other_files_and_models_are_refused(
    found: bytes | None, flags: list[str], message: str, tmp_path: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, part = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    source.write_bytes(TWO)
    assert cli.main(command(source, target)) == 0
    target.rename(part)
    if found is not None:
        part.write_bytes(found)
    before = part.read_bytes()
    assert cli.main([*command(source, target), *flags]) == 1
    assert message in capsys.readouterr().err
    assert part.read_bytes() == before and not target.exists()


def test_an_input_that_goes_on_behind_a_whole_output(
    tmp_path: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(TWO)
    assert cli.main(command(source, target)) == 0
    source.write_bytes(TWO + good(3))
    assert cli.main(command(source, target)) == 1
    assert "the input goes on behind its 2 lines; --overwrite" in capsys.readouterr().err
    target.rename(tmp_path / "out.jsonl.part")  # on its way it is what it looks like
    assert cli.main(command(source, target)) == 0
    assert len(written(target.read_bytes())) == 3 and started[-1].num_added == 1


def test_two_runs_do_not_write_one_file(tmp_path: Path, started: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(TWO)
    first = FileOutput(str(target), overwrite=False)
    assert cli.main(command(source, target)) == 1
    assert f"another run writes '{target}.part'" in capsys.readouterr().err and not started
    first.begin()
    first.write(b"{}\n")
    first.finish()
    first.close()
    assert cli.main(command(source, target)) == 1
    assert "its line 1 is no answer of a batch" in capsys.readouterr().err


def test_a_link_stays_one(tmp_path: Path, started: list[Any]) -> None:
    source, target, link = tmp_path / "in.jsonl", tmp_path / "far" / "out.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(TWO)
    target.parent.mkdir()
    link.symlink_to(target)
    assert cli.main(command(source, link)) == 0
    assert link.is_symlink() and len(written(target.read_bytes())) == 2
