"""What control calls do to an engine: one function per action of `engine.messages`.

Called between steps by whoever drives the core, in the thread that owns it; a function may take its time. What it raises is
its caller's answer and touches nobody else. Knows the core and its scheduler; knows no sockets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from halfbyte.engine.core import EngineCore
from halfbyte.engine.messages import Action, CacheWasReset, Control, Failed, Reply, ResetPrefixCache, Result
from halfbyte.errors import HalfbyteError

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


_ACTIONS: dict[type[Action], Callable[[EngineCore, Any], Result | None]] = {
    ResetPrefixCache: _reset_prefix_cache,
}
