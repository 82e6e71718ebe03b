"""What the API process and the engine process say to each other: msgpack structs, tagged by their class.

To the engine: AddRequests, AbortRequests, Control, Shutdown. From it: Phase while it starts, then Ready or Failed once, then one
StepOutput per step, one Reply per Control and a Heartbeat each second. The first words of all, EngineSpawn, go through the
child's standard input. What an action does is `engine.controls`' matter.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from halfbyte import errors
from halfbyte.types import EngineInfo, EngineRequest, MemoryPart, StepOutput


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


Answer = TypeVar("Answer")


class Order(msgspec.Struct, Generic[Answer]):
    """What all actions are: each names the type of its result."""


class ResetPrefixCache(Order["CacheWasReset"], tag=True):
    """Forget cached prefixes. reset_running_requests: those that hold blocks give them up, and are computed again."""

    reset_running_requests: bool = False


class CacheWasReset(msgspec.Struct, tag=True):
    """success: False while requests hold blocks; then nothing was forgotten."""

    success: bool


class EngineState(msgspec.Struct, tag=True):
    """Whether the engine computes: it does when it is neither paused nor asleep. missing: what it gave back for its sleep."""

    is_paused: bool = False
    sleep_level: int | None = None
    missing: list[MemoryPart] = msgspec.field(default_factory=list)


class Pause(Order[EngineState], tag=True):
    """Compute nothing; requests wait. clear_cache: forget cached prefixes and the blocks of running requests, too."""

    clear_cache: bool = True


class Resume(Order[EngineState], tag=True):
    """The end of a pause."""


class Sleep(Order[EngineState], tag=True):
    """Compute nothing, as in a pause. From level 1 on, give memory back (`Runner.sleep`); requests are computed again later."""

    level: int = 1


class WakeUp(Order[EngineState], tag=True):
    """Fetch what the sleep gave back, all or the parts that are named. The sleep is over when nothing is missing."""

    tags: list[MemoryPart] = msgspec.field(default_factory=list)


class LoadAdapter(Order["AdapterWasLoaded"], tag=True):
    """Load the adapter in a folder. replaces: the id of one that will be unloaded for it: it does not count any more."""

    path: str
    replaces: int | None = None


class AdapterWasLoaded(msgspec.Struct, tag=True):
    adapter_id: int


class UnloadAdapter(Order[None], tag=True):
    """Let no new request use an adapter; an id that is not loaded is ignored."""

    adapter_id: int


Action = ResetPrefixCache | Pause | Resume | Sleep | WakeUp | LoadAdapter | UnloadAdapter
Result = CacheWasReset | EngineState | AdapterWasLoaded


class Control(msgspec.Struct, tag=True):
    """An action, carried out between steps and answered by one Reply with its call_id."""

    call_id: int
    action: Action


class Shutdown(msgspec.Struct, tag=True):
    pass


class Phase(msgspec.Struct, tag=True):
    """A part of the start-up is done; `seconds` is its own time."""

    name: str
    seconds: float


class Ready(msgspec.Struct, tag=True):
    info: EngineInfo


class Failed(msgspec.Struct, tag=True):
    """The start-up or a control call failed. `error`: the class in `halfbyte.errors` (or any other name); `message`: one line."""

    error: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: Exception) -> Failed:
        name = type(error).__name__
        return cls(name, str(error) or name, getattr(error, "param", None))

    def exception(self) -> errors.HalfbyteError:
        match getattr(errors, self.error, None):
            case errors.UnsupportedError:
                return errors.UnsupportedError(errors.Refusal(self.message, ""))
            case errors.UserError | errors.NotFoundError as kind:
                return kind(self.message, self.param)
            case type() as kind if issubclass(kind, errors.HalfbyteError):
                return kind(self.message)
        return errors.HalfbyteError(self.message)


class Reply(msgspec.Struct, tag=True):
    """How a control call went. failure: why it has no result."""

    call_id: int
    result: Result | None = None
    failure: Failed | None = None


class Step(msgspec.Struct, tag=True):
    output: StepOutput


class Heartbeat(msgspec.Struct, tag=True):
    """The process lives. step_age_s: how long the step in progress has run (0 between steps)."""

    step_age_s: float


ToEngine = AddRequests | AbortRequests | Control | Shutdown
FromEngine = Phase | Ready | Failed | Step | Reply | Heartbeat
