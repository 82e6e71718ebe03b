"""What an evaluation measures and what a format has to reach. Values only; the command's flags and tests make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TESTS: Mapping[str, str] = {
    "text": "KL divergence, perplexity and top-1 agreement on given texts",
    "retrieval": "codes found again in long prompts",
    "format": "JSON and tool calls that can be parsed",
    "gsm8k": "grade-school mathematics from a file",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """What a format may cost and still pass. KL in nats per token; losses are shares of right answers, baseline minus format."""

    max_kl: float = 0.02
    max_p99_kl: float = 0.2
    max_retrieval_loss: float = 0.1
    max_format_loss: float = 0.05
    max_gsm8k_loss: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One evaluation. baseline: a KV format, "auto" is the model's own type.

    lengths: tokens of the windows that are cut from each text. text_files: read besides the shipped samples. step_tokens:
    positions that are scored in one step; 1 reads the cache as a decode does. Counts are per format; retrieval queries are per
    length. seed: of names, codes and the bootstrap.
    """

    tests: tuple[str, ...] = ("text", "retrieval")
    baseline: str = "auto"
    lengths: tuple[int, ...] = (384, 1400)
    text_files: tuple[Path, ...] = ()
    step_tokens: int = 128
    retrieval_lengths: tuple[int, ...] = (400, 900, 1800)
    num_retrieval_queries: int = 40
    num_format_prompts: int = 40
    gsm8k_file: Path | None = None
    num_gsm8k_questions: int = 100
    num_gsm8k_shots: int = 5
    seed: int = 0
    thresholds: Thresholds = field(default_factory=Thresholds)
