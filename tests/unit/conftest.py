"""Shared by the benchmarks' tests: a tokenizer of two-letter words, and an engine without a model that keeps its own time.

Test modules cannot import each other, so both come as fixtures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from halfbyte import __version__
from halfbyte.config import EngineOptions
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.types import EngineInfo, EngineOutput, EngineRequest, SchedulerStats, StepOutput


def make_word_tokenizer(bos: bool) -> Tokenizer:
    """676 words that stay one token each, and tokens that are no words: digits, a special one."""
    pieces = ["<unk>", "<bos>", *map(str, range(100)), *(a + b for a in ascii_lowercase for b in ascii_lowercase)]
    backend = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<unk>", "<bos>"])
    return Tokenizer(backend, bos_token="<bos>", affixes=((1,), ()) if bos else None)


@pytest.fixture(scope="session")
def word_tokenizer() -> Callable[[bool], Tokenizer]:
    return make_word_tokenizer


@dataclass
class FakeEngine:
    """A step takes `prefill_s` while it brings first tokens (at most `num_entering` of them), else `decode_s`.

    options: what the engines were started with. short_by: answers end so many tokens too early.
    """

    prefill_s: float = 2.0
    decode_s: float = 0.5
    num_entering: int = 1000
    short_by: int = 0
    now_s: float = 0.0
    closed: bool = False
    options: list[EngineOptions] = field(default_factory=list)
    batches: list[list[EngineRequest]] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    entered: set[str] = field(default_factory=set)

    def clock(self) -> float:
        return self.now_s

    def add(self, requests: list[EngineRequest]) -> None:
        self.batches.append(requests)
        for request in requests:
            assert request.sampling.max_tokens is not None and request.sampling.ignore_eos
            self.left[request.request_id] = request.sampling.max_tokens - self.short_by

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.left.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.left)

    def step(self) -> StepOutput:
        entering = [request_id for request_id in self.left if request_id not in self.entered][: self.num_entering]
        self.now_s += self.prefill_s if entering else self.decode_s
        self.entered.update(entering)
        outputs = []
        for request_id in [request_id for request_id in self.left if request_id in self.entered]:
            self.left[request_id] -= 1
            is_last = self.left[request_id] == 0
            outputs.append(EngineOutput(request_id, [200], finish_reason="length" if is_last else None, num_cached_tokens=1))
            if is_last:
                del self.left[request_id]
        return StepOutput(outputs, SchedulerStats())

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Stands in for every engine that is built; `LLM`, its tokenizer and its client are real."""
    engine = FakeEngine()
    numbers: dict[str, Any] = dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks"), 16)
    info = EngineInfo(
        model="m",
        architecture="fake",
        dtype="float32",
        kv_cache_dtype="float32",
        vocab_size=800,
        max_model_len=4096,
        eos_token_ids=[1],
        max_logprobs=20,
        kv_cache_bytes=0,
        kv_cache_tokens=0,
        max_concurrency=1.0,
        enable_prefix_caching=True,
        **numbers,
    )

    def build(options: EngineOptions) -> tuple[FakeEngine, EngineInfo]:
        engine.options.append(options)
        return engine, info

    front = SimpleNamespace(files=Path("m"), tokenizer=make_word_tokenizer(bos=False), default_sampling={})
    monkeypatch.setattr("halfbyte.engine.build.build_engine", build)
    monkeypatch.setattr("halfbyte.engine.front.load_front", lambda options: front)
    return engine


@pytest.fixture
def bench_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cli.main(["bench", ...])` may run in a test: the report on the machine, which imports torch, is a line."""
    monkeypatch.setattr("halfbyte.entrypoints.bench.results.report", lambda: [("halfbyte", __version__), ("cpu", "a cpu")])
    monkeypatch.setattr("halfbyte.entrypoints.cli.setup_logging", lambda level: None)


@pytest.fixture(scope="session")
def json_tokenizer() -> Tokenizer:
    """Each byte, some pieces of JSON and of words, and </s>, the id after the last piece."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token=None))
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    texts = ['{"name": "cat", "age": 12, "tags": ["the cat", "dogs"]}', '[[1, 22, "a"], {"b": {"c": null}}]', "true false yes no"]
    trained.train_from_iterator(texts * 20, trainer)
    trained.add_special_tokens(["</s>"])
    return Tokenizer(trained, eos_token="</s>")
