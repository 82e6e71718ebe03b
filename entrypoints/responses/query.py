"""Query parameters, read as strictly as bodies are: a value is what it should be, or a 400 that names it."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from halfbyte.errors import UserError


class Query:
    """Those of one request. Absent ones are None, or the first choice."""

    def __init__(self, request: Request) -> None:
        self._given = request.query_params

    def text(self, name: str) -> str | None:
        return self._given.get(name)

    def choice(self, name: str, choices: Sequence[str]) -> str:
        value = self._given.get(name, choices[0])
        if value not in choices:
            raise UserError(f"{name} must be {' or '.join(choices)}, got {value[:40]!r}", param=name)
        return value

    def flag(self, name: str) -> bool:
        return self.choice(name, ("false", "true")) == "true"

    def number(self, name: str, least: int, most: int) -> int | None:
        value = self._given.get(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdecimal() and len(value) < 20) or not least <= int(value) <= most:
            raise UserError(f"{name} must be a whole number from {least} to {most}, got {value[:40]!r}", param=name)
        return int(value)
