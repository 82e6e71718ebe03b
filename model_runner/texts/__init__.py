"""Texts that ship with the package: some to fit KV formats on, others to judge them by. No text is among both."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent
_CALIBRATION = "calibration_"


def sample_files() -> list[Path]:
    """The texts that judge a format."""
    return sorted(path for path in _FOLDER.glob("*.txt") if not path.name.startswith(_CALIBRATION))


def calibration_files() -> list[Path]:
    """The texts that a format may be fitted on."""
    return sorted(_FOLDER.glob(f"{_CALIBRATION}*.txt"))
