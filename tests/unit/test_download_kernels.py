"""`halfbyte download-kernels`: which command of FlashInfer it runs, with what, and what it passes on."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from halfbyte.entrypoints import cli
from halfbyte.entrypoints.commands import download_kernels


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """The commands, with their environments; each ends with exit code 3."""
    found: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], env: dict[str, str]) -> Any:
        found.append((command, env))
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(download_kernels, "find_spec", lambda name: object())
    monkeypatch.setattr(download_kernels, "_cuda_version", lambda: "13.0")
    return found


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_flashinfers_own_command_does_it(words: tuple[str, ...], ran: list[tuple[list[str], dict[str, str]]]) -> None:
    assert cli.main(["download-kernels", *words]) == 3, "its exit code is passed on"
    [(command, env)] = ran
    assert command == [sys.executable, "-m", "flashinfer", "download-kernels", *words]
    assert env == {**os.environ, "FLASHINFER_DISABLE_VERSION_CHECK": "1"}


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [
        ("13.0", "download-kernels"),
        ("13.4", "download-kernels"),
        ("12.9", "download-kernels"),
        ("12.8", "install-cubin-wheel"),
        ("11.8", "install-cubin-wheel"),
        ("14.0", "install-cubin-wheel"),
        (None, "download-kernels"),
    ],
)
def test_cuda_without_compiled_kernels_gets_nvidias_alone(cuda: str | None, expected: str) -> None:
    assert download_kernels.command_for(cuda) == expected


def test_without_flashinfer_there_is_nothing_to_do(
    ran: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(download_kernels, "find_spec", lambda name: None)
    assert cli.main(["download-kernels"]) == 0 and not ran
    assert "flashinfer is not installed" in capsys.readouterr().out
