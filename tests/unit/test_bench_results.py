"""What a result file says of where it comes from, and the arithmetic of its numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.entrypoints.bench import results
from halfbyte.entrypoints.bench.results import Spread, commit, environment, save, shown_command, summary
from halfbyte.errors import HalfbyteError


def test_summary_is_exact() -> None:
    assert summary([4.0, 1.0, 3.0, 2.0], [0, 50, 99, 99.9, 100]) == {
        "mean": 2.5,
        "median": 2.5,
        "std": pytest.approx(1.25**0.5, rel=1e-15),
        "p0": 1.0,
        "p50": 2.5,
        "p99": pytest.approx(3.97, rel=1e-15),
        "p99.9": pytest.approx(3.997, rel=1e-15),
        "p100": 4.0,
    }
    assert summary([7], [99]) == {"mean": 7.0, "median": 7.0, "std": 0.0, "p99": 7.0}
    assert all(type(number) is float for number in summary([1, 2], [50]).values()), "numbers that JSON can hold"


def test_no_values_have_no_summary() -> None:
    assert summary([], [99]) == {}


def test_spread() -> None:
    spread = Spread.of([3.0, 1.0, 10.0])
    assert (spread.median, spread.min, spread.max) == (3.0, 1.0, 10.0)
    assert str(spread) == "3.00 (from 1.00 to 10.00)"


def test_save(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    save(path, {"a": [1]})
    save(path, {"b": "ü"})
    assert json.loads(path.read_text()) == {"b": "ü"}
    lines = tmp_path / "lines.jsonl"
    save(str(lines), {"a": 1}, append=True)
    save(str(lines), {"b": 2}, append=True)
    assert [json.loads(line) for line in lines.read_text().splitlines()] == [{"a": 1}, {"b": 2}]


def test_save_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(HalfbyteError, match="cannot write .*: Is a directory"):
        save(tmp_path, {})
    path = tmp_path / "out.json"
    with pytest.raises(ValueError, match="not JSON compliant"):
        save(path, {"a": float("nan")})
    assert not path.exists()


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/me/.venv/bin/halfbyte", "bench", "latency", "--hf-token", "secret"])
    facts = [
        ("halfbyte", "1"),
        ("python", "3.12.1 (/home/me/.venv/bin/python)"),
        ("cpu", "a cpu"),
        ("torch", "2.12"),
        ("gpu 0", "x"),
    ]
    found = environment(facts)
    assert found["versions"] == {"halfbyte": "1", "python": "3.12.1", "torch": "2.12"}
    assert found["machine"] == {"cpu": "a cpu", "gpu 0": "x"}
    assert found["command"] == ["halfbyte", "bench", "latency", "--hf-token", "***"]
    assert set(found) == {"date", "commit", "command", "machine", "versions"} and found["date"].endswith("+00:00")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/x/halfbyte/__main__.py", "bench"], ["halfbyte", "bench"]),
        (["benchmarks/compare.py", "spec.json"], ["compare.py", "spec.json"]),
        (["h", "--api-key", "a", "b", "--port", "1"], ["h", "--api-key", "***", "***", "--port", "1"]),
        (["h", "--api_key=a", "x"], ["h", "--api_key=***", "***"]),
        (["h", "--header", "Authorization=Bearer a"], ["h", "--header", "***"]),
        (["h", "--model=m", "a=b"], ["h", "--model=m", "a=b"]),
    ],
)
def test_commands_are_shown_without_secrets_and_folders(words: list[str], shown: list[str]) -> None:
    assert shown_command(words) == shown


def test_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit(tmp_path) is None, "no checkout"
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    git("tag", "-a", "v1", "-m", "a tag does not take the commit's place")
    assert commit(tmp_path) == git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path) == git("rev-parse", "--short=12", "HEAD") + "-dirty"
    (tmp_path / "folder").mkdir()
    assert commit(tmp_path / "folder") is None, "an installed copy inside somebody's repository"


def test_commit_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert results.commit(tmp_path) is None
