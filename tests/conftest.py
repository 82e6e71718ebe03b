"""Shared by the scheduler and KV cache tests: a runner without a model, over a simulated KV memory.

Test modules cannot import each other, so the classes come as session fixtures (`fake_runner`, `fake_runner_memory`).
The memory remembers, per slot, which group wrote it and the digest of *all* tokens up to that position: a block shared with
the wrong request, in the wrong group or after it was overwritten does not have the digest that its reader expects.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from halfbyte.kvcache.block_pool import BlockPool
from halfbyte.kvcache.spec import KVLayout
from halfbyte.types import ModelRunnerOutput, NewRow, SchedulerOutput, TokenLogprobs


class FakeMemory:
    """(block, offset) -> (group, digest of the prefix that ends there). Refuses writes to blocks that others can see."""

    def __init__(self, layout: KVLayout, pool: BlockPool) -> None:
        self.layout, self.pool = layout, pool
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}

    def offset(self, group: int, position: int) -> int:
        """A token's place in its block; the first tokens lie in shorter ones."""
        kind = self.layout.groups[group]
        return position % (kind.first_block_size if position < kind.first_tokens else kind.block_size)

    def write(self, tables: list[list[int]], start: int, digests: list[int]) -> None:
        """Write positions start .. len(digests) - 1 in every group."""
        for group, table in enumerate(tables):
            for position in range(start, len(digests)):
                block = table[self.layout.groups[group].entry_of(position)]
                assert block != 0, "the null block is never written"
                assert self.pool.key_of(block) is None, "a cached block is immutable"
                assert self.pool.num_references(block) == 1, "a written block has one owner"
                self.slots[block, self.offset(group, position)] = (group, digests[position])

    def verify(self, tables: list[list[int]], start: int, digests: list[int]) -> None:
        """All positions that tokens start .. len(digests) - 1 attend to are there, and are theirs."""
        for group, table in enumerate(tables):
            window = self.layout.groups[group].sliding_window
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, len(digests)):
                block = table[self.layout.groups[group].entry_of(position)]
                found = self.slots.get((block, self.offset(group, position))) if block else "the null block"
                assert found == (group, digests[position]), f"group {group} position {position} block {block}: {found}"


@dataclass
class FakeRow:
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    tables: list[list[int]]
    digests: list[int]
    wants_prompt_logprobs: bool


@dataclass
class FakeRunner:
    """A `Runner` whose next token is a digest of all tokens so far. Checks what the scheduler tells it.

    salts: cache salt per request, which the digests contain. bad: requests whose next token is non-finite.
    """

    layout: KVLayout
    pool: BlockPool
    max_num_seqs: int
    vocab_size: int = 50
    salts: dict[str, str | None] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    rows: dict[str, FakeRow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = FakeMemory(self.layout, self.pool)

    @staticmethod
    def digests_of(token_ids: list[int], salt: str | None, start: list[int] | None = None) -> list[int]:
        digests = list(start or ())
        for token in token_ids[len(digests) :]:
            digests.append(hash((digests[-1] if digests else zlib.crc32(repr(salt).encode()), token)))
        return digests

    def expected_tokens(self, prompt: list[int], salt: str | None, count: int) -> list[int]:
        """What the model generates when nothing goes wrong."""
        token_ids, digests = list(prompt), self.digests_of(prompt, salt)
        for _ in range(count):
            token_ids.append(digests[-1] % self.vocab_size)
            digests = self.digests_of(token_ids, salt, digests)
        return token_ids[len(prompt) :]

    def execute(self, scheduled: SchedulerOutput) -> None:
        for request_id in scheduled.finished_request_ids + scheduled.preempted_request_ids:
            del self.rows[request_id]
        for new in scheduled.new_rows:
            assert new.request_id not in self.rows
            self.rows[new.request_id] = self._enter(new)
        for grown in scheduled.grown_rows:
            row = self.rows[grown.request_id]
            assert grown.num_computed_tokens == row.num_computed_tokens
            for table, ids in zip(row.tables, grown.new_block_ids, strict=True):
                table += ids
        entered = [row.request_id for row in (*scheduled.new_rows, *scheduled.grown_rows)]
        assert sorted(entered) == sorted(scheduled.num_scheduled_tokens)
        assert len(self.rows) <= self.max_num_seqs
        self.batch = dict(scheduled.num_scheduled_tokens)
        spans = [(self.rows[i], self.rows[i].num_computed_tokens + n) for i, n in self.batch.items()]
        for row, end in spans:
            assert row.num_computed_tokens < end <= len(row.token_ids)
            self.memory.write(row.tables, row.num_computed_tokens, row.digests[:end])
        for row, end in spans:
            self.memory.verify(row.tables, row.num_computed_tokens, row.digests[:end])

    def sample(self, grammar_mask: object = None) -> ModelRunnerOutput:
        output = ModelRunnerOutput(list(self.batch), [], [], bad_rows=frozenset(self.bad & set(self.batch)))
        for request_id, num_tokens in self.batch.items():
            row = self.rows[request_id]
            first, row.num_computed_tokens = row.num_computed_tokens, row.num_computed_tokens + num_tokens
            is_done = row.num_computed_tokens == len(row.token_ids)
            tokens = [row.digests[-1] % self.vocab_size] if is_done else []
            if row.wants_prompt_logprobs:
                known = row.token_ids[first + 1 : min(row.num_computed_tokens + 1, row.num_prompt_tokens)]
                output.prompt_logprobs[request_id] = [TokenLogprobs(token, -1.0, 1, [], []) for token in known]
            row.token_ids += tokens
            row.digests = self.digests_of(row.token_ids, self.salts.get(request_id), row.digests)
            output.token_ids.append(tokens)
            output.logprobs.append([TokenLogprobs(token, -1.0, 1, [], []) for token in tokens] or None)
        return output

    def close(self) -> None:
        self.rows.clear()

    def _enter(self, new: NewRow) -> FakeRow:
        assert 0 <= new.num_computed_tokens < len(new.token_ids)
        digests = self.digests_of(new.token_ids, self.salts.get(new.request_id))
        wants = new.sampling.prompt_logprobs is not None
        tables = [list(table) for table in new.block_ids]
        return FakeRow(list(new.token_ids), new.num_prompt_tokens, new.num_computed_tokens, tables, digests, wants)


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Where a test sends the log is forgotten behind it: the stream may be one that was captured, and is closed by then."""
    loggers = [logging.getLogger(name) for name in ("halfbyte", "uvicorn")]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def fake_runner() -> type[FakeRunner]:
    return FakeRunner


@pytest.fixture(scope="session")
def fake_runner_memory() -> type[FakeMemory]:
    return FakeMemory


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Skipped tests by name, so that none is taken for one that passed."""
    for report in terminalreporter.stats.get("skipped", ()):
        terminalreporter.write_line(f"SKIPPED {report.nodeid}")
