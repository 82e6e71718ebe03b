"""What the API process and the engine process say to each other: msgpack structs, tagged by their class.

To the engine: AddRequests, AbortRequests, Shutdown. From it: Phase while it starts, then Ready or Failed once, then one
StepOutput per step and a Heartbeat each second. The first words of all, EngineSpawn, go through the child's standard input.
"""

from __future__ import annotations

from typing import Any

import msgspec

from halfbyte import errors
from halfbyte.types import EngineInfo, EngineRequest, StepOutput


class EngineSpawn(msgspec.Struct):
    """How to start: the options as a plain mapping, the two addresses that the API process has bound, and its log level."""

    options: dict[str, Any]
    input_address: str
    output_address: str
    log_level: str


class AddRequests(msgspec.Struct, tag=True):
    requests: list[EngineRequest]


class AbortRequests(msgspec.Struct, tag=True):
    request_ids: list[str]


class Shutdown(msgspec.Struct, tag=True):
    pass


class Phase(msgspec.Struct, tag=True):
    """A part of the start-up is done; `seconds` is its own time."""

    name: str
    seconds: float


class Ready(msgspec.Struct, tag=True):
    info: EngineInfo


class Failed(msgspec.Struct, tag=True):
    """The start-up failed. `error` is the class in `halfbyte.errors` (or any other name), `message` one line."""

    error: str
    message: str

    def exception(self) -> Exception:
        kind = getattr(errors, self.error, errors.HalfbyteError)
        return (
            errors.UnsupportedError(errors.Refusal(self.message, "")) if kind is errors.UnsupportedError else kind(self.message)
        )


class Step(msgspec.Struct, tag=True):
    output: StepOutput


class Heartbeat(msgspec.Struct, tag=True):
    """The process lives. step_age_s: how long the step in progress has run (0 between steps)."""

    step_age_s: float


ToEngine = AddRequests | AbortRequests | Shutdown
FromEngine = Phase | Ready | Failed | Step | Heartbeat
