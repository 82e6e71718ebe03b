"""`LLM` as a script uses it: folders and dummy weights, chat, stop strings, auto-fit, refusals, and errors that lose nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from halfbyte import LLM, SamplingParams
from halfbyte.errors import CapacityError, ModelFileError, UserError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = ["the quick brown fox", "jumps over", "a lazy dog sleeps in the warm sun and"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer checkpoint in the form that hubs keep: config, safetensors, tokenizer, template, defaults."""
    path = tmp_path_factory.mktemp("tiny-llama")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(PROMPTS * 3, trainer)
    trained.save(str(path / "tokenizer.json"))
    turns = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template = turns + "{% if add_generation_prompt %}<s>assistant:{% endif %}"
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=trained.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.4,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    (path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.3, "top_p": 0.7, "max_new_tokens": 5, "eos_token_id": [1, 7]})
    )
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    made = LLM(str(folder), dtype="float32", kv_cache_memory_bytes=8 << 20)
    yield made
    made.close()


def test_a_folder_generates_what_transformers_generates(folder: Path, llm: LLM) -> None:
    reference = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for output in outputs:
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([ids])).logits[0]
        assert logits.argmax(-1).tolist()[len(output.prompt_token_ids) - 1 : -1] == output.outputs[0].token_ids
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_defaults_come_from_the_generation_config(llm: LLM) -> None:
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_p, defaults.max_tokens) == (0.3, 0.7, 5)
    assert sorted(llm.info.eos_token_ids) == [1, 7]
    assert len(llm.generate("the", use_tqdm=False)[0].outputs[0].token_ids) <= 5


def test_b50_ignore_eos_holds_for_every_eos_id(llm: LLM) -> None:
    pushed = SamplingParams(temperature=0.0, max_tokens=4, logit_bias={7: 100.0})
    assert llm.generate("the", pushed, use_tqdm=False)[0].outputs[0].finish_reason == "stop"
    assert len(llm.generate("the", pushed.clone(ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids) == 4
    late = llm.generate("the", pushed.clone(min_tokens=3), use_tqdm=False)[0].outputs[0]
    assert len(late.token_ids) >= 3


def test_constraints_that_leave_no_token_are_refused(llm: LLM) -> None:
    impossible = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=1, allowed_token_ids=[7, 1])
    with pytest.raises(UserError, match="min_tokens=1"):
        llm.generate("the", impossible, use_tqdm=False)
    for possible in ({"min_tokens": 0}, {"ignore_eos": True}, {"allowed_token_ids": [7, 9]}):
        assert llm.generate("the", impossible.clone(**possible), use_tqdm=False)[0].outputs[0].finish_reason != "error"


def test_chat_renders_the_models_template(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "the fox"}], GREEDY, use_tqdm=False)[0]
    assert output.prompt == "<s>user: the fox\n<s>assistant:"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)
    both = llm.chat(
        [[{"role": "user", "content": "a"}], [{"role": "user", "content": [{"type": "text", "text": "a"}]}]], GREEDY, False
    )
    assert both[0].outputs[0].token_ids == both[1].outputs[0].token_ids


def test_prompts_in_every_form_agree(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    forms: list[Any] = [
        PROMPTS[0],
        ids,
        {"prompt": PROMPTS[0]},
        {"prompt_token_ids": ids},
        {"prompt": PROMPTS[0], "cache_salt": "x"},
    ]
    answers = [llm.generate(form, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for form in forms]
    assert all(answer == answers[0] for answer in answers)
    assert [o.outputs[0].token_ids for o in llm.generate([ids, ids], GREEDY, use_tqdm=False)] == answers[:2]


def test_a_salt_keeps_prefixes_apart(llm: LLM) -> None:
    prompt = "a lazy dog sleeps in the warm sun and the quick brown fox jumps over a lazy dog"
    cached = [
        llm.generate({"prompt": prompt, "cache_salt": salt}, GREEDY, use_tqdm=False)[0].num_cached_tokens
        for salt in ("p", "q", "p")
    ]
    assert cached[0] == cached[1] == 0 and (cached[2] or 0) > 0


def test_a_wrong_prompt_is_named_and_nothing_is_computed(llm: LLM) -> None:
    width = llm.info.vocab_size
    for prompt, text in (([width], str(width)), ([-1], "-1"), ("", "empty"), ({"text": "x"}, "prompt"), ([1] * 128, "128")):
        with pytest.raises(UserError, match=text):
            llm.generate(["the fox", prompt], GREEDY, use_tqdm=False)  # type: ignore[list-item]
    assert len(llm.generate("the fox", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_a_priority_that_nobody_heeds_is_refused(folder: Path, llm: LLM) -> None:
    with pytest.raises(UserError, match="--scheduling-policy priority"):
        llm.generate(["the", "fox"], GREEDY, use_tqdm=False, priority=[1, 0])
    heeding = LLM(str(folder), dtype="float32", kv_cache_memory_bytes=8 << 20, scheduling_policy="priority", max_num_seqs=1)
    both = heeding.generate(["the", "fox"], GREEDY.clone(n=1), use_tqdm=False, priority=[1, 0])
    assert [o.outputs[0].finish_reason for o in both] == ["length", "length"]
    heeding.close()


def test_max_tokens_none_fills_the_context(llm: LLM) -> None:
    output = llm.generate([3] * 100, GREEDY.clone(max_tokens=None), use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) == 28 and output.finish_reason == "length"


def test_auto_fit_takes_the_longest_that_fits(folder: Path) -> None:
    block_bytes = 2 * 2 * 16 * 2 * 16 * 4  # layers, K and V, tokens, kv heads, head dim, float32
    llm = LLM(str(folder), dtype="float32", max_model_len=-1, kv_cache_memory_bytes=5 * block_bytes)
    assert llm.info.max_model_len == 4 * 16 and llm.info.kv_cache_bytes == 5 * block_bytes
    with pytest.raises(UserError, match="64"):
        llm.generate([3] * 65, GREEDY, use_tqdm=False)
    assert len(llm.generate([3] * 60, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4
    llm.close()
    with pytest.raises(CapacityError, match="--kv-cache-memory-bytes"):
        LLM(str(folder), dtype="float32", kv_cache_memory_bytes=5 * block_bytes)


def test_dummy_weights_need_no_tensors(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    llm = LLM(str(tmp_path), load_format="dummy", dtype="float32", kv_cache_memory_bytes=8 << 20)
    assert len(llm.generate("the fox", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8
    llm.close()
    with pytest.raises(ModelFileError, match="safetensors"):
        LLM(str(tmp_path), dtype="float32")


def test_ids_between_the_logits_width_and_the_tokenizers_length_are_refused(folder: Path, tmp_path: Path) -> None:
    """A tokenizer may know more tokens than the model has logits for; none of them may reach the engine in any field."""
    for name in ("tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    width = max(tokenizer["model"]["vocab"].values()) + 1
    added = {"id": width, "content": "<extra>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    tokenizer["added_tokens"].append(added | {"normalized": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": width}))
    llm = LLM(str(tmp_path), load_format="dummy", dtype="float32", kv_cache_memory_bytes=8 << 20)
    assert llm.info.vocab_size == width and len(llm.get_tokenizer()) == width + 1
    wrong: list[tuple[Any, dict[str, Any]]] = [
        ("the <extra>", {}),
        ([width], {}),
        ("the", {"allowed_token_ids": [1, width]}),
        ("the", {"stop_token_ids": [width]}),
        ("the", {"logit_bias": {width: 1.0}}),
        ("the", {"logprobs": 1, "logprob_token_ids": [width]}),
        ("the", {"bad_words": ["<extra>"]}),
    ]
    for prompt, options in wrong:
        with pytest.raises(UserError, match=str(width)):
            llm.generate(prompt, GREEDY.clone(**options), use_tqdm=False)
    assert len(llm.generate("the", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8
    llm.close()


def test_arguments_that_mean_nothing_here_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="tensor_parallel_size"):
        LLM(str(folder), tensor_parallel_size=2)
    with pytest.raises(UserError, match="no argument 'tensor_paralel'"):
        LLM(str(folder), tensor_paralel=1)
