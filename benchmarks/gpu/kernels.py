"""The kernels beside the limits of the device: attention of decodes and of prompts, writing K and V, choosing tokens.

Each row says what was measured, what fraction of which limit it is, and what was aimed at. Called by `scripts/gpu_check`.

Shape letters: T tokens, R requests, H heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

from benchmarks.gpu.layer import Shape, Step
from benchmarks.gpu.timing import Bench, Times
from halfbyte.kernels.triton.sampling import TritonSampling
from halfbyte.model_runner.sampling_kernels import TORCH_SAMPLING

FORMATS = ("bfloat16", "fp8_e4m3", "nvfp4", "kv4", "kv5", "kv6", "int8_per_token_head")


@dataclass(frozen=True, slots=True)
class Row:
    """what: a measurement; value in the unit that `measure` names; aim: None where there is none."""

    section: str
    what: str
    measure: str
    value: float
    spread: float
    aim: str | None = None
    is_met: bool | None = None

    def as_object(self) -> dict[str, object]:
        return asdict(self)


def at_least(section: str, what: str, measure: str, value: float, times: Times, aim: float | None = None) -> Row:
    return Row(section, what, measure, value, times.spread, None if aim is None else f">= {aim:g}", _met(aim, value, 1))


def at_most(section: str, what: str, measure: str, value: float, times: Times, aim: float | None = None) -> Row:
    return Row(section, what, measure, value, times.spread, None if aim is None else f"<= {aim:g}", _met(aim, value, -1))


def _met(aim: float | None, value: float, sign: int) -> bool | None:
    return None if aim is None else sign * value >= sign * aim


def decoding(bench: Bench, shape: Shape, copy_per_s: float, formats: Sequence[str] = FORMATS) -> Iterator[Row]:
    """bfloat16 beside a copy, the other formats beside bfloat16. Bytes: those of the cache alone."""
    steps = {name: Step(name, shape, bench.device) for name in formats}
    found = bench.times({name: step.attending() for name, step in steps.items()})
    base_s = found["bfloat16"].median_s
    for name, times in found.items():
        share = steps[name].kv_bytes / times.median_s / copy_per_s
        yield at_least("decode", name, "of copy bandwidth", share, times, 0.85 if name == "bfloat16" else None)
    for name, times in found.items():
        if name != "bfloat16":
            aim = 0.56 if name in ("fp8_e4m3", "nvfp4", "kv4") else None
            yield at_most("decode", name, "times bfloat16's time", times.median_s / base_s, times, aim)


def writing(bench: Bench, shape: Shape, copy_per_s: float, formats: Sequence[str] = FORMATS) -> Iterator[Row]:
    """Bytes: K and V in bfloat16 read, codes written."""
    steps = {name: Step(name, shape, bench.device) for name in formats}
    found = bench.times({name: step.writing() for name, step in steps.items()})
    num_tokens = shape.requests * shape.queries
    for name, times in found.items():
        written = steps[name].kv_bytes * shape.queries // shape.context
        num_bytes = num_tokens * shape.kv_heads * shape.dim * 4 + written
        yield at_least("write", name, "of copy bandwidth", num_bytes / times.median_s / copy_per_s, times, 0.8)


def prompts(bench: Bench, shape: Shape, product_per_s: float, formats: Sequence[str] = FORMATS) -> Iterator[Row]:
    """Causal attention of whole prompts, beside a matrix product and beside torch's own attention of the same."""
    steps = {name: Step(name, shape, bench.device) for name in formats}
    runs = {name: step.attending() for name, step in steps.items()}
    q, k, v = (
        torch.randn(shape.requests, heads, shape.context, shape.dim, device=bench.device).to(torch.bfloat16)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    found = bench.times(
        {**runs, "torch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)}  # type: ignore[dict-item]
    )
    flops = 2 * shape.requests * shape.heads * shape.dim * shape.context**2
    for name, times in found.items():
        share = flops / times.median_s / product_per_s
        yield at_least("prompt", name, "of a product's FLOP/s", share, times, 0.5 if name == "bfloat16" else None)


def sampling(bench: Bench, num_rows: int, vocab_size: int, copy_per_s: float) -> Iterator[Row]:
    """Greedy and random choices by the kernels and by the law, beside reading the logits once."""
    device = bench.device
    logits_RV = torch.randn(num_rows, vocab_size, device=device)
    at_R, position_R = torch.arange(num_rows, device=device), torch.full((num_rows,), 7, device=device)
    temperature_R, seed_R = torch.ones(num_rows, device=device), torch.arange(num_rows, device=device)
    runs = {}
    for name, kernels in (("triton", TritonSampling()), ("torch", TORCH_SAMPLING)):
        runs[f"best, {name}"] = lambda kernels=kernels: kernels.best(logits_RV)
        runs[f"noisy best, {name}"] = lambda kernels=kernels: kernels.noisy_best(
            logits_RV, at_R, temperature_R, seed_R, position_R
        )
    for what, times in bench.times(runs).items():
        share = logits_RV.nbytes / times.median_s / (copy_per_s / 2)
        yield at_least("sample", what, "of the speed of reading", share, times)
