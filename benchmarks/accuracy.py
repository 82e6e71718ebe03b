"""How far each way of storing and computing weights is from float32: KL divergence, agreement of the best token, perplexity.

    python benchmarks/accuracy.py MODEL [--settings dtype=bfloat16 quantization=int8 ...] [--num-tokens 1000] [--text FILE ...]

Every setting reads the same text once, all positions in one prompt, beside float32 with the weights unpacked. A setting is a list
of EngineOptions joined by commas. Prints one line per setting and, with `--out`, one JSON with the commit, machine and versions.
The text is this repository's own prose and code unless another is given; a few thousand tokens of it rank settings, they do
not measure a model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from halfbyte.config import EngineOptions  # noqa: E402
from halfbyte.engine.build import build_engine  # noqa: E402
from halfbyte.engine.front import find_model  # noqa: E402
from halfbyte.engine.tokenizer import load_tokenizer  # noqa: E402
from halfbyte.entrypoints.bench.results import environment, save  # noqa: E402
from halfbyte.types import EngineRequest, SamplingParams  # noqa: E402

REFERENCE = "dtype=float32,quantization=none"
SETTINGS = [
    "dtype=float16",
    "dtype=bfloat16",
    "dtype=bfloat16,quantization=int8",
    "dtype=bfloat16,quantization=int8,cpu_activations=int8",
]
TEXTS = ["README.md", "ARCHITECTURE.md", "engine/scheduler.py"]


def options_of(model: str, setting: str) -> EngineOptions:
    """`dtype=bfloat16,quantization=int8` as EngineOptions."""
    return EngineOptions(model=model, enable_prefix_caching=False, **dict(part.split("=", 1) for part in setting.split(",")))


def read(model: str, setting: str, token_ids: list[int]) -> Tensor:
    """float32 logits [T - 1, V] after every token but the last, as this setting computes them."""
    core, _ = build_engine(options_of(model, setting))
    kept: list[Tensor] = []
    runner: Any = core.runner
    compute = runner.model.compute_logits

    def noted(hidden_NE: Tensor) -> Tensor:
        logits_NV: Tensor = compute(hidden_NE)
        kept.append(logits_NV.clone())
        return logits_NV

    runner.model.compute_logits = noted
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, seed=0, ignore_eos=True)
    request = EngineRequest("text", token_ids, params, [], 0.0, 1)
    core.add([request])
    while core.has_work():
        core.step()
    core.close()
    return torch.cat(kept)[: len(token_ids) - 1]


def compare(logits_NV: Tensor, reference_NV: Tensor, next_N: Tensor) -> dict[str, float]:
    """Means over the positions. KL in nats, of the reference's distribution from this one's; perplexity of the text."""
    log_p_NV, log_q_NV = reference_NV.double().log_softmax(1), logits_NV.double().log_softmax(1)
    return {
        "kl": float((log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(1).mean()),
        "same_best_token": float((logits_NV.argmax(1) == reference_NV.argmax(1)).double().mean()),
        "perplexity": float((-log_q_NV.gather(1, next_N[:, None]).mean()).exp()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--num-tokens", type=int, default=1000)
    parser.add_argument("--text", nargs="+", type=Path, default=[ROOT / name for name in TEXTS])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(find_model(arguments.model, options_of(arguments.model, REFERENCE)))
    text = "\n".join(path.read_text(encoding="utf-8") for path in arguments.text)
    token_ids = tokenizer.encode(text)[: arguments.num_tokens]
    next_N = torch.tensor(token_ids[1:])
    reference_NV = read(arguments.model, REFERENCE, token_ids)
    results = {REFERENCE: compare(reference_NV, reference_NV, next_N)}
    for setting in arguments.settings:
        results[setting] = compare(read(arguments.model, setting, token_ids), reference_NV, next_N)
    for setting, numbers in results.items():
        print(f"{setting:40s}", "  ".join(f"{name} {value:.4f}" for name, value in numbers.items()))
    if arguments.out:
        texts = [str(path.name) for path in arguments.text]
        document = {"benchmark": "accuracy", "model": arguments.model, "num_tokens": len(token_ids), "texts": texts}
        save(arguments.out, document | {"results": results, "environment": environment()})


if __name__ == "__main__":
    main()
