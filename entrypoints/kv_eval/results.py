"""What an evaluation finds: one result per format, and the report that holds them all.

Values only. Made by `evaluate`; read by `verdict`, `report` and `plot`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from halfbyte.entrypoints.kv_eval.metrics import Share, TextResult
from halfbyte.entrypoints.kv_eval.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatResult:
    """One KV format. name: as it was asked for. bits_per_element, bytes_per_token: what its planes take, scales included.

    text: all windows together; text_by_length: those of each length. shares: test -> right answers; shares_by_kind: test ->
    kind (a retrieval length, "json") -> right answers. What was not measured is None or absent. refusal: why the format cannot
    run here; then nothing else is known.
    """

    name: str
    bits_per_element: float = 0.0
    bytes_per_token: float = 0.0
    text: TextResult | None = None
    text_by_length: Mapping[int, TextResult] = field(default_factory=dict)
    shares: Mapping[str, Share] = field(default_factory=dict)
    shares_by_kind: Mapping[str, Mapping[str, Share]] = field(default_factory=dict)
    refusal: str | None = None

    @property
    def tokens_per_gib(self) -> int:
        """Tokens whose K and V of all layers fit into 2**30 bytes."""
        return int(2**30 / self.bytes_per_token) if self.bytes_per_token else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One evaluation. baseline: what the others are compared with; it has no `text` of its own."""

    model: str
    dtype: str
    max_model_len: int
    texts: tuple[str, ...]
    settings: Settings
    baseline: FormatResult
    formats: tuple[FormatResult, ...]
