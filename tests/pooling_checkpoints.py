"""Tiny random checkpoints of models that pool, made by transformers: with tokenizers and sentence-transformers' files.

Used by the tests of numbers and of servers; nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import models, pre_tokenizers, processors

NUM_BYTES = 256
SPECIAL = {
    "bert": ("[PAD]", "[CLS]", "[SEP]"),
    "roberta": ("<s>", "<pad>", "</s>"),
    "qwen": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "yes", "no"),
}
VOCAB_SIZE = NUM_BYTES + 8
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}


def write_tokenizer(folder: Path, kind: str) -> None:
    """One token per byte, behind the family's special tokens, which it puts around texts and between pairs of them."""
    special = SPECIAL[kind]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate((*special, *alphabet))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens(list(special))
    around = {
        "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
        "roberta": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
        "qwen": ("$A <|endoftext|>", "$A $B:1 <|endoftext|>"),
    }[kind]
    known = [(text, index) for index, text in enumerate(special)]
    backend.post_processor = processors.TemplateProcessing(single=around[0], pair=around[1], special_tokens=known)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "bert": {"tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"},
        "roberta": {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"},
        "qwen": {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>", "add_bos_token": False},
    }[kind]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save(folder: Path, model: torch.nn.Module, kind: str, **config: Any) -> Path:
    """A folder with the model's weights, its configuration (with `config` on top) and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)  # type: ignore[operator]
    write_tokenizer(folder, kind)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def write_modules(folder: Path, mode: str, *, normalize: bool, dense: Mapping[str, int] | None = None) -> None:
    """sentence-transformers' files: pooling by `mode`, linear layers (activation -> size), a norm."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense or {}), *["Normalize"] * normalize]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    size = json.loads((folder / "config.json").read_text()).get("hidden_size", 32)
    _write(folder / "1_Pooling", {"word_embedding_dimension": size, f"pooling_mode_{mode}": True})
    generator = torch.Generator().manual_seed(1)
    for index, (activation, out) in enumerate((dense or {}).items(), start=2):
        config = {"in_features": size, "out_features": out, "bias": True, "activation_function": activation}
        _write(folder / f"{index}_Dense", config)
        weights = {
            "linear.weight": torch.randn(out, size, generator=generator),
            "linear.bias": torch.randn(out, generator=generator),
        }
        save_file(weights, folder / f"{index}_Dense" / "model.safetensors")
        size = out


def _write(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def make_encoder(folder: Path, family: str, *, labels: int | None = None, seed: int = 0, **config: Any) -> Path:
    """A tiny encoder: Bert, Roberta, XLMRoberta, DistilBert or ModernBert. labels: of a classifier, None for the bare model."""
    import transformers

    torch.manual_seed(seed)
    kind = "roberta" if "Roberta" in family else "bert"
    given = dict(SMALL)
    if family == "DistilBert":
        given = {"vocab_size": VOCAB_SIZE, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "initializer_range": 0.3}
    if family == "ModernBert":
        given |= {"num_hidden_layers": 4, "local_attention": 8, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
        given |= {"bos_token_id": 1, "eos_token_id": 2}
    given["max_position_embeddings"] = 66 if kind == "roberta" else 64
    given |= {"type_vocab_size": 1} if kind == "roberta" else {}
    made = getattr(transformers, f"{family}Config")(**given | ({} if labels is None else {"num_labels": labels}) | config)
    model = getattr(transformers, f"{family}Model" if labels is None else f"{family}ForSequenceClassification")(made)
    return save(folder, model.eval(), kind)


def make_decoder(
    folder: Path, family: str, ending: str = "ForCausalLM", *, labels: int = 1, seed: int = 0, **config: Any
) -> Path:
    """A tiny decoder: Llama, Mistral, Qwen2, Qwen3 or Gemma3Text, with any of its heads."""
    import transformers

    torch.manual_seed(seed)
    given = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": VOCAB_SIZE - 1}
    given |= {"num_labels": labels} if ending == "ForSequenceClassification" else {}
    given |= {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]} if family == "Gemma3Text" else {}
    made = getattr(transformers, f"{family}Config")(**given | config)
    name = "Gemma3" if (family, ending) == ("Gemma3Text", "ForCausalLM") else family
    return save(folder, getattr(transformers, f"{name}{ending}")(made).eval(), "qwen")
