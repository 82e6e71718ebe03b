"""What the operator says about decisions: the value of --decisions-config, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfbyte.entrypoints.decisions.readers import DEFAULT_READER, READER_OF_ARCHITECTURE, READERS
from halfbyte.errors import UserError

FLAG = "--decisions-config"
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class DecisionSettings:
    """reader: one of READERS, or "auto". temperatures: a file, "none", or None for the file beside the model."""

    reader: str = AUTO
    temperatures: str | None = None

    @classmethod
    def from_config(cls, given: Mapping[str, Any]) -> DecisionSettings:
        """UserError names what is unknown or of the wrong kind."""
        if unknown := sorted(set(given) - {"reader", "temperatures"}):
            raise UserError(f"{FLAG} has no {', '.join(unknown)}; it takes reader and temperatures")
        reader, temperatures = given.get("reader", AUTO), given.get("temperatures")
        if reader not in (AUTO, *READERS):
            raise UserError(f"{FLAG}: reader {reader!r} does not exist; it is one of {', '.join((AUTO, *READERS))}")
        if temperatures is not None and (not isinstance(temperatures, str) or not temperatures):
            raise UserError(f'{FLAG}: temperatures must be the name of a file, or "none", got {temperatures!r}')
        return cls(reader, temperatures)

    def reader_for(self, architecture: str) -> str:
        return READER_OF_ARCHITECTURE.get(architecture, DEFAULT_READER) if self.reader == AUTO else self.reader
