"""A conversation has one sequence of ids: in LLM.chat, LLM.generate of its text, over HTTP, in /tokenize, and in transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers

from halfbyte import LLM, SamplingParams
from halfbyte.config import EngineOptions, ServerConfig
from halfbyte.engine.async_engine import AsyncEngine
from halfbyte.engine.build import build_engine
from halfbyte.engine.client import InProcessClient
from halfbyte.engine.front import load_front
from halfbyte.entrypoints.server import build_app

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "the quick brown fox"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "turns": [{"role": "system", "content": "jumps"}, USER, {"role": "assistant", "content": "over"}, USER],
    "call": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "a lazy dog"}],
}
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 8 << 20}
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.fixture(scope="module", params=["post-processor", "flag"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint whose tokenizer adds BOS, in either of the two ways to say so, with a template that writes it too."""
    path = tmp_path_factory.mktemp("adds-bos")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<|turn|>", "<|end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["the quick brown fox jumps over a lazy dog"] * 3, trainer)
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    if request.param == "flag":
        config["add_bos_token"] = True
    else:
        backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaConfig(
        vocab_size=backend.get_vocab_size(), max_position_embeddings=256, bos_token_id=0, eos_token_id=1, **shape
    )
    transformers.LlamaForCausalLM(model).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    made = LLM(str(folder), **OPTIONS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def served(folder: Path) -> dict[str, list[list[int]]]:
    """By conversation, what the server says of its ids: chat, chat and /tokenize with add_special_tokens, /tokenize."""

    async def ask() -> dict[str, list[list[int]]]:
        options = EngineOptions(model=str(folder), **OPTIONS)
        engine = AsyncEngine(InProcessClient(*build_engine(options)), load_front(options).tokenizer)
        transport = httpx.ASGITransport(build_app(engine, ServerConfig()))
        ids: dict[str, list[list[int]]] = {}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for name, messages in CONVERSATIONS.items():
                ids[name] = []
                for special in (False, True):
                    body = {"messages": messages, "add_special_tokens": special}
                    asked = body | {"max_tokens": 1, "return_token_ids": True}
                    chat = await client.post("/v1/chat/completions", json=asked)
                    tokenized = await client.post("/tokenize", json=body)
                    ids[name] += [chat.json()["prompt_token_ids"], tokenized.json()["tokens"]]
        await engine.close()
        return ids

    return asyncio.run(ask())


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_b47_a_conversation_has_the_same_ids_everywhere(
    name: str, folder: Path, llm: LLM, served: dict[str, list[list[int]]]
) -> None:
    chat = llm.chat(CONVERSATIONS[name], ONE_TOKEN, use_tqdm=False)[0]
    ids = chat.prompt_token_ids
    assert ids.count(0) == 1 and ids[0] == 0
    assert llm.generate(chat.prompt or "", ONE_TOKEN, use_tqdm=False)[0].prompt_token_ids == ids
    assert served[name] == [ids] * 4
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    rendered = reference.apply_chat_template(CONVERSATIONS[name], add_generation_prompt=True, tokenize=False)
    assert rendered == chat.prompt
    assert reference(rendered, add_special_tokens=False)["input_ids"] == ids


def test_a_text_without_bos_is_given_one(llm: LLM) -> None:
    plain, begun = llm.generate(["the quick", "<s>the quick"], ONE_TOKEN, use_tqdm=False)
    assert plain.prompt_token_ids == begun.prompt_token_ids
    assert plain.prompt_token_ids.count(0) == 1
