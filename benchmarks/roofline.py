"""What the machine allows at most in each case of a comparison, and which part of that each engine reaches.

    python benchmarks/roofline.py RESULT.json [--model MODEL] [--plot out.png]

RESULT.json is what `compare.py --out` wrote; it holds the machine's limits. `costs` says what a model needs per step; a step
cannot be faster than its bytes over the memory's speed, nor than its arithmetic over the peak of float32 multiply-adds, and the
larger of both is the limit. Counted are the bytes and operations that no engine can do without, with the weights as the first
engine has them. An engine that computes in a faster unit than float32's can pass the limit where arithmetic bounds.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compare import Case  # noqa: E402
from halfbyte.entrypoints.bench import plot  # noqa: E402
from halfbyte.errors import HalfbyteError, UserError  # noqa: E402
from halfbyte.model_runner.decoder_config import DecoderConfig, config_from_files  # noqa: E402
from halfbyte.model_runner.gguf import GGUFFile  # noqa: E402
from halfbyte.model_runner.gguf_config import ROPE_FACTORS, hf_name  # noqa: E402
from halfbyte.model_runner.safetensors_files import check_folder  # noqa: E402
from halfbyte.model_runner.source import ModelFiles, locate  # noqa: E402

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Types of one number after the other, which an engine can load in another dtype; the rest are blocks, which stay as they are.
DENSE_TYPES = {"F64", "F32", "F16", "BF16"}
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a model's files, under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model needs, whoever runs it. A key is one token of a context in one layer.

    weight_bytes: all weights, the head included, the embedding not (a token reads one row of it) unless it is the head too.
    body_flops: per token, 2 for each weight of a matrix in the layers. head_flops: the same of the head, per token whose logits
    are wanted. kv_key_bytes: K and V of a key. attention_key_flops: of a query against a key, in all heads: 2 x head dim for
    the score and 2 x head dim for its part of the output. windows: of each layer, None where it sees the whole context.
    """

    weight_bytes: int
    body_flops: int
    head_flops: int
    kv_key_bytes: int
    attention_key_flops: int
    windows: tuple[int | None, ...]

    @property
    def kv_token_bytes(self) -> int:
        """K and V of a token in all layers."""
        return self.kv_key_bytes * len(self.windows)

    def num_keys(self, context: int) -> int:
        """What a token sees that is the last of `context` tokens, over all layers."""
        return sum(context if window is None else min(context, window) for window in self.windows)


def costs(files: ModelFiles, dtype: str = "auto", kv_cache_dtype: str = "auto") -> Costs:
    """The costs of a model's folder or .gguf file. dtype: of dense weights, auto as stored; kv_cache_dtype: auto the model's."""
    config = config_from_files(files)
    return costs_of(list(stored_tensors(files)), config, dtype, kv_cache_dtype)


def costs_of(tensors: Sequence[StoredTensor], config: DecoderConfig, dtype: str, kv_cache_dtype: str) -> Costs:
    """Norms and biases count as bytes; the arithmetic of them, of activations and of rotations is left out: it is about 1 %."""
    unread = HEAD if config.tie_embeddings else EMBEDDING
    head = EMBEDDING if config.tie_embeddings else HEAD
    read = [tensor for tensor in tensors if not tensor.name.endswith(unread)]
    matrices = [tensor for tensor in read if len(tensor.shape) == 2 and not tensor.name.endswith(head)]
    kv_dtype = next(name for name in (kv_cache_dtype, dtype, config.checkpoint_dtype) if name != "auto")
    return Costs(
        weight_bytes=sum(_num_bytes(tensor, dtype) for tensor in read),
        body_flops=2 * sum(math.prod(tensor.shape) for tensor in matrices),
        head_flops=2 * config.vocab_size * config.hidden_size,
        kv_key_bytes=2 * config.num_kv_heads * config.head_dim * ITEM_BYTES[kv_dtype],
        attention_key_flops=4 * config.num_heads * config.head_dim,
        windows=config.layer_windows,
    )


def _num_bytes(tensor: StoredTensor, dtype: str) -> int:
    if dtype == "auto" or tensor.type_name not in DENSE_TYPES:
        return tensor.num_bytes
    return math.prod(tensor.shape) * ITEM_BYTES[dtype]


def stored_tensors(files: ModelFiles) -> Iterator[StoredTensor]:
    """From the headers alone: no weight is read."""
    if files.kind == "gguf":
        with GGUFFile(files.path) as file:
            for name, info in file.tensors.items():
                if name != ROPE_FACTORS:
                    yield StoredTensor(hf_name(name, file.architecture), info.shape, info.type_name, info.num_bytes)
        return
    for tensors in check_folder(files.path).values():
        for name, tensor in tensors.items():
            yield StoredTensor(name, tensor.shape, tensor.dtype, tensor.end - tensor.begin)


@dataclass(frozen=True, slots=True)
class Limit:
    """The most tokens per second, and what bounds them."""

    tokens_per_s: float
    bound: str


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine can do: `halfbyte.kernels.cpu.limits`."""

    read_bytes_per_s: float
    flops_per_s: float

    def limit(self, num_tokens: int, steps: Sequence[tuple[float, float]]) -> Limit:
        """Of steps (bytes, operations) that make `num_tokens` together. The bound is the one that holds for most of the time."""
        seconds = {"memory": 0.0, "arithmetic": 0.0}
        for num_bytes, num_flops in steps:
            memory_s, arithmetic_s = num_bytes / self.read_bytes_per_s, num_flops / self.flops_per_s
            seconds["memory" if memory_s >= arithmetic_s else "arithmetic"] += max(memory_s, arithmetic_s)
        return Limit(num_tokens / sum(seconds.values()), max(seconds, key=lambda name: seconds[name]))


def decode_limit(model: Costs, machine: Machine, batch_size: int, prompt_len: int, output_len: int) -> Limit:
    """Of the tokens after the first of each request, as `compare.py` counts them: output_len - 1 steps over a growing context.

    A step reads all weights once, whatever the batch, and K and V of each request's context; it computes one token per request,
    logits included.
    """
    steps = []
    for context in range(prompt_len + 1, prompt_len + output_len):
        keys = batch_size * model.num_keys(context)
        num_bytes = model.weight_bytes + keys * model.kv_key_bytes
        steps.append((num_bytes, batch_size * (model.body_flops + model.head_flops) + keys * model.attention_key_flops))
    return machine.limit(batch_size * len(steps), steps)


def prefill_limit(model: Costs, machine: Machine, batch_size: int, prompt_len: int) -> Limit:
    """Of prompt tokens in one step: the weights are read once, K and V of the prompts are written, and each query meets the keys
    up to its own. Only the last token of each prompt needs the head."""
    keys = batch_size * sum(model.num_keys(context) for context in range(1, prompt_len + 1))
    num_bytes = model.weight_bytes + batch_size * prompt_len * model.kv_token_bytes
    num_flops = batch_size * (prompt_len * model.body_flops + model.head_flops) + keys * model.attention_key_flops
    return machine.limit(batch_size * prompt_len, [(num_bytes, num_flops)])


@dataclass(frozen=True, slots=True)
class Row:
    """One case: the limit of what it is about, and the median speed of each engine that took part."""

    case: Case
    limit: Limit
    tokens_per_s: dict[str, float]


def rows(result: Mapping[str, Any], model: Costs, machine: Machine) -> list[Row]:
    """The cases of a comparison: about decode where a request has several output tokens, else about prefill."""
    found = []
    for name, metrics in result["summary"].items():
        case = Case.from_name(name, result["spec"]["prompt_len"], result["spec"]["output_len"])
        if case.output_len > 1:
            limit = decode_limit(model, machine, case.batch_size, case.prompt_len, case.output_len)
        else:
            limit = prefill_limit(model, machine, case.batch_size, case.prompt_len)
        speeds = metrics["decode" if case.output_len > 1 else "prefill"]
        found.append(Row(case, limit, {engine: row["tokens_per_s"]["median"] for engine, row in speeds.items()}))
    return found


def table_lines(found: Sequence[Row]) -> Iterator[str]:
    """A Markdown table: the limit, what bounds it, and each engine's median with its share of the limit."""
    engines = list(dict.fromkeys(engine for row in found for engine in row.tokens_per_s))
    yield f"| case | limit, tokens/s | bound by | {' | '.join(engines)} |"
    yield "|---|---:|---|" + "---:|" * len(engines)
    for row in found:
        speeds = [row.tokens_per_s.get(engine) for engine in engines]
        cells = ["" if speed is None else f"{speed:.1f} ({speed / row.limit.tokens_per_s:.0%})" for speed in speeds]
        yield f"| {row.case.name} | {row.limit.tokens_per_s:.1f} | {row.limit.bound} | {' | '.join(cells)} |"


def about_lines(name: str, model: Costs, machine: Machine) -> Iterator[str]:
    """The numbers that the limits are made of."""
    yield (
        f"{name}: {model.weight_bytes / 1e6:.1f} MB of weights per step, {model.kv_token_bytes} bytes of K and V per token, "
        f"{(model.body_flops + model.head_flops) / 1e9:.3f} GFLOP per token ({model.body_flops / 1e9:.3f} without the head), "
        f"{model.attention_key_flops * len(model.windows) / 1e6:.3f} MFLOP of attention per token and token of context"
    )
    yield (
        f"machine: {machine.read_bytes_per_s / 1e9:.1f} GB/s from memory, {machine.flops_per_s / 1e9:.1f} GFLOP/s of float32 "
        f"multiply-adds"
    )


def draw(found: Sequence[Row], model: Costs, machine: Machine, title: str, path: Path) -> None:
    """Decode speed over the batch size, a line per engine, and the limit above them. The ending of `path` says the format."""
    from matplotlib.figure import Figure

    decodes = sorted((row for row in found if row.case.output_len > 1), key=lambda row: row.case.batch_size)
    if not decodes:
        raise UserError("--plot: the result has no decode case, such as d8, with more than one output token")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    case = decodes[0].case
    sizes = range(1, decodes[-1].case.batch_size + 1)
    limits = [decode_limit(model, machine, size, case.prompt_len, case.output_len).tokens_per_s for size in sizes]
    axes.plot(sizes, limits, color="black", linestyle="--", label="limit of the machine")
    for engine in dict.fromkeys(engine for row in decodes for engine in row.tokens_per_s):
        points = [(row.case.batch_size, row.tokens_per_s[engine]) for row in decodes if engine in row.tokens_per_s]
        axes.plot(*zip(*points, strict=True), marker="o", label=engine)
    axes.set_xlabel("batch size")
    axes.set_ylabel("decode (tokens/s)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise HalfbyteError(f"--plot: cannot write {path}: {error}") from None


def read_result(path: Path) -> dict[str, Any]:
    """A result of `compare.py` that holds limits."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(result, dict) or result.get("benchmark") != "compare":
        raise UserError(f"{path} is not a result of benchmarks/compare.py --out")
    if not result.get("limits"):
        raise UserError(f"{path} holds no limits of its machine: the compiled CPU kernels were missing when it was made")
    return result


def settings_of(result: Mapping[str, Any], model: str | None) -> tuple[str, str, str]:
    """(model, dtype, kv_cache_dtype) of the first engine, to which the others are compared. `model` stands in for its own."""
    name, entry = next(iter(result["spec"]["engines"].items()))
    options = entry.get("options", {})
    if options.get("quantization", "auto") != "auto":
        raise UserError(
            f"{name} makes weights of its own (quantization {options['quantization']}): their bytes are not known here"
        )
    found = model or entry["model"]
    if "{" in found:
        raise UserError(f"the model of {name} is {found}: say where that is with --model")
    for dtype in (entry.get("dtype", "auto"), options.get("kv_cache_dtype", "auto")):
        if dtype not in ("auto", *ITEM_BYTES):
            raise UserError(f"{name}: dtype {dtype!r} is not one of auto, {', '.join(ITEM_BYTES)}")
    return found, entry.get("dtype", "auto"), options.get("kv_cache_dtype", "auto")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path, help="what compare.py --out wrote")
    parser.add_argument("--model", help="folder, .gguf file or catalogue name (default: that of the first engine)")
    parser.add_argument("--plot", type=Path, help="draw decode speed over the batch size into this file")
    arguments = parser.parse_args(argv)
    try:
        if arguments.plot is not None:
            plot.check_path(arguments.plot)
        result = read_result(arguments.result)
        name, dtype, kv_cache_dtype = settings_of(result, arguments.model)
        model = costs(locate(name), dtype, kv_cache_dtype)
        machine = Machine(result["limits"]["read_bytes_per_s"], result["limits"]["flops_per_s"])
        found = rows(result, model, machine)
        print("\n".join((*about_lines(Path(name).name, model, machine), "", *table_lines(found))))
        if arguments.plot is not None:
            draw(found, model, machine, Path(name).name, arguments.plot)
    except UserError as error:
        print(f"roofline: error: {error}", file=sys.stderr)
        return 2
    except HalfbyteError as error:
        print(f"roofline: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
