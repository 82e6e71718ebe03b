"""How steps are launched: graphs, compilation or neither. The part of `resolve()` for `ExecutionConfig`, as pure as the whole.

What excludes something else is an error, not a preference. Knows options and devices; knows no back end. Called by `resolve`.
"""

from __future__ import annotations

from typing import Any, Protocol

from halfbyte.config import EngineOptions, ExecutionConfig
from halfbyte.errors import Refusal, UserError

GRAPH_MODES = ("auto", "none", "piecewise", "full", "full_decode_only", "full_and_piecewise")
COMPILE_MODES = ("none", "native")


class Picker(Protocol):
    """Takes the first value that is there, and notes where it came from."""

    def __call__(self, field: str, given: Any, otherwise: Any, origin: str = "default") -> Any: ...


def execution_refusals(options: EngineOptions, device: str, backend: str) -> list[Refusal]:
    """What this device or its attention back end does not have."""
    if device != "cpu":
        return []
    found = []
    if options.cudagraph_mode not in ("auto", "none"):
        found.append(Refusal(f"--cudagraph-mode {options.cudagraph_mode} needs a GPU", "leave it out"))
    if options.cudagraph_capture_sizes is not None:
        found.append(Refusal("--cudagraph-capture-sizes needs a GPU", "leave it out"))
    if options.compile == "native" and backend == "cpu":
        reason = "--compile native compiles PyTorch, which the compiled CPU kernels do not use"
        found.append(Refusal(reason, "leave it out, or use --attention-backend reference"))
    return found


def resolve_execution(options: EngineOptions, max_num_tokens: int, device: str, pick: Picker) -> ExecutionConfig:
    """max_num_tokens: of a step. The modes are known ones. Raises UserError for what excludes each other."""
    mode = None if options.cudagraph_mode == "auto" else options.cudagraph_mode
    compiled = None if options.compile == "none" else options.compile
    if options.enforce_eager and compiled:
        raise _exclude("--compile native", "--enforce-eager", "compile")
    without = "--enforce-eager" if options.enforce_eager else "--compile native" if compiled else None
    if without is not None and mode not in (None, "none"):
        raise _exclude(f"--cudagraph-mode {mode}", without, "cudagraph_mode")
    sizes = _graph_sizes(options, max_num_tokens)
    if sizes is not None and (without is not None or mode == "none"):
        raise _exclude("--cudagraph-capture-sizes", without or "--cudagraph-mode none", "cudagraph_capture_sizes")
    on_cpu = device == "cpu"
    return ExecutionConfig(
        cudagraph_mode=pick(
            "cudagraph_mode",
            "none" if options.enforce_eager else mode,
            "none" if on_cpu or without else "auto",
            "platform" if on_cpu else "default",
        ),
        cudagraph_capture_sizes=pick("cudagraph_capture_sizes", sizes, None),
        compile=pick("compile", compiled, "none"),
    )


def _exclude(flag: str, other: str, param: str) -> UserError:
    return UserError(f"{flag} and {other} exclude each other; leave one of them out", param=param)


def _graph_sizes(options: EngineOptions, max_num_tokens: int) -> tuple[int, ...] | None:
    given = options.cudagraph_capture_sizes
    if given is None:
        return None
    wrong = [size for size in given if not str(size).isdecimal() or not 1 <= int(size) <= max_num_tokens]
    if wrong or not given:
        raise UserError(
            f"--cudagraph-capture-sizes takes numbers of tokens from 1 to --max-num-batched-tokens {max_num_tokens}, "
            f"got {repr(wrong[0]) if wrong else 'none'}",
            param="cudagraph_capture_sizes",
        )
    return tuple(sorted({int(size) for size in given}))
