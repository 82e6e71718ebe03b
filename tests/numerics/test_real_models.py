"""Real checkpoints: greedy output equals transformers' greedy output token for token, and so do the logits within tolerance.

Our side is the whole engine: `LLM` generates all prompts as one batch. transformers then reads each prompt with our output in
one pass: where its argmax equals our token at every generated position, its own greedy decoding would have produced the same
tokens, by induction. The transformers model gets its configuration and weights from what we read, so that both compute with
the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

from halfbyte import LLM, SamplingParams
from halfbyte.engine.tokenizer import load_tokenizer
from halfbyte.kernels.attention import get_backend
from halfbyte.model_runner.checkpoint import checkpoint_tensors
from halfbyte.model_runner.decoder_config import DecoderConfig, config_from_files
from halfbyte.model_runner.loader import load_model
from halfbyte.model_runner.source import ModelFiles, locate

NUM_PROMPTS = 20
NUM_TOKENS = 64
LONGEST_WINDOW = 512
LONG_PROMPT_WORDS = 460
MODELS = ["smollm2-135m", "gemma3-270m"]
TEXTS = [
    "The capital of France is",
    "Water boils at",
    "Once upon a time in a small village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "In 1969, the first humans",
    "Dear Sir or Madam,",
    "A haiku about autumn:\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "The largest planet of the solar system",
    "La tour Eiffel se trouve",
    "Die Hauptstadt von Deutschland ist",
    "SELECT name, age FROM users WHERE",
    "Ingredients for pancakes: flour,",
    "The opposite of hot is",
    "Q: Who wrote Hamlet?\nA:",
    "Photosynthesis is the process by which",
    "<html>\n<head>\n<title>",
    "She opened the letter and",
]


@dataclass
class Pair:
    """The same checkpoint three times: in our engine, ours over a paged cache by hand (for its logits), and transformers'."""

    llm: LLM
    paged: Any
    reference: Any
    prompts: dict[str, list[int]]


def _shared_settings(config: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": 0,
        "attn_implementation": "eager",
    }


def _reference_model(config: DecoderConfig) -> Any:
    settings = _shared_settings(config)
    if config.architecture == "LlamaForCausalLM":
        rope = {"rope_type": "default", "rope_theta": config.rope.theta}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, rope_parameters=rope))
    assert config.architecture.startswith("Gemma3") and config.local_rope is not None
    window = next(w for w in config.layer_windows if w is not None)
    text_config = transformers.Gemma3TextConfig(
        **settings,
        query_pre_attn_scalar=round(config.attention_scale**-2),
        sliding_window=window,
        layer_types=["full_attention" if w is None else "sliding_attention" for w in config.layer_windows],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": config.rope.theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": config.local_rope.theta},
        },
        final_logit_softcapping=config.final_soft_cap,
        attn_logit_softcapping=config.attn_soft_cap,
    )
    return transformers.Gemma3ForCausalLM(text_config)


def _prompts(files: ModelFiles) -> dict[str, list[int]]:
    """The texts as token ids, and one prompt that is longer than any sliding window, in another order of words."""
    tokenizer = load_tokenizer(files)
    prompts = {text: tokenizer.encode(text) for text in TEXTS}
    words = " ".join(TEXTS).split()
    text = " ".join(words[i * 7 % len(words)] for i in range(LONG_PROMPT_WORDS))
    prompts["long"] = tokenizer.encode(text)
    assert len(prompts) == NUM_PROMPTS and len(prompts["long"]) > LONGEST_WINDOW
    return prompts


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on cores that others use wait for each other most of the time: several times slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, paged_model: Any) -> Pair:
    files = locate(request.param)
    config = config_from_files(files, {})
    model, report = load_model(files, config, "float32", "cpu", "auto", get_backend("reference"))
    assert not report.unused
    reference = _reference_model(config).eval()
    loaded = reference.load_state_dict(dict(checkpoint_tensors(files)), strict=False)
    assert not loaded.unexpected_keys
    assert set(loaded.missing_keys) <= {"lm_head.weight"}
    reference.tie_weights()
    prompts = _prompts(files)
    num_tokens = sum(len(ids) + NUM_TOKENS for ids in prompts.values())
    paged = paged_model(model, block_size=16, num_tokens=num_tokens, num_requests=len(prompts))
    llm = LLM(request.param, dtype="float32", max_model_len=2048, kv_cache_memory_bytes=512 << 20, num_threads=1)
    return Pair(llm, paged, reference.float(), prompts)


def test_greedy_tokens_and_logits_equal_transformers(pair: Pair, tolerances: dict[str, float]) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = pair.llm.generate(list(pair.prompts.values()), greedy, use_tqdm=False)
    outputs = {name: answer.outputs[0].token_ids for name, answer in zip(pair.prompts, answers, strict=True)}
    assert all(len(tokens) == NUM_TOKENS for tokens in outputs.values())
    for name, prompt in pair.prompts.items():
        ids = prompt + outputs[name][:-1]
        with torch.inference_mode():
            theirs = pair.reference(torch.tensor([ids]), use_cache=False, logits_to_keep=NUM_TOKENS).logits[0]
        ours = pair.paged.step({name: ids}, keep=NUM_TOKENS)[name]
        pair.paged.release(name)
        assert theirs.argmax(-1).tolist() == outputs[name], name
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        assert error <= tolerances["real_model_fp32"], name
