"""A plan as text and as JSON: the same rows, once for people and once for programs. Called by `halfbyte kv-plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from halfbyte.entrypoints.kv_plan.plan import FormatPlan, LayerKind, Question, RefusedFormat, auto_format
from halfbyte.entrypoints.kv_plan.units import in_gib
from halfbyte.entrypoints.kv_plan.weights import StepWeights
from halfbyte.resolve import AUTO_FIT

_COLUMN_NOTES = {
    "tokens by bytes": "memory / bytes per token, cut; all layers hold all tokens",
    "tokens": "what the engine reports: whole blocks, without block 0, which holds none",
    "full length": "requests of the longest length that fit at once",
    "tokens/s": "at most, decoding: batch / (bytes of weights + batch x KV bytes of a context) x bandwidth",
}


@dataclass(frozen=True, slots=True)
class Report:
    """What was planned for, and what came out, format by format. weights: of a decode step."""

    model: str
    question: Question
    weights: StepWeights
    rows: Sequence[FormatPlan | RefusedFormat]

    @property
    def plans(self) -> list[FormatPlan]:
        return [row for row in self.rows if isinstance(row, FormatPlan)]

    @property
    def refused(self) -> list[RefusedFormat]:
        return [row for row in self.rows if isinstance(row, RefusedFormat)]


def as_object(report: Report) -> dict[str, Any]:
    """In JSON's types."""
    question = report.question
    auto, why = auto_format(question)
    roofline = question.roofline
    return {
        "model": report.model,
        "architecture": question.decoder.architecture,
        "platform": question.platform.architecture,
        "memory_bytes": question.memory_bytes,
        "block_size": question.config.cache.block_size,
        "max_num_batched_tokens": question.config.scheduler.max_num_batched_tokens,
        "weight_bytes": report.weights.num_bytes,
        "bytes_per_s": roofline and roofline.bytes_per_s,
        "batch": roofline and roofline.batch_size,
        "context": roofline and roofline.context,
        "auto": {"kv_cache_dtype": auto, "reason": why},
        "formats": [_plan_object(plan) for plan in report.plans],
        "refused": [
            {
                "kv_cache_dtype": row.name,
                "refusals": [{"reason": refusal.reason, "fix": refusal.fix} for refusal in row.refusals],
            }
            for row in report.refused
        ],
    }


def as_lines(report: Report) -> Iterator[str]:
    """A head, a table, what its columns mean, and the refusals."""
    yield from _head(report)
    if report.plans:
        yield ""
        yield from _table(report)
    for plan in report.plans:
        if plan.too_small:
            yield f"{plan.name}: {plan.too_small}"
    if report.refused:
        yield ""
        yield f"Refused on {report.question.platform.architecture}:"
        for row in report.refused:
            yield from (f"  {row.name}: {refusal}" for refusal in row.refusals)


def _head(report: Report) -> Iterator[str]:
    question = report.question
    decoder, config, roofline = question.decoder, question.config, question.roofline
    length = config.model.max_model_len
    memory = "no --memory given" if question.memory_bytes is None else f"{_amount(question.memory_bytes)} for KV"
    yield (
        f"{report.model}: {decoder.architecture}, {decoder.num_layers} layers, "
        f"{decoder.num_kv_heads} KV heads of {decoder.head_dim}"
    )
    yield (
        f"on {question.platform.architecture}: {memory}, blocks of {config.cache.block_size} tokens, "
        f"requests of {'what fits' if length == AUTO_FIT else f'up to {length:,} tokens'}"
    )
    auto, why = auto_format(question)
    yield f"--kv-cache-dtype auto is {auto}: {why}"
    if roofline is not None:
        yield (
            f"a step reads {_amount(roofline.weight_bytes)} of weights ({report.weights.source}) and the KV of "
            f"{roofline.batch_size:,} x {roofline.context:,} tokens, at {roofline.bytes_per_s / 1e9:,.1f} GB/s"
        )


def _table(report: Report) -> Iterator[str]:
    question = report.question
    cells = [_cells(plan, question) for plan in report.plans]
    header = list(cells[0])
    rows = [header, *([row[name] for name in header] for row in cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, second, *numbers = row
        words = [first.ljust(widths[0]), second.ljust(widths[1])]
        words += [number.rjust(width) for number, width in zip(numbers, widths[2:], strict=True)]
        yield "  ".join(words).rstrip()
    yield ""
    yield "bytes/token: of all layers, with scales and padding; per layer: of each kind of layer; block: of all layers of a group"
    yield from (f"{name}: {note}" for name, note in _COLUMN_NOTES.items() if name in header)


def _cells(plan: FormatPlan, question: Question) -> dict[str, str]:
    """Column -> text; columns that were not asked for are not there."""
    cells = {
        "--kv-cache-dtype": plan.name,
        "read by": plan.reader.backend,
        "bytes/token": _shown(plan.bytes_per_token),
        "per layer": " + ".join(map(_kind, plan.kinds)),
        "block": f"{plan.block_bytes:,}",
    }
    if question.memory_bytes is not None:
        capacity = plan.capacity
        cells["tokens by bytes"] = f"{plan.tokens_by_bytes:,}"
        cells["tokens"] = f"{capacity.num_tokens:,}" if capacity else "none"
        cells["full length"] = f"{capacity.max_concurrency:,.2f}" if capacity else "none"
        if question.config.model.max_model_len == AUTO_FIT:
            cells["length that fits"] = f"{capacity.max_model_len:,}" if capacity else "none"
    if question.roofline is not None:
        speed = plan.max_tokens_per_s
        cells["tokens/s"] = "batch too large" if plan.batch_too_large else "none" if speed is None else f"{speed:,.1f}"
    return cells


def _kind(kind: LayerKind) -> str:
    window = "" if kind.sliding_window is None else f" (window {kind.sliding_window:,})"
    return f"{kind.num_layers} x {_shown(kind.bytes_per_token)}{window}"


def _plan_object(plan: FormatPlan) -> dict[str, Any]:
    capacity = plan.capacity
    return {
        "kv_cache_dtype": plan.name,
        "backend": plan.reader.backend,
        "outcome": plan.reader.outcome,
        "bytes_per_token": _number(plan.bytes_per_token),
        "layer_kinds": [
            {
                "sliding_window": kind.sliding_window,
                "num_layers": kind.num_layers,
                "bytes_per_token": _number(kind.bytes_per_token),
            }
            for kind in plan.kinds
        ],
        "block_bytes": plan.block_bytes,
        "tokens_by_bytes": plan.tokens_by_bytes,
        "num_blocks": capacity and capacity.num_blocks,
        "max_model_len": capacity and capacity.max_model_len,
        "tokens": capacity and capacity.num_tokens,
        "full_length_requests": capacity and capacity.max_concurrency,
        "too_small": plan.too_small,
        "max_tokens_per_s": plan.max_tokens_per_s,
        "batch_too_large": plan.batch_too_large,
    }


def _amount(num_bytes: int) -> str:
    return f"{num_bytes:,} bytes ({in_gib(num_bytes)})"


def _shown(value: Fraction) -> str:
    number = _number(value)
    return f"{number:,}" if isinstance(number, int) else f"{number:,.2f}"


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
