"""Equal tokens in every KV format: cached or not, chunked or whole, preempted or not, alone or among others, in a full pool.

On a real model and on a random hybrid one, whose sliding layers drop blocks. Tokens and log probabilities, as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from halfbyte import LLM, RequestOutput, SamplingParams
from halfbyte.engine import kv_calibration
from halfbyte.kernels.cpu.library import KernelsMissing, instruction_sets
from halfbyte.kvcache.formats import FORMATS

try:
    instruction_sets()
except KernelsMissing as reason:
    pytest.skip(str(reason), allow_module_level=True)

NAMES = [name for name in FORMATS if not name.endswith("_mla")] + ["k:fp8,v:nvfp4"]
TAIL = "The quick brown fox jumps over the lazy dog and runs into the wood. " * 2
PROMPTS = [
    "The capital of France is",
    "Once upon a time in a small village by the sea, there lived an old fisherman who " + TAIL,
    "Water boils at",
    TAIL + "Then",
    TAIL + "But",
    "List three colours: " * 12,
]
ASK = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, ignore_eos=True)
OPTIONS: dict[str, Any] = {"max_model_len": 128, "kv_check": "off"}
Answer = tuple[list[int], list[dict[int, float]]]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random checkpoint of six layers, of which the third and sixth see everything and the others 40 tokens."""
    path = tmp_path_factory.mktemp("tiny-gemma3")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(PROMPTS, trainer)
    trained.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=trained.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=40,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
    )
    transformers.Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Calibrations are made once for this module, and kept apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setattr(kv_calibration, "cache_folder", lambda: folder)
        patch.setattr(kv_calibration, "MAX_TOKENS", 1024)
        yield


def open_llm(model: str, name: str, **options: Any) -> closing[LLM]:
    return closing(LLM(model, kv_cache_dtype=name, **(OPTIONS | options)))


def answers(outputs: list[RequestOutput]) -> list[Answer]:
    found = []
    for output in outputs:
        assert output.outputs[0].logprobs is not None
        logprobs = [{token: entry.logprob for token, entry in at.items()} for at in output.outputs[0].logprobs]
        found.append((output.outputs[0].token_ids, logprobs))
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", ["smollm2-135m", "hybrid"])
def test_a_request_gets_the_same_bits_whatever_happens_beside_it(model: str, name: str, hybrid: str) -> None:
    path = hybrid if model == "hybrid" else model
    with open_llm(path, name, enable_prefix_caching=False) as llm:
        alone = [answers(llm.generate([prompt], ASK, use_tqdm=False))[0] for prompt in PROMPTS]
    small = {"max_num_batched_tokens": 48, "max_num_seqs": 6}
    with open_llm(path, name, **small) as llm:
        first = llm.generate(PROMPTS, ASK, use_tqdm=False)  # chunks of prompts beside decodes
        again = llm.generate(PROMPTS, ASK, use_tqdm=False)
        assert sum(output.num_cached_tokens or 0 for output in again) > 0, "nothing was found in the prefix cache"
        assert answers(first) == alone
        assert answers(again) == alone
        info = llm.info
    num_blocks = 1 + round((info.num_blocks - 1) / info.max_concurrency)  # one request of the greatest length
    with open_llm(path, name, num_gpu_blocks_override=num_blocks, **small) as llm:
        tight = llm.generate(PROMPTS, ASK, use_tqdm=False)
        assert llm.num_preemptions > 0, "the pool was never short"
        assert answers(tight) == alone
