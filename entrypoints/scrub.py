"""What must not leave the server in a message: addresses, stack frames and absolute paths of this machine.

The one place for it: error answers, template errors and whatever shows a caught exception's text to a client call `scrub`.
"""

from __future__ import annotations

import re

MAX_MESSAGE_CHARS = 4000

_FRAME = re.compile(r'File "[^"\n]*", line \d+(?:, in \S+)?')
_ADDRESS = re.compile(r"(?: at)? ?\b0x[0-9a-fA-F]{4,}\b")
_PATH = re.compile(r"(?<![\w.:/~#-])/(?:[\w.+@~-]+/)+[\w.+@~-]*")


def scrub(message: str) -> str:
    """`message` without addresses, stack frames and absolute paths, and not longer than a client should get."""
    message = message[:MAX_MESSAGE_CHARS]
    for pattern, replacement in ((_FRAME, "[frame]"), (_ADDRESS, ""), (_PATH, "[path]")):
        message = pattern.sub(replacement, message)
    return message
