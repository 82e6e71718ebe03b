"""Sleep and wake up: the same tokens before and after, at each level, and the memory is the system's in between."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from halfbyte import LLM, SamplingParams
from halfbyte.errors import UserError

CACHE_BYTES = 192 << 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
PROMPTS = ["The capital of France is", "The quick brown fox jumps over the lazy dog. " * 5 + "Then"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model for the reference, which is slow."""
    path = tmp_path_factory.mktemp("llama")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    tokenizer.save(str(path / "tokenizer.json"))
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        num_hidden_layers=2, vocab_size=256, max_position_embeddings=256, initializer_range=0.4, **shape
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=["compiled kernels", "reference"])
def llm(request: pytest.FixtureRequest, tiny: str) -> Iterator[LLM]:
    options: dict[str, Any] = {"max_model_len": 256}
    if request.param == "reference":
        options |= {"model": tiny, "attention_backend": "reference", "dtype": "float32", "max_num_seqs": 4}
        options |= {"kv_cache_memory_bytes": CACHE_BYTES // 4}
    else:
        options |= {"kv_cache_dtype": "fp8_e4m3", "kv_cache_memory_bytes": CACHE_BYTES}
    with closing(LLM(**options)) as opened:
        yield opened


def answers(llm: LLM) -> list[tuple[list[int], int]]:
    """Tokens of each prompt, and how many of the prompt were cached."""
    found = llm.generate([*PROMPTS, PROMPTS[0]], [GREEDY, GREEDY, SEEDED], use_tqdm=False)
    return [(output.outputs[0].token_ids, output.num_cached_tokens or 0) for output in found]


def anonymous_bytes() -> int:
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found.group(1)) << 10


def runner_of(llm: LLM) -> Any:
    client: Any = llm._client
    return client._core.runner


@pytest.mark.parametrize("level", [0, 1, 2])
def test_tokens_are_the_same_and_memory_returns(llm: LLM, level: int) -> None:
    llm.reset_prefix_cache()
    before = answers(llm)
    cached = answers(llm)
    assert [tokens for tokens, _ in cached] == [tokens for tokens, _ in before] and cached[1][1] > 0
    runner = runner_of(llm)
    parts, weight_bytes, cache_bytes = runner._parts, runner.weight_bytes, runner.cache_bytes
    runner._tensors._populating.join()
    gc.collect()
    awake_bytes = anonymous_bytes()
    llm.sleep(level)
    gone_bytes = {0: 0, 1: cache_bytes, 2: cache_bytes + weight_bytes}[level]
    assert llm.is_sleeping and runner.missing == {0: (), 1: ("kv_cache",), 2: ("weights", "kv_cache")}[level]
    assert awake_bytes - anonymous_bytes() >= 0.9 * gone_bytes
    with pytest.raises(UserError, match=r"asleep; call wake_up\(\)"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.sleep(level)
    llm.wake_up()
    assert not llm.is_sleeping and (runner.cache_bytes, runner._parts) == (cache_bytes, parts)
    after = answers(llm)
    assert [tokens for tokens, _ in after] == [tokens for tokens, _ in before]
    if level:
        assert after == before, "the prefix cache was empty again"
    else:
        assert after[1][1] > 0, "at level 0 prefixes stay"


def test_parts_wake_up_in_their_order(llm: LLM) -> None:
    before = answers(llm)
    llm.sleep(2)
    with pytest.raises(UserError, match="wakes up after the weights"):
        llm.wake_up(["kv_cache"])
    llm.wake_up(["weights"])
    assert llm.is_sleeping and runner_of(llm).missing == ("kv_cache",)
    llm.sleep(1)
    assert runner_of(llm).missing == ("weights", "kv_cache"), "a sleep stays as deep as it was"
    llm.wake_up(["weights"])
    llm.wake_up(["kv_cache"])
    llm.wake_up()
    assert not llm.is_sleeping
    assert [tokens for tokens, _ in answers(llm)] == [tokens for tokens, _ in before]


def test_a_checkpoint_that_is_gone_leaves_the_engine_asleep(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = answers(llm)
    runner = runner_of(llm)
    llm.sleep(2)

    def fail() -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(runner, "_reload", fail)
        with pytest.raises(Exception, match="the disk is gone"):
            llm.wake_up()
    assert llm.is_sleeping
    llm.wake_up()
    assert [tokens for tokens, _ in answers(llm)] == [tokens for tokens, _ in before]


@pytest.mark.parametrize(
    ("call", "param"),
    [(lambda llm: llm.sleep(3), "level"), (lambda llm: llm.sleep(True), "level"), (lambda llm: llm.sleep(1, "now"), "mode"),
     (lambda llm: llm.wake_up(["cache"]), "tags")],
)  # fmt: skip
def test_wrong_arguments_are_named(llm: LLM, call: Callable[[LLM], None], param: str) -> None:
    with pytest.raises(UserError) as refused:
        call(llm)
    assert refused.value.param == param and not llm.is_sleeping
