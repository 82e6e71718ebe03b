"""Everything that Halfbyte raises on purpose, and `Refusal`, the value that says why a combination is not supported.

    HalfbyteError
    ├── UserError (ValueError)      a request or an argument is wrong: `param` names it, HTTP answers 400
    │   └── PromptTooLongError      the context cannot hold the prompt and one token more
    ├── NotFoundError               an unknown model name or route object: HTTP answers 404
    ├── OverloadedError             admission limits are reached: HTTP answers 503
    ├── UnsupportedError            a combination that this build or machine refuses; carries a Refusal
    ├── ModelFileError              a model file is missing, truncated or malformed
    ├── CapacityError               the memory at hand cannot hold what was asked
    └── EngineDeadError             the engine process is gone; nothing can be served

Each message is one line: what was asked, what is possible, which flag or field to change.
"""

from dataclasses import dataclass

from halfbyte.log import one_line


class HalfbyteError(Exception):
    """Base of all errors that Halfbyte raises on purpose."""


class UserError(HalfbyteError, ValueError):
    """A request field or an argument is wrong. `param` names it as the user wrote it (None when no single one is at fault)."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(UserError):
    """The context cannot hold the prompt and one token more: a shorter one might be served."""


class NotFoundError(HalfbyteError):
    """What was named does not exist here. `param` names the field that named it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class OverloadedError(HalfbyteError):
    """The queue is full; the same request may succeed after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a combination cannot work, and what to do instead.

    Such as "nvfp4 KV needs head_dim % 16 == 0, got 72" and "use --kv-cache-dtype fp8".
    """

    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.fix}" if self.fix else self.reason


class UnsupportedError(HalfbyteError):
    """Raised once per start with every refusal that was collected."""

    def __init__(self, *refusals: Refusal) -> None:
        super().__init__("; ".join(str(r) for r in refusals))
        self.refusals = refusals


class ModelFileError(HalfbyteError):
    """A model file cannot be used. The message names the file, what was expected and what was found.

    Names that come out of the file are part of it: control characters are escaped, so that it stays one line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class CapacityError(HalfbyteError):
    """Memory does not suffice. The message holds the arithmetic and the flag that changes it."""


class EngineDeadError(HalfbyteError):
    """The engine process died or hangs. Every open stream gets this, new calls get 503."""
