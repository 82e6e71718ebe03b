"""A report as text for a terminal and as a document for a file. Knows results; measures nothing. Called by the command."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfbyte.entrypoints.kv_eval.metrics import Share, TextResult
from halfbyte.entrypoints.kv_eval.results import FormatResult, Report
from halfbyte.entrypoints.kv_eval.verdict import failures, verdict

_TEXT_COLUMNS = ("KL", "95% interval", "p99 KL", "ppl", "top-1")


def lines(report: Report) -> Iterator[str]:
    """The tables, then a verdict per format."""
    measured = [result for result in report.formats if result.refusal is None]
    yield f"{report.model}, {report.dtype}; baseline {report.baseline.name}"
    yield ""
    yield from _table(_main_rows(report, measured))
    details = list(_detail_rows(report, measured))
    if len(details) > 1:
        yield ""
        yield from _table(details)
    yield ""
    for result in report.formats:
        yield verdict(result, report)


def document(report: Report) -> dict[str, Any]:
    """Everything, as JSON holds it: numbers that are none become null."""
    thresholds = report.settings.thresholds
    formats = []
    for result in report.formats:
        missed = None if result.refusal is not None else failures(result, report.baseline, thresholds)
        formats.append(_described(result) | {"passes": missed == [], "failures": missed})
    found: dict[str, Any] = _plain(
        {
            "model": report.model,
            "dtype": report.dtype,
            "max_model_len": report.max_model_len,
            "texts": report.texts,
            "settings": asdict(report.settings),
            "baseline": _described(report.baseline),
            "formats": formats,
        }
    )
    return found


def _main_rows(report: Report, measured: Sequence[FormatResult]) -> Iterator[list[str]]:
    has_text = any(result.text for result in measured)
    tests = list(report.baseline.shares)
    yield ["KV cache", "bits/el", "tokens/GiB", *(_TEXT_COLUMNS if has_text else ()), *tests]
    for result in (report.baseline, *measured):
        cells = [result.name, f"{result.bits_per_element:.2f}", f"{result.tokens_per_gib:,}"]
        if has_text:
            first = next(other.text for other in measured if other.text is not None)
            cells += _text_cells(result.text) if result.text else ["-", "-", "-", f"{first.base_perplexity:.3f}", "-"]
        yield cells + [_share_cell(result.shares[test]) for test in tests]


def _detail_rows(report: Report, measured: Sequence[FormatResult]) -> Iterator[list[str]]:
    """What each length of text and each kind of question says by itself, where there are several."""
    yield ["KV cache", "part", "result"]
    for result in (report.baseline, *measured):
        if len(result.text_by_length) > 1:
            for length, text in result.text_by_length.items():
                summary = f"KL {text.kl:.4g}, p99 {text.kl_p99:.4g}, ppl {text.perplexity:.3f}, top-1 {text.top1:.3f}"
                yield [result.name, f"text {length}", summary]
        for test, by_kind in result.shares_by_kind.items():
            if len(by_kind) > 1:
                yield from ([result.name, f"{test} {kind}", _share_cell(share)] for kind, share in by_kind.items())


def _text_cells(text: TextResult) -> list[str]:
    interval = f"{text.kl_low:.4g} - {text.kl_high:.4g}"
    return [f"{text.kl:.4g}", interval, f"{text.kl_p99:.4g}", f"{text.perplexity:.3f}", f"{text.top1:.3f}"]


def _share_cell(share: Share) -> str:
    low, high = share.interval
    return f"{share.rate:.3f} ({low:.2f} - {high:.2f}, n={share.num_asked})"


def _table(rows: Iterator[list[str]] | Sequence[list[str]]) -> Iterator[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _described(result: FormatResult) -> dict[str, Any]:
    return asdict(result) | {
        "tokens_per_gib": result.tokens_per_gib,
        "shares": {test: _described_share(share) for test, share in result.shares.items()},
        "shares_by_kind": {
            test: {kind: _described_share(share) for kind, share in by_kind.items()}
            for test, by_kind in result.shares_by_kind.items()
        },
    }


def _described_share(share: Share) -> dict[str, Any]:
    return asdict(share) | {"rate": share.rate, "interval": share.interval}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
