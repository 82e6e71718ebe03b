"""What control calls do to an engine: one function per action of `engine.messages`.

Called between steps by whoever drives the core, in the thread that owns it; a function may take its time. What it raises is
its caller's answer and touches nobody else. Knows the core and its scheduler; knows no sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from halfbyte.engine.adapters import EngineAdapters
from halfbyte.engine.core import EngineCore
from halfbyte.engine.messages import (
    Action,
    AdapterWasLoaded,
    CacheWasReset,
    Control,
    EngineState,
    Failed,
    LoadAdapter,
    Pause,
    Reply,
    ResetPrefixCache,
    Result,
    Resume,
    Sleep,
    UnloadAdapter,
    WakeUp,
)
from halfbyte.errors import HalfbyteError, Refusal, UnsupportedError
from halfbyte.types import MEMORY_PARTS

log = logging.getLogger(__name__)


def perform(core: EngineCore, call: Control) -> Reply:
    """Carry out a control call. Never raises: an error is the reply."""
    try:
        return Reply(call.call_id, result=_ACTIONS[type(call.action)](core, call.action))
    except Exception as error:
        if not isinstance(error, HalfbyteError):
            log.exception("%s failed", type(call.action).__name__)
        return Reply(call.call_id, failure=Failed.of(error))


def _reset_prefix_cache(core: EngineCore, action: ResetPrefixCache) -> CacheWasReset:
    return CacheWasReset(core.reset_prefix_cache(preempt=action.reset_running_requests))


def _pause(core: EngineCore, action: Pause) -> EngineState:
    core.is_paused = True
    core.hold()
    core.settle()
    if action.clear_cache:
        core.reset_prefix_cache(preempt=True)
    return _state(core)


def _resume(core: EngineCore, action: Resume) -> EngineState:
    core.is_paused = False
    core.hold()
    return _state(core)


def _sleep(core: EngineCore, action: Sleep) -> EngineState:
    """A deeper sleep stays as deep; part of it that was woken up falls asleep again."""
    core.sleep_level = max(action.level, core.sleep_level or 0)
    core.hold()
    core.settle()
    if core.sleep_level > 0:
        core.reset_prefix_cache(preempt=True)
        core.release_rows()
        core.runner.sleep(core.sleep_level)
    log.info("asleep at level %d; given back: %s", core.sleep_level, ", ".join(core.runner.missing) or "nothing")
    return _state(core)


def _wake_up(core: EngineCore, action: WakeUp) -> EngineState:
    if core.sleep_level is None:
        return _state(core)
    for part in MEMORY_PARTS:
        if part in (action.tags or MEMORY_PARTS):
            core.runner.wake_up(part)
    if not core.runner.missing:
        core.sleep_level = None
        core.hold()
    return _state(core)


def _state(core: EngineCore) -> EngineState:
    missing = [] if core.sleep_level is None else list(core.runner.missing)
    return EngineState(core.is_paused, core.sleep_level, missing)


def _load_adapter(core: EngineCore, action: LoadAdapter) -> AdapterWasLoaded:
    return AdapterWasLoaded(_adapters(core).load(action.path, action.replaces))


def _unload_adapter(core: EngineCore, action: UnloadAdapter) -> None:
    _adapters(core).unload(action.adapter_id)


def _adapters(core: EngineCore) -> EngineAdapters:
    if core.adapters is None:
        raise UnsupportedError(Refusal("this engine has no adapters", "start it with --enable-lora"))
    return core.adapters


_ACTIONS: dict[type[Action], Callable[[EngineCore, Any], Result | None]] = {
    ResetPrefixCache: _reset_prefix_cache,
    Pause: _pause,
    Resume: _resume,
    Sleep: _sleep,
    WakeUp: _wake_up,
    LoadAdapter: _load_adapter,
    UnloadAdapter: _unload_adapter,
}
