"""Whole models of random weights through `LLM`: tokens per second by KV format at equal memory, and what the host costs.

The shapes are those of Qwen3; the weights mean nothing, the work is the same. Called by `scripts/gpu_check`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch

from benchmarks.gpu.kernels import Row, at_least, at_most
from benchmarks.gpu.timing import Times
from halfbyte import LLM, SamplingParams
from halfbyte.model_runner.runner import ModelRunner

FORMATS = ("bfloat16", "fp8_e4m3", "nvfp4", "kv4")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Qwen3 by its numbers."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int = 151936
    dim: int = 128

    def write(self, folder: Path) -> Path:
        """A checkpoint without weights: its configuration, and a tokenizer of bytes."""
        path = folder / self.name
        path.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
        }
        (path / "config.json").write_text(json.dumps(config))
        made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator([""], tokenizers.trainers.BpeTrainer(initial_alphabet=sorted(alphabet), special_tokens=["</s>"]))
        made.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
        return path


SMALL = ModelShape("qwen3-0.6b-shaped", 28, 1024, 3072, 16, 8)
LARGE = ModelShape("qwen3-8b-shaped", 36, 4096, 12288, 32, 8)
TINY = ModelShape("qwen3-tiny-shaped", 2, 64, 128, 4, 2, vocab=300, dim=64)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that come all at once, of `prompt` tokens in and `output` out."""

    requests: int
    prompt: int
    output: int
    kv_bytes: int

    def prompts(self, vocab: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, min(vocab, 256), (self.requests, self.prompt), generator=generator).tolist()


def serve(
    path: Path, shape: ModelShape, load: Load, kv_format: str, **options: Any
) -> tuple[float, list[list[int]], list[float]]:
    """(tokens per second, the tokens of each request, seconds the device waited for the host before each decode step)."""
    llm = LLM(
        str(path),
        load_format="dummy",
        kv_cache_dtype=kv_format,
        kv_check="off",
        kv_cache_memory_bytes=load.kv_bytes,
        max_model_len=load.prompt + load.output + 1,
        **options,
    )
    params = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True)
    prompts = load.prompts(shape.vocab)
    llm.generate(prompts[:1], params, use_tqdm=False)
    with exposed_host_time() as gaps:
        begin_s = time.perf_counter()
        found = llm.generate(prompts, params, use_tqdm=False)
        took_s = time.perf_counter() - begin_s
    llm.close()
    return load.requests * load.output / took_s, [list(one.outputs[0].token_ids) for one in found], gaps()


@contextmanager
def exposed_host_time() -> Iterator[Any]:
    """Inside, steps are marked on the device's timeline; the function that is given returns the gaps between them, in seconds."""
    if not torch.cuda.is_available():
        yield list
        return
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    execute, sample = ModelRunner.execute, ModelRunner.sample

    def marked_execute(self: ModelRunner, *args: Any) -> None:
        marks.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        marks[-1][0].record()
        execute(self, *args)

    def marked_sample(self: ModelRunner, *args: Any) -> Any:
        found = sample(self, *args)
        marks[-1][1].record()
        return found

    def gaps() -> list[float]:
        torch.cuda.synchronize()
        return [before[1].elapsed_time(after[0]) / 1e3 for before, after in zip(marks, marks[1:], strict=False)]

    ModelRunner.execute, ModelRunner.sample = marked_execute, marked_sample  # type: ignore[method-assign]
    try:
        yield gaps
    finally:
        ModelRunner.execute, ModelRunner.sample = execute, sample  # type: ignore[method-assign]


def equal_memory(folder: Path, shape: ModelShape, load: Load, **options: Any) -> Iterator[Row]:
    """Tokens per second of each KV format in as many bytes of cache."""
    path, base = shape.write(folder), None
    for name in FORMATS:
        rate, _, gaps = serve(path, shape, load, name, **options)
        base = base or rate
        yield at_least("model", f"{shape.name}, {name}", "tokens per second", rate, _ONCE)
        yield at_least("model", f"{shape.name}, {name}", "times bfloat16's rate", rate / base, _ONCE)
        if gaps:
            median = sorted(gaps)[len(gaps) // 2]
            yield at_most("host", f"{shape.name}, {name}", "us between steps", median * 1e6, _ONCE, 100)


def graphs_equal_eager(folder: Path, shape: ModelShape, load: Load, **options: Any) -> Iterator[Row]:
    """The same tokens with device graphs and without. A CPU has no graphs: a dry run shows only that this runs."""
    path = shape.write(folder)
    for name in FORMATS:
        with_graphs = serve(path, shape, load, name, **options)[1]
        eager = serve(path, shape, load, name, enforce_eager=True, **options)[1]
        equal = sum(one == other for one, other in zip(with_graphs, eager, strict=True)) / len(eager)
        yield at_least("graphs", f"{shape.name}, {name}", "of requests equal to eager", equal, _ONCE, 1.0)


_ONCE = Times((1.0,))
