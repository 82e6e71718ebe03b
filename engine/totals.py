"""Sums over steps: what was computed, generated and found in the prefix cache.

`AsyncEngine` has one for its whole life, which `/status` shows; `StatsLog` has one for each of its lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from halfbyte.types import SchedulerStats, StepOutput


@dataclass(slots=True)
class Totals:
    """Tokens; last: the gauges after the newest step. computed: of prompts and of answers."""

    computed: int = 0
    generated: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    num_preemptions: int = 0
    last: SchedulerStats = field(default_factory=SchedulerStats)

    def add(self, step: StepOutput) -> None:
        stats = self.last = step.stats
        self.computed += stats.num_scheduled_tokens
        self.generated += sum(len(output.new_token_ids) for output in step.outputs)
        self.cache_queries += stats.prefix_cache_queries_tokens
        self.cache_hits += stats.prefix_cache_hits_tokens
        self.num_preemptions += stats.num_preemptions
