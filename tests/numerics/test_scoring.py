"""Teacher-forced scoring through the paged cache: the same logits however a text is cut, and no cost where nothing differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from halfbyte import LLM, SamplingParams
from halfbyte.config import EngineOptions
from halfbyte.engine.build import build_engine
from halfbyte.engine.client import InProcessClient
from halfbyte.engine.core import EngineCore
from halfbyte.entrypoints.kv_eval.evaluate import evaluate
from halfbyte.entrypoints.kv_eval.settings import Settings
from halfbyte.errors import CapacityError, UserError
from halfbyte.kernels.cpu.library import KernelsMissing, instruction_sets
from halfbyte.model_runner.scoring import compare, score

OPTIONS = EngineOptions(
    model="smollm2-135m", dtype="float32", max_model_len=128, kv_cache_memory_bytes=32 << 20, max_num_seqs=2, num_threads=1
)
TEXT = "The lamp on the pier was lit at dusk, and the keeper wrote the hour, the wind and the height of the water into his book. "
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def has_kernels() -> bool:
    try:
        instruction_sets()
    except KernelsMissing:
        return False
    return True


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[EngineCore, LLM]]:
    core, info = build_engine(OPTIONS)
    llm = LLM.from_client(InProcessClient(core, info), OPTIONS)
    yield core, llm
    llm.close()


def logits(core: EngineCore, token_ids: list[int], step_tokens: int) -> torch.Tensor:
    runner: Any = core.runner
    steps = list(score(runner, core.scheduler.manager, token_ids, step_tokens))
    assert all(step_NV.shape[0] <= step_tokens and step_NV.dtype == torch.float32 for step_NV in steps)
    return torch.cat(steps)


@pytest.mark.skipif(not has_kernels(), reason="torch's own sums depend on the number of rows")
def test_every_cut_has_the_same_bits(engine: tuple[EngineCore, LLM]) -> None:
    core, llm = engine
    token_ids = llm.get_tokenizer().encode(TEXT)
    whole_NV = logits(core, token_ids, 64)
    assert whole_NV.shape[0] == len(token_ids)
    for step_tokens in (1, 5, 16):
        assert torch.equal(logits(core, token_ids, step_tokens), whole_NV), step_tokens


def test_best_tokens_are_those_that_the_engine_generates(engine: tuple[EngineCore, LLM]) -> None:
    core, llm = engine
    prompt = llm.get_tokenizer().encode(TEXT)
    [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
    answer = output.outputs[0].token_ids
    scored_NV = logits(core, prompt + answer[:-1], 16)
    assert scored_NV[len(prompt) - 1 :].argmax(-1).tolist() == answer


def test_scoring_leaves_nothing_behind(engine: tuple[EngineCore, LLM]) -> None:
    """Rows and blocks come back, also from a text that is not read to its end, and cached prefixes stay what they were."""
    core, llm = engine
    runner: Any = core.runner
    manager = core.scheduler.manager
    prompts = [llm.get_tokenizer().encode(TEXT + word) for word in ("Then", "When", "Nobody")]
    before = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    for _ in range(3):
        unfinished = score(runner, manager, prompts[0], 4)
        next(unfinished)
        unfinished.close()
        logits(core, list(reversed(prompts[1])), 16)
    assert manager.usage == 0.0
    manager.check()
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)] == before


def test_a_text_that_does_not_fit_is_refused() -> None:
    core, _ = build_engine(replace(OPTIONS, max_model_len=32, kv_cache_memory_bytes=None, num_gpu_blocks_override=3))
    runner: Any = core.runner
    try:
        with pytest.raises(CapacityError, match="raise --kv-cache-memory-bytes"):
            list(score(runner, core.scheduler.manager, [5] * 60, 16))
        assert core.scheduler.manager.usage == 0.0
    finally:
        core.close()


def test_compare_is_the_formula() -> None:
    base_NV, other_NV = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]), torch.tensor([[0.5, 1.0, 1.0], [3.0, 0.0, 0.0]])
    scores = compare(base_NV, other_NV, torch.tensor([1, 2]))
    p_NV, q_NV = base_NV.double().softmax(-1), other_NV.double().softmax(-1)
    assert scores.kl_N[0].item() == pytest.approx((p_NV[0] * (p_NV[0] / q_NV[0]).log()).sum().item(), rel=1e-6)
    assert scores.kl_N[1].item() == 0.0
    assert scores.base_nll_N.tolist() == pytest.approx([-p_NV[0, 1].log().item(), -p_NV[1, 2].log().item()], rel=1e-6)
    assert scores.other_nll_N[0].item() == pytest.approx(-q_NV[0, 1].log().item(), rel=1e-6)
    assert scores.agrees_N.tolist() == [False, True]


def test_a_format_costs_nothing_against_itself_and_something_against_another() -> None:
    settings = Settings(baseline="float32", lengths=(48,), retrieval_lengths=(150,), num_retrieval_queries=2, step_tokens=20)
    options = EngineOptions(model="smollm2-135m", dtype="float32", num_threads=1)
    heard: list[str] = []
    report = evaluate(options, ["float32", "bfloat16"], settings, heard.append)
    same, other = report.formats
    assert same.text is not None and other.text is not None
    assert (same.text.kl, same.text.kl_high, same.text.kl_p99, same.text.top1) == (0.0, 0.0, 0.0, 1.0)
    assert same.text.perplexity == same.text.base_perplexity
    assert same.shares == report.baseline.shares
    assert 0.0 < other.text.kl < 1e-3 and other.text.perplexity != other.text.base_perplexity
    assert same.text.num_tokens == 47 * len(report.texts)
    assert (same.bits_per_element, other.bits_per_element) == (32.0, 16.0)
    assert other.tokens_per_gib == 2 * same.tokens_per_gib + 1  # 23,301.69 of them fit, which is not a whole number
    assert any(line.startswith("bfloat16: text") for line in heard)


def test_an_unknown_format_is_an_error() -> None:
    with pytest.raises(UserError, match="kv_cache_dtype|kv-cache-dtype"):
        evaluate(EngineOptions(model="smollm2-135m"), [], Settings(tests=("text",), lengths=(16,), baseline="nothing"))
