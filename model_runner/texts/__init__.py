"""Texts that ship with the package: some to fit KV formats on, others to judge them by. No text is among both."""

from __future__ import annotations

from pathlib import Path

from halfbyte.errors import UserError

_FOLDER = Path(__file__).parent
_CALIBRATION = "calibration_"


def sample_files() -> list[Path]:
    """The texts that judge a format."""
    return sorted(path for path in _FOLDER.glob("*.txt") if not path.name.startswith(_CALIBRATION))


def calibration_files() -> list[Path]:
    """The texts that a format may be fitted on."""
    return sorted(_FOLDER.glob(f"{_CALIBRATION}*.txt"))


def read_text(path: Path) -> str:
    """A text of ours or of the user's. UserError when it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read the text {path}: {reason}", param="text") from None
